"""The suites of a single-rank engine on engines of several ranks: `./test --ranks pp2 tests/test_traces.py`.

Every engine that `conftest.start` starts then has these sizes; what a test says and expects stays as it is.
"""

from __future__ import annotations

SIZES = {
    "pp2": {"pipeline_parallel_size": 2},
    "tp2": {"tensor_parallel_size": 2},
    "pp2tp2": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
}

_IN_PROCESS = "its engine runs in the process of the test, which reaches into its one worker"
_CALIBRATED = "its bounds are those of one worker's memory; test_pipeline.py has the same for several"
_OWN_PROCESS = "its engines are started by a script of its own; test_ranks_lifecycle.py has the same for several ranks"

# Beginnings of node ids, from the test's file on, and why what they name does not apply.
NOT_APPLICABLE = {
    "test_plan_cache.py": _IN_PROCESS,
    "test_plan_engine.py": _IN_PROCESS,
    "test_plan_stock.py": _IN_PROCESS,
    "test_lifecycle.py::test_ctrl_c_leaves_the_engine_usable_and_then_nothing_behind": _OWN_PROCESS,
    "test_lifecycle.py::test_a_killed_client_takes_its_workers_with_it": _OWN_PROCESS,
    "test_lifecycle.py::test_preempted_requests_are_as_if_they_had_run_alone": _OWN_PROCESS,
    "test_lifecycle.py::test_500_traces_leave_memory_flat": _CALIBRATED,
}

# What CI runs on several ranks: pytest's arguments. Each behaviour once, of the kinds that ranks change.
SUBSET = [
    "-k",
    "not hf",
    "tests/test_traces.py::test_b1_every_accessor_at_every_layer_equals_transformers",
    "tests/test_traces.py::test_b3_what_is_written_to_a_site_is_what_the_model_goes_on_with",
    "tests/test_traces.py::test_f1_of_several_prompts_each_invoke_has_its_own_rows_and_only_one_is_edited",
    "tests/test_traces.py::test_f1_barrier_carries_an_activation_from_one_prompt_to_another",
    "tests/test_traces.py::test_f1_cache_holds_what_modules_return",
    "tests/test_saves.py::test_a1_saves_of_every_step_stay_apart",
    "tests/test_errors.py::test_f3_out_of_order_is_raised_within_a_second",
    "tests/test_errors.py::test_a3_several_failing_invokes_each_have_their_error",
    "tests/test_plans.py::test_d1_every_site_is_steered",
    "tests/test_plans.py::test_d4_every_site_is_captured",
    "tests/test_plans.py::test_d2_each_prompt_has_its_own_plan_and_no_other_sees_it",
    "tests/test_plans.py::test_e1_e9_a_recorded_run_moves_the_answer",
    "tests/test_plans.py::test_a_trace_sees_a_site_after_the_plans_edits",
]


def why_not(node: str) -> str | None:
    """Why the test with this node id has nothing to say about several ranks, or None."""
    name = node.rpartition("tests/")[2]
    return next((why for start, why in NOT_APPLICABLE.items() if name.startswith(start)), None)
