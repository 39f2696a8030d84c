"""The suites of a single-rank engine on engines of several ranks: `./test --ranks pp2 tests/models/test_traces.py`.

Every engine that `conftest.start` starts then has these sizes; what a test says and expects stays as it is.
"""

from __future__ import annotations

from pathlib import Path

SIZES = {
    "pp2": {"pipeline_parallel_size": 2},
    "tp2": {"tensor_parallel_size": 2},
    "pp2tp2": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
}

_IN_PROCESS = "its engine runs in the process of the test, which reaches into its one worker"
_CALIBRATED = "its bounds are those of one worker's memory; test_pipeline.py has the same for several"
_SCRIPT = "its engine is started by a script of its own, on one rank"
_OWN_PROCESS = "its engines are started by a script of its own; test_ranks_lifecycle.py has the same for several ranks"

# Beginnings of node ids, from the test's file on, and why what they name does not apply.
NOT_APPLICABLE = {
    "test_plan_cache.py": _IN_PROCESS,
    "test_plan_engine.py": _IN_PROCESS,
    "test_plan_stock.py": _IN_PROCESS,
    "test_lifecycle.py::test_ctrl_c_leaves_the_engine_usable_and_then_nothing_behind": _SCRIPT,
    "test_lifecycle.py::test_a_killed_client_takes_its_workers_with_it": _OWN_PROCESS,
    "test_lifecycle.py::test_preempted_requests_are_as_if_they_had_run_alone": _OWN_PROCESS,
    "test_lifecycle.py::test_memory_is_flat_over_500_requests": _CALIBRATED,
}

# All that traces and plans do on one rank. Engines that compile, and those of single tests, by `./test --ranks`.
SUITES = {
    "traces": ["tests/models/test_traces.py"],
    "generations": ["tests/models/test_steps.py", "tests/engine/test_behind.py"],
    "own engines": [
        "tests/engine/test_prefix_and_chunks.py",
        "tests/engine/test_async.py",
        "tests/engine/test_held_weights.py",
    ],
    "results": ["tests/models/test_saves.py", "tests/models/test_errors.py", "tests/models/test_plans.py"],
}


def why_not(node: str) -> str | None:
    """Why the test with this node id has nothing to say about several ranks, or None."""
    file, _, test = node.partition("::")
    name = f"{Path(file).name}::{test}"
    return next((why for start, why in NOT_APPLICABLE.items() if name.startswith(start)), None)
