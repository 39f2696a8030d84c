"""What the scheduler does with a request whose plan the worker refuses (D8). No engine: vLLM's own scheduler is told which requests end.

Rows D5, E3, F5, G3, G8.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec import structs

vllm = pytest.importorskip("vllm")

from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.engine import FinishReason  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec  # noqa: E402
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

from midstream import Capture, Clamp, Consumer, Steer, demo_model  # noqa: E402
from midstream.engine.admission import admitted  # noqa: E402
from midstream.engine.launch import WORKER  # noqa: E402
from midstream.engine.prefix_cache import AcceptedPlans  # noqa: E402
from midstream.engine.scheduler import make_scheduler  # noqa: E402
from midstream.errors import PlanError  # noqa: E402
from midstream.plan.values import Named, Plan  # noqa: E402
from midstream.runtime.request import (  # noqa: E402
    PlanRequest,
    StepEnds,
    TraceRequest,
    packed,
    unpacked,
)
from midstream.settings import Settings  # noqa: E402

BLOCK, BUDGET, PROMPT = 16, 32, 100
HASHER = get_request_block_hasher(BLOCK, sha256)
REASON = "no such vector"
from_wire = Plan.from_wire


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def scheduler(request: pytest.FixtureRequest) -> Any:
    """A step takes 32 tokens, so that a prompt of 100 takes four."""
    init_none_hash(sha256)
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
    cache.num_gpu_blocks = 64
    config = VllmConfig(
        model_config=ModelConfig(model=demo_model(), dtype="float32", max_model_len=256, skip_tokenizer_init=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=BUDGET,
            max_model_len=256,
            enable_chunked_prefill=True,
            async_scheduling=request.param,
            is_encoder_decoder=False,
        ),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
    )
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    blocks = KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return make_scheduler(
        config,
        kv_cache_config=blocks,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
    )


def steer() -> Steer:
    """One that no engine has seen."""
    return Steer("resid_post", layers=[3], vector=torch.randn(256))


def planned(name: str, *edits: Steer, tokens: int = PROMPT, **params: Any) -> Request:
    carried = PlanRequest(packed(Plan.of(edits or (steer(),))), 8, checked=True).for_scheduler(tokens, 8, "cpu")
    extra = carried.to_extra_args()
    sampling = vllm.SamplingParams(max_tokens=4, extra_args=extra, **params)
    return Request(name, list(range(10, 10 + tokens)), sampling, None, block_hasher=HASHER)


def finish(scheduler: Any, step: Any, ends: StepEnds | None = None) -> list[Any]:
    """The outputs of a step in which no prompt came to its end."""
    names = list(step.num_scheduled_tokens)
    output = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: i for i, name in enumerate(names)},
        sampled_token_ids=[[] for _ in names],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )
    if ends is not None:
        output.midstream = ends  # type: ignore[attr-defined]
    return [each for client in scheduler.update_from_output(step, output).values() for each in client.outputs]


def refuse(scheduler: Any) -> list[Any]:
    scheduler.add_request(planned("bad", min_tokens=3))
    first, second = scheduler.schedule(), scheduler.schedule()  # the second is in flight when the first comes back
    outputs = finish(scheduler, first, StepEnds(errors={"bad": REASON}))
    assert finish(scheduler, second) == []
    return outputs


def test_a_refused_plan_ends_its_request_in_the_middle_of_its_prompt(scheduler: Any) -> None:
    (output,) = refuse(scheduler)
    assert (output.request_id, output.finish_reason, output.stop_reason) == ("bad", FinishReason.ERROR, REASON)
    assert output.new_token_ids == []
    assert not scheduler.requests and not scheduler.running
    assert scheduler.schedule().finished_req_ids == {"bad"}


def cleared(scheduler: Any, *requests: Request) -> tuple[set[int], set[int]]:
    """The blocks that these requests are given, and those that the workers are told to clear."""
    given, zeroed = set[int](), set[int]()
    for request in requests:
        scheduler.add_request(request)
    while any(request.num_computed_tokens < PROMPT for request in requests):
        step = scheduler.schedule()
        given |= {i for begun in step.scheduled_new_reqs for group in begun.block_ids for i in group}
        given |= {i for ids in step.scheduled_cached_reqs.new_block_ids if ids for group in ids for i in group}
        zeroed |= set(step.new_block_ids_to_zero or ())
        finish(scheduler, step)
    scheduler.finish_requests([request.request_id for request in requests], RequestStatus.FINISHED_ABORTED)
    return given, zeroed


def plain(name: str) -> Request:
    ids = [100 * ord(name[0]) + len(name), *range(PROMPT - 1)]
    return Request(name, ids, vllm.SamplingParams(max_tokens=4), None, block_hasher=HASHER)


def test_blocks_that_a_plan_wrote_to_are_cleared_for_their_next_request(scheduler: Any) -> None:
    """Once, whoever gets them, and no others. Seen failing without the note of what is written, and without that of what is handed out."""
    written, zeroed = cleared(scheduler, planned("edits"))
    assert len(written) == 7 and not zeroed
    first, second = (
        cleared(scheduler, *(plain(letter * n) for n in range(1, 9))) for letter in "pq"
    )  # 56 of the 63 blocks each
    assert first[0] | second[0] >= written and first[1] | second[1] == written
    third, fourth = (cleared(scheduler, *(plain(letter * n) for n in range(1, 9))) for letter in "rs")
    assert third[0] | fourth[0] >= written and not third[1] | fourth[1]


def test_a_preempted_requests_blocks_are_cleared_for_those_who_get_them_in_the_same_step(scheduler: Any) -> None:
    """Its last step may still be in flight."""
    scheduler.add_request(planned("edits"))
    step = scheduler.schedule()
    (begun,) = step.scheduled_new_reqs
    scheduler.finish_requests(["edits"], RequestStatus.FINISHED_ABORTED)  # before the step has come back
    given, zeroed = cleared(scheduler, *(plain("p" * n) for n in range(1, 9)))
    finish(scheduler, step)
    assert zeroed == set(begun.block_ids[0]) <= given


def test_captures_write_nothing(scheduler: Any) -> None:
    given, _ = cleared(scheduler, planned("reads", Capture("resid_post", to="rows")))  # type: ignore[arg-type]
    again, zeroed = cleared(scheduler, *(plain("p" * n) for n in range(1, 9)))
    assert again & given and not zeroed


GONE = Steer("resid_post", layers=[3], vector="nobody's", phase="decode")  # the same edits of the prompt as without it


def cached(scheduler: Any, name: str, *edits: Steer) -> int:
    """How many tokens of a further request come from the prefix cache."""
    scheduler.add_request(planned(name, *edits, tokens=SHORT))
    step = scheduler.schedule()
    (begun,) = step.scheduled_new_reqs
    finish(scheduler, step)
    return int(begun.num_computed_tokens)


SHORT = 20  # one block, and several prompts fit into a step


@pytest.mark.parametrize("was_taken", [False, True])
def test_the_kv_of_a_plan_that_may_be_refused_is_nobodys_until_it_is_taken(scheduler: Any, was_taken: bool) -> None:
    """Refused, it was computed without its edits; and who began beside it, with the same ones, would have read that.

    What it names may have been there before and be gone now: seen failing, with a plan that had once been taken, and where a client had
    checked it; those beside it went on from its blocks, and what they computed stayed in the cache.
    """
    edit = steer()
    if was_taken:
        for each in ((edit,), (edit, GONE)):
            scheduler.add_request(planned("before", *each, tokens=SHORT))
            finish(scheduler, scheduler.schedule())
            scheduler.finish_requests("before", RequestStatus.FINISHED_ABORTED)
        assert scheduler.reset_prefix_cache()
    scheduler.add_request(planned("bad", edit, GONE, tokens=SHORT))
    scheduler.add_request(planned("good", edit, tokens=SHORT))
    step = scheduler.schedule()
    assert planned("a", edit, GONE).block_hashes == planned("b", edit).block_hashes
    assert [begun.num_computed_tokens for begun in step.scheduled_new_reqs] == [0, 0]
    (output,) = finish(scheduler, step, StepEnds(errors={"bad": REASON}))
    assert output.request_id == "bad"
    assert cached(scheduler, "again", edit) == BLOCK  # the good one's
    assert cached(scheduler, "with the name", edit, GONE) == BLOCK


def test_what_is_sure_to_be_taken_is_so_for_this_engine_and_this_use(scheduler: Any) -> None:
    """A plan may be one to capture by and none to record by; and another engine of this process may have taken it."""
    edit = steer()
    assert cached(scheduler, "first", edit) == 0
    again = planned("again", edit)
    assert scheduler._accepted.held_from(again) is None and AcceptedPlans().held_from(again) == 0
    carried = PlanRequest.of(again.sampling_params)
    assert carried is not None
    for other in (structs.replace(carried, record=("id", "run", "")), structs.replace(carried, capture=("id", 0))):
        request = planned("other", edit)
        request.sampling_params.extra_args = other.to_extra_args()
        assert scheduler._accepted.held_from(request) == 0


def test_a_plan_that_is_refused_though_it_was_taken_before_leaves_nothing(scheduler: Any) -> None:
    edit = steer()
    assert cached(scheduler, "first", edit) == 0
    scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert scheduler.reset_prefix_cache()
    scheduler.add_request(planned("bad", edit, tokens=SHORT))
    finish(scheduler, scheduler.schedule(), StepEnds(errors={"bad": REASON}))
    assert cached(scheduler, "good", edit) == 0


def test_what_ends_before_its_plan_is_judged_leaves_nothing(scheduler: Any) -> None:
    edit = steer()
    scheduler.add_request(planned("bad", edit, GONE, tokens=SHORT))
    step = scheduler.schedule()
    scheduler.finish_requests("bad", RequestStatus.FINISHED_ABORTED)
    assert finish(scheduler, step, StepEnds(errors={"bad": REASON})) == []
    assert cached(scheduler, "good", edit) == 0
    assert cached(scheduler, "again", edit) == BLOCK and not scheduler._counts["is_held"]


def test_a_plan_that_was_taken_and_names_nothing_shares_at_once(scheduler: Any) -> None:
    edit = steer()
    assert cached(scheduler, "first", edit) == 0
    scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert scheduler.reset_prefix_cache()
    for name in ("second", "third"):
        scheduler.add_request(planned(name, edit, tokens=SHORT))
    assert [begun.num_computed_tokens for begun in scheduler.schedule().scheduled_new_reqs] == [0, BLOCK]


def test_blocks_below_the_first_edit_are_shared_at_once(scheduler: Any) -> None:
    edits = [Steer("resid_post", layers=[3], vector=torch.randn(256), positions=[18]) for _ in range(2)]
    for name, edit in zip(("one", "other"), edits, strict=True):
        scheduler.add_request(planned(name, edit, tokens=SHORT))
    assert [begun.num_computed_tokens for begun in scheduler.schedule().scheduled_new_reqs] == [0, BLOCK]


def test_the_scheduler_reads_no_plan(scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Q1. It reads what the front end has made of the plan: block keys, the limit of cache hits, and the time that its steps take."""
    steps = [edit for number in range(3) for edit in (Steer("resid_post", layers=[number], vector="calm"), steer())]
    made = [planned("first", *steps), planned("second", *steps, Capture("resid_post", to="rows"))]  # type: ignore[arg-type]
    made.append(planned("third", *steps))
    carried = structs.replace(PlanRequest.of(made[2].sampling_params), shares=True)  # type: ignore[type-var]
    made[2].sampling_params.extra_args = carried.for_scheduler(PROMPT, 8, "cpu").to_extra_args()

    def read(*_: Any, **__: Any) -> Any:
        raise AssertionError("a plan was read")

    monkeypatch.setattr("midstream.runtime.request.unpacked", read)
    monkeypatch.setattr(Plan, "normal", read)
    for one in made:  # as the engine makes them of what has come from the front end
        again = Request(one.request_id, one.prompt_token_ids, one.sampling_params, None, block_hasher=HASHER)
        scheduler.add_request(again)
    assert scheduler._counts["changes_kv"] == scheduler._counts["is_held"] == 3 and scheduler._counts["is_costly"] == 1
    while any(request.num_computed_tokens < PROMPT for request in scheduler.requests.values()):
        finish(scheduler, scheduler.schedule())
    scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)


def test_a_plan_that_was_scheduled_for_another_prompt_shares_with_nobody(scheduler: Any) -> None:
    """The front end makes the keys: a prompt that it has not seen has none."""
    edit = Steer("resid_post", layers=[3], vector=torch.randn(256), phase="decode")
    assert cached(scheduler, "first", edit) == 0 and cached(scheduler, "second", edit) == BLOCK
    other = planned("other", edit, tokens=SHORT + 1)
    request = Request("third", list(range(10, 10 + SHORT)), other.sampling_params, None, block_hasher=HASHER)
    scheduler.add_request(request)
    (begun,) = scheduler.schedule().scheduled_new_reqs
    assert begun.num_computed_tokens == 0


def test_a_name_without_a_digest_has_new_keys_in_each_request() -> None:
    carried = PlanRequest(packed(Plan.of(GONE)), 8)
    known = PlanRequest(packed(Plan.of(steer())), 8)
    each, of_known = ({one.for_scheduler(PROMPT, 8, "cpu").scheduled for _ in "12"} for one in (carried, known))
    assert len(each) == 2 and len(of_known) == 1


def test_a_plan_is_read_once_where_it_comes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Q1. Its form for the engine is not read in this process."""
    reads: list[Any] = []
    monkeypatch.setattr(Plan, "from_wire", classmethod(lambda cls, *a, **k: reads.append(a) or from_wire(*a, **k)))
    monkeypatch.setattr(Plan, "from_packed", classmethod(lambda cls, *a: reads.append(a)))
    payload = admit(Plan.of(steer()).to_wire())
    assert PlanRequest.of(SimpleNamespace(extra_args={"midstream": payload})).plan.edits  # type: ignore[union-attr]
    assert len(reads) == 1


def test_a_long_queue_is_not_walked_for_traces(scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In no step of an engine without traces: what is added to a plain step must not grow with its queue."""
    for i in range(50):
        scheduler.add_request(planned(f"{i}"))
    asked: list[Any] = []
    monkeypatch.setattr(TraceRequest, "of", asked.append)
    finish(scheduler, scheduler.schedule())
    assert len(scheduler.waiting) > 40 and not asked


@pytest.mark.parametrize("trace", [{"x": 1}, {}, "code", 7, None])
def test_what_is_no_trace_is_refused_and_harms_no_engine(scheduler: Any, trace: Any) -> None:
    params = vllm.SamplingParams(max_tokens=4, extra_args={"midstream": {"trace": trace}})
    with pytest.raises(PlanError, match=r"midstream\.trace is not"):
        admitted(engine_config(), Settings(), SimpleNamespace(sampling_params=params))
    scheduler.add_request(Request("stranger's", [1, 2, 3], params, None))
    assert list(scheduler.schedule().num_scheduled_tokens) == ["stranger's"]


def test_a_plan_as_text_comes_from_strangers() -> None:
    """G8: whatever carries it, it may not say where the engine writes, nor vouch for a named vector's content or for itself."""
    for to in ("captures", Consumer("probe")):
        for form in every_form(Capture("resid_post", to=to)):
            with pytest.raises(PlanError, match="may not name where"):
                admit(form)
    for form in every_form(Steer("resid_post", vector=Named("calm", "0" * 32))):
        with pytest.raises(PlanError, match="may not say what the engine has"):
            admit(form)
    for form in every_form(steer()):
        assert PlanRequest.of(SimpleNamespace(extra_args={"midstream": admit(form)})).plan.edits  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("capture", ["id", 0]),
        ("record", ["id", "name"]),
        ("checked", True),
        ("num_layers", 8),
        ("scheduled", b""),
        ("trace", {"trace": "id"}),
        ("x", 1),
    ],
)
def test_a_dict_brings_a_plan_and_nothing_else(name: str, value: Any) -> None:
    """What midstream's own clients say beside the plan is known by the type that holds it, which no JSON becomes."""
    plan = Plan.of(steer()).to_wire()
    for given in ({"plan": plan, name: value}, {"plan": packed(Plan.of(steer())), name: value}, {**plan, name: value}):
        with pytest.raises(PlanError, match=name):
            admit(given)


@pytest.mark.parametrize(
    "given",
    [Plan.of(Capture("resid_post", to="rows")).to_json(), Plan.of(Capture("resid_post", to="rows")).to_wire(), 7, [1]],
)
def test_an_engine_takes_no_plan_that_has_not_come_by_admission(given: Any) -> None:
    """As from a front end without the plugin."""
    with pytest.raises(PlanError, match="without midstream's part of the front end"):
        PlanRequest.of(SimpleNamespace(extra_args={"midstream": given}))


@pytest.mark.parametrize("name", ["midstraem", "Midstream", "midstream_plan", "mid-stream", "midstrem"])
def test_a_misspelt_key_is_refused(name: str) -> None:
    """vLLM passes over keys that nobody reads, so that the plan would be silently ignored."""
    with pytest.raises(PlanError, match=f"{name}.*did you mean 'midstream'"):
        admit("{}", name)
    for other in ("kv_transfer_params", "stream_interval", "stream", "mainstream", "bitstream", "m" * 10**6):
        assert admit("{}", other) is None


def every_form(*plan: Any) -> list[Any]:
    """What a server makes of a plan in a request's JSON, and what is like it."""
    text = Plan.of(plan).to_json()
    return [text, json.loads(text), Plan.of(plan).to_wire(), {"plan": text}, {"plan": json.loads(text)}]


def admit(given: Any, name: str = "midstream") -> Any:
    params = vllm.SamplingParams(extra_args={name: given})
    request = SimpleNamespace(sampling_params=params, prompt_token_ids=[1, 2, 3], mm_features=None)
    return admitted(engine_config(), Settings(), request)


def engine_config() -> Any:
    text = SimpleNamespace(num_hidden_layers=8)
    return SimpleNamespace(
        parallel_config=SimpleNamespace(worker_cls=WORKER),
        kv_transfer_config=None,
        speculative_config=None,
        device_config=SimpleNamespace(device_type="cpu"),
        model_config=SimpleNamespace(hf_text_config=text, get_hidden_size=lambda: 256, dtype=torch.float32),
    )


def test_layers_from_the_end_are_counted_from_0_at_admission() -> None:
    """Whoever sends the plan: keys of KV blocks and the workers' tables know no other numbers."""
    plan = [Steer("layers_output", layers=[-1, 2], vector=torch.ones(256))]
    for given in every_form(*plan):
        payload = admit(given)
        (edit,) = PlanRequest.of(SimpleNamespace(extra_args={"midstream": payload})).plan.edits  # type: ignore[union-attr]
        assert (edit.site, edit.layers) == ("resid_post", (2, 7))
    with pytest.raises(PlanError, match="-9; allowed: 0 to 7"):
        admit(Plan.of(Steer("resid_post", layers=-9, vector=torch.ones(256))).to_json())


def test_an_engine_wide_plan_that_is_final_stands_on_a_stock_engine() -> None:
    """T7. What a client writes as a dict is checked with it, at all sites together."""
    settings = Settings(
        plan=Plan((Clamp("attn_z", layers=1, direction=[1.0] * 256, low=0.0, high=0.0),), final="later").to_json()
    )

    def admitted_with(**edit: Any) -> Any:
        given = json.loads(Plan.of(Steer(vector=[1.0] * 256, **edit)).to_json())
        params = vllm.SamplingParams(max_tokens=1, extra_args={"midstream": given})
        request = SimpleNamespace(sampling_params=params, prompt_token_ids=[1, 2, 3], mm_features=None)
        return unpacked(admitted(engine_config(), settings, request)["plan"])

    assert [edit.final for edit in admitted_with(site="attn_q", layers=1).edits] == ["later", None]
    for edit in ({"site": "resid_mid", "layers": 1}, {"site": "mlp_act", "layers": "all"}):
        with pytest.raises(PlanError, match="could undo the final edits"):
            admitted_with(**edit)


def test_a_directory_is_the_front_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may have gone to another one than the engine works in."""
    monkeypatch.chdir(tmp_path)
    plan = Plan.of(Capture("resid_post", to=("rows", tmp_path / "more", Consumer("log"))))
    params = vllm.SamplingParams(extra_args={"midstream": plan})
    request = SimpleNamespace(sampling_params=params, prompt_token_ids=[1, 2, 3], mm_features=None)
    params.extra_args = {"midstream": admitted(engine_config(), Settings(), request)}
    (capture,) = PlanRequest.of(params).plan.captures  # type: ignore[union-attr]
    assert capture.sinks == (str(tmp_path / "rows"), str(tmp_path / "more"), Consumer("log"))


@pytest.mark.parametrize("allow_traces", [False, True])
def test_what_a_client_of_midstream_has_checked_is_checked_again_only_with_an_engine_wide_plan(
    allow_traces: bool,
) -> None:
    """Q1. Nobody else can say `checked`: see `test_a_dict_brings_a_plan_and_nothing_else`."""
    config = engine_config()
    wrong = Plan.of(Steer("resid_post", layers=[3], vector=torch.ones(99)))
    params = vllm.SamplingParams(extra_args=PlanRequest(packed(wrong), 8, checked=True).to_extra_args())
    request = SimpleNamespace(sampling_params=params, prompt_token_ids=[1, 2, 3], mm_features=None)
    payload = admitted(config, Settings(allow_traces=allow_traces), request)
    assert payload is not None and payload.items() >= params.extra_args["midstream"].items()
    with pytest.raises(PlanError, match="width 99"):
        admitted(config, Settings(allow_traces=allow_traces, plan=Plan.of(steer()).to_json()), request)


@pytest.mark.parametrize("checked", [False, True])
def test_a_position_in_a_prompt_with_images_is_refused_whoever_has_checked_the_plan(checked: bool) -> None:
    """The front end alone knows that the prompt has images."""
    plans = [Plan.of(Steer("resid_post", layers=[3], vector=torch.ones(256), positions=at)) for at in ([1], None)]
    extras = [PlanRequest(packed(plan), 8, checked=checked).to_extra_args() for plan in plans]
    at_position, everywhere = (
        SimpleNamespace(
            sampling_params=vllm.SamplingParams(extra_args=extra), prompt_token_ids=[1, 2, 3], mm_features=["an image"]
        )
        for extra in extras
    )
    assert admitted(engine_config(), Settings(), everywhere)
    with pytest.raises(PlanError, match="multimodal prompt"):
        admitted(engine_config(), Settings(), at_position)


@pytest.mark.parametrize("checked", [False, True])
def test_embeddings_as_a_prompt_are_refused_whoever_has_checked_the_plan(checked: bool) -> None:
    extra = PlanRequest(packed(Plan.of(steer())), 8, checked=checked).to_extra_args()
    request = SimpleNamespace(
        sampling_params=vllm.SamplingParams(extra_args=extra),
        prompt_token_ids=[0],
        mm_features=None,
        prompt_embeds=[1.0],
    )
    with pytest.raises(PlanError, match="prompt_embeds"):
        admitted(engine_config(), Settings(), request)
