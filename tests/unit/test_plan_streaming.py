"""Block keys of streaming input (issue 3, E3, E5), whose prompt grows: vLLM's own request, block hasher and way of adding to a session.

The oracle is the phase that the worker computed each position in: a position that was generated before a re-add is a prompt's after it,
so from there on no block is what a request with that prompt, or with that beginning, would have.
"""

import pytest
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, StreamingUpdate

from midstream import Capture, Plan, Steer
from midstream.engine.plugin import apply_replacements
from midstream.engine.scheduler import MidstreamScheduler
from midstream.engine.seams import Role
from midstream.runtime.request import PlanRequest, packed

BLOCK, LAYERS = 4, 3


@pytest.fixture(autouse=True, scope="module")
def keyed():
    init_none_hash(sha256)
    apply_replacements(Role.SCHEDULER)


def sampling(plan, length):
    """As the front end makes them for a part of a session, or for a whole prompt, of this length."""
    if plan is None:
        return SamplingParams(max_tokens=64)
    carried = PlanRequest(packed(Plan.of(plan)), LAYERS, checked=True).for_scheduler(length, LAYERS, "cpu")
    return SamplingParams(max_tokens=64, extra_args=carried.to_extra_args())


def request(tokens, plan, prompt=None):
    """A request that has these tokens, those behind its prompt generated."""
    made = Request(
        "r",
        list(tokens[:prompt]),
        sampling(plan, len(tokens[:prompt])),
        None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
        resumable=True,
    )
    made.append_output_token_ids(list(tokens[prompt:]) if prompt is not None else [])
    return made


def add(session, tokens, plan):
    """The client adds to the session, all of whose tokens but the last generated one are computed."""
    session.num_computed_tokens = session.num_tokens - 1
    scheduler = object.__new__(MidstreamScheduler)
    scheduler.hash_block_size, scheduler.num_waiting_for_streaming_input, scheduler.log_stats = BLOCK, 0, False
    scheduler._update_request_as_session(session, StreamingUpdate.from_request(request(tokens, plan)))


def preempt(request):
    scheduler = object.__new__(MidstreamScheduler)
    scheduler._states = {}
    scheduler._preempt_request(request, 0.0)


STEER = {
    phase: Steer("resid_post", layers=0, vector=[1.0, 2.0], phase=phase) for phase in ("prefill", "decode", "both")
}


@pytest.mark.parametrize("phase", ["prefill", "decode", "both"])
def test_blocks_behind_a_re_add_are_nobody_elses(phase):
    """Seen failing with keys of the length at the time: a block across the re-add was taken for one of a whole prompt."""
    plan = STEER[phase]
    session = request(range(11), plan, prompt=6)
    before = list(session.block_hashes)
    add(session, range(50, 61), plan)
    tokens = list(session.all_token_ids)
    assert tokens == [*range(10), *range(50, 61)]
    assert session.block_hashes[:2] == before[:2], "computed, and keyed, before"
    others = [request(tokens, plan, prompt) for prompt in (None, 6, 10, 12)]
    others.append(request(range(11), plan, prompt=6))
    add(others[-1], range(50, 61), plan)
    behind = session.block_hashes[2:]
    assert len(behind) == 3
    for other in others:
        assert not set(behind) & set(other.block_hashes)
        assert other.block_hashes[:1] == before[:1], "what the first prompt began with is shared"


@pytest.mark.parametrize(("first", "then"), [(STEER["both"], None), (None, STEER["both"])])
def test_a_plan_that_comes_or_goes_with_a_re_add_shares_nothing_with_plain_requests(first, then):
    session = request(range(11), first, prompt=6)
    add(session, range(50, 61), then)
    plain = request(list(session.all_token_ids), None)
    assert not set(session.block_hashes[2:]) & set(plain.block_hashes)


def test_what_was_computed_before_a_plan_came_is_not_taken_for_steered():
    """Seen failing without `cache.remember`: the first block, begun before the plan came, was that of a request steered all through."""
    session = request(range(3), None)
    assert not session.block_hashes
    add(session, range(50, 61), STEER["both"])
    steered = request(list(session.all_token_ids), STEER["both"])
    assert session.block_hashes and not set(session.block_hashes) & set(steered.block_hashes)


@pytest.mark.parametrize(("first", "then"), [(None, STEER["both"]), (STEER["decode"], STEER["decode"])])
def test_what_is_computed_again_after_a_preemption_is_nobody_elses(first, then, monkeypatch):
    """Seen failing without `cache.rekey`: a plan is for all positions that are computed again, and the first blocks kept older keys."""
    session = request(range(11), first, prompt=2)
    add(session, range(50, 61), then)
    tokens, old = list(session.all_token_ids), list(session.block_hashes)
    monkeypatch.setattr(Scheduler, "_preempt_request", lambda *_: None)
    preempt(session)
    assert len(session.block_hashes) == len(old) == len(tokens) // BLOCK
    others = [request(tokens, plan, prompt) for plan in (first, then) for prompt in (None, 2, 10)]
    assert not set(session.block_hashes) & {key for other in others for key in other.block_hashes}


def test_a_preempted_request_keeps_its_keys(monkeypatch):
    """Where a request's plan has always been its own, what it computes again is what it computed."""
    monkeypatch.setattr(Scheduler, "_preempt_request", lambda *_: None)
    for plan in (None, STEER["both"]):
        preempted = request(range(11), plan, prompt=6)
        before = list(preempted.block_hashes)
        preempt(preempted)
        assert preempted.block_hashes == before


@pytest.mark.parametrize("plan", [None, Capture("resid_post", layers=1)])
def test_a_session_that_changes_no_kv_shares_its_blocks(plan):
    session = request(range(11), plan, prompt=6)
    add(session, range(50, 61), plan)
    assert session.block_hashes == request(list(session.all_token_ids), None).block_hashes
