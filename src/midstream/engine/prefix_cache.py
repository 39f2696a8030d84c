"""Plans and vLLM's prefix cache, in the scheduler's process: which KV blocks planned requests share with others.

A block's hash gets a key made of all edits of the plan before the block's end. Blocks before the first change get no key and are shared
with all requests. Blocks that differ in any edit are never shared. A request that captures part of its prompt takes cache hits only up to
the lowest captured position. Workers may refuse a plan and compute the step without it, so a request's blocks from the first change on
stay out of the cache until the workers have accepted its plan.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec

from midstream.engine.plugin import Replacement
from midstream.errors import PlanError
from midstream.memory import Memory
from midstream.plan.compile import ScheduledPlan
from midstream.runtime.request import PlanRequest, share
from midstream.settings import NAME, is_ours

_COORDINATOR = "vllm.v1.core.kv_cache_manager.KVCacheManager.coordinator"


def block_key(request: Any, end: int) -> str | None:
    """The key of a request's block that ends at position `end`; None if it may be shared with all requests."""
    keys = _sharing_of(request).keys
    return keys.at(end) if keys is not None else None


def longest_hit(request: Any) -> int | None:
    """The number of the request's tokens that may come from the cache; None for no limit."""
    return _sharing_of(request).hit


def rekey(request: Any) -> None:
    """Give the blocks of a preempted request new keys.

    A session's plan applies to all positions that are computed again, also to positions that were first computed before the plan came.
    Their blocks have older keys.
    """
    known: Sharing | None = getattr(request, "midstream_cache", None)
    if known is not None and isinstance(known.keys, _UniqueKey):
        request.block_hashes.clear()
        request.update_block_hashes()


class _UniqueKey:
    """A key that no other request has."""

    def __init__(self) -> None:
        self._key = secrets.token_hex(16)

    def at(self, end: int) -> str:
        return self._key


class Sharing(NamedTuple):
    """How a plan or a trace restricts the sharing of blocks, for prompts of `length` tokens.

    Attributes:
        keys: of the request's blocks; None if it shares all of them.
        hit: see `longest_hit`.
        changes_kv: whether the request may write KV that the model alone would not.
        plan: the request's plan; None without one, and for one that cannot be read.
        wire: the same plan, packed.
    """

    length: int
    keys: ScheduledPlan | _UniqueKey | None = None
    hit: int | None = None
    changes_kv: bool = False
    plan: ScheduledPlan | None = None
    wire: bytes = b""


class _KnownPlan(NamedTuple):
    """A plan, and the parts of a request that carry it: one object each for all requests that have it."""

    plan: ScheduledPlan
    wire: bytes
    scheduled: bytes


_UNRESTRICTED = Sharing(0)
_known: Memory[_KnownPlan] = Memory()


def _sharing_of(request: Any) -> Sharing:
    """The restrictions of a request. It is called for every request, so it must be quick for requests that never had a plan."""
    if getattr(request.sampling_params, "extra_args", None) is None:
        known: Sharing | None = getattr(request, "midstream_cache", None)
        if known is None or known.keys is None:
            return _UNRESTRICTED
    return remember(request)


def remember(request: Any) -> Sharing:
    """Note the restrictions of a request under its current sampling parameters.

    To be called before a request of streaming input gets other parameters: its present blocks were computed with the current ones.
    """
    # Count the prompt itself: when vLLM hashes the blocks of streaming input, it has not counted their tokens yet.
    length = len(request.prompt_token_ids) if request.prompt_token_ids is not None else request.num_prompt_tokens
    known: Sharing | None = getattr(request, "midstream_cache", None)
    if known is None or known.length != length:
        made = _make_sharing(request, length)
        if known is None:
            is_alone = made.plan is not None and made.plan.length != length  # the front end saw another prompt
        else:  # streaming input: the edits so far were for a shorter prompt
            is_alone = known.keys is not None or made.keys is not None
        if is_alone:
            made = made._replace(keys=_UniqueKey())
        known = request.midstream_cache = made
    return known


def _make_sharing(request: Any, length: int) -> Sharing:
    try:
        planned = PlanRequest.of(request.sampling_params)
        if planned is None:
            return Sharing(length, changes_kv=is_ours(request))  # without a plan, only a trace changes KV
        case = planned.wire, planned.scheduled
        known = _known.get(case, lambda: _read(*case), lambda made: sum(map(len, case)) + made.plan.size)
    except PlanError:  # the worker will refuse the plan
        return Sharing(length, _UniqueKey(), 0, changes_kv=True)
    params, plan = request.sampling_params, known.plan
    share(params, known.wire, known.scheduled)
    changes_kv = plan.has_edits or "trace" in params.extra_args[NAME]
    return Sharing(length, plan if plan.starts else None, plan.longest_hit, changes_kv, plan, known.wire)


def _read(wire: bytes, scheduled: bytes) -> _KnownPlan:
    try:
        return _KnownPlan(msgspec.msgpack.decode(scheduled, type=ScheduledPlan), wire, scheduled)
    except msgspec.DecodeError as error:
        raise PlanError(f"The plan was not admitted by midstream's part of the front end: {error}.") from error


class AcceptedPlans:
    """The plans that an engine's workers have accepted."""

    def __init__(self) -> None:
        self._plans: Memory[None] = Memory()

    def held_from(self, request: Any) -> int | None:
        """The position from which a request's blocks are held back until the workers have accepted its plan.

        None if they surely accept it, or if no other request has the same keys.
        """
        sharing = _sharing_of(request)
        if not isinstance(sharing.keys, ScheduledPlan):
            return None
        is_sure = not sharing.keys.may_be_gone and _case(request.sampling_params) in self._plans
        return None if is_sure else sharing.keys.floor

    def add(self, sampling_params: Any) -> None:
        """Note that the workers have begun a request without refusing its plan."""
        if (case := _case(sampling_params)) is not None:
            self._plans.get(case, lambda: None, lambda _: len(case[0]))


def _case(sampling_params: Any) -> tuple[bytes, bool, bool] | None:
    """The parts of a request that decide whether the workers accept its plan; None without a readable plan."""
    try:
        planned = PlanRequest.of(sampling_params)
    except PlanError:
        return None
    return None if planned is None else (planned.wire, planned.capture is None, planned.record is None)


class EditedBlocks:
    """The KV blocks that hold changed KV of plans and traces, until they are cleared for their next request.

    Some attention kernels (vLLM's on the CPU) multiply the masked rows of a block by zero, and zero times infinity is NaN. So a block with
    another request's changed KV must be cleared before it is used.
    """

    def __init__(self) -> None:
        self._written: set[int] = set()
        self._to_clear: list[int] = []

    def write(self, block_ids: Iterable[Iterable[int]]) -> None:
        """Note the blocks, for each group of layers, that were given to a request with edits or a trace."""
        for group in block_ids:
            self._written.update(group)

    def allocate(self, blocks: Iterable[Any]) -> None:
        """Note blocks that are given to a request as new: it computes all their rows itself."""
        if self._written:
            old = [block.block_id for block in blocks if block.block_id in self._written]
            self._written.difference_update(old)
            self._to_clear += old

    def take(self) -> list[int]:
        """The blocks to clear before the coming step."""
        blocks, self._to_clear = self._to_clear, []
        return blocks


class _Coordinator:
    """vLLM's KVCacheCoordinator with limits.

    Args:
        longest: how many tokens a cache hit may have.
        held_from: see `holding_back`.
    """

    def __init__(self, coordinator: Any, longest: int, held_from: Callable[[str], int | None]) -> None:
        self._coordinator, self._longest, self._held_from = coordinator, longest, held_from

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coordinator, name)

    def find_longest_cache_hit(self, block_hashes: Any, max_cache_hit_length: int, *args: Any, **kwargs: Any) -> Any:
        longest = min(max_cache_hit_length, self._longest)
        return self._coordinator.find_longest_cache_hit(block_hashes, longest, *args, **kwargs)

    def cache_blocks(self, request: Any, num_computed_tokens: int, *args: Any, **kwargs: Any) -> None:
        held_from = self._held_from(request.request_id)
        tokens = num_computed_tokens if held_from is None else min(num_computed_tokens, held_from)
        self._coordinator.cache_blocks(request, tokens, *args, **kwargs)


def holding_back(manager: Any, held_from: Callable[[str], int | None]) -> Replacement:
    """In a with-block, keep blocks out of vLLM's KVCacheManager.

    Args:
        held_from: request id -> the position up to which its blocks are cached; None for all of them.
    """
    return Replacement(_COORDINATOR, manager, _Coordinator(manager.coordinator, sys.maxsize, held_from))


def adding_plan_keys(original: Callable[..., Any]) -> Callable[..., Any]:
    """A `generate_block_hash_extra_keys` that adds the keys of plans."""

    def generate_block_hash_extra_keys(
        request: Any, start_token_idx: int, end_token_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        found = original(request, start_token_idx, end_token_idx, *args, **kwargs)
        own = block_key(request, end_token_idx)
        return found if own is None else ((*(found[0] or ()), ("midstream", own)), found[1])

    return generate_block_hash_extra_keys


def limiting_hits(original: Callable[..., Any]) -> Callable[..., Any]:
    """A `KVCacheManager.get_computed_blocks` that limits cache hits to `longest_hit`."""

    def get_computed_blocks(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        longest = longest_hit(request)
        if longest is None:
            return original(self, request, *args, **kwargs)
        with Replacement(_COORDINATOR, self, _Coordinator(self.coordinator, longest, lambda _: None)):
            return original(self, request, *args, **kwargs)

    return get_computed_blocks


def noting_allocations(original: Callable[..., Any]) -> Callable[..., Any]:
    """A `BlockPool.get_new_blocks` that tells the pool's `EditedBlocks`, set by `scheduler`, which blocks it hands out."""

    def get_new_blocks(self: Any, *args: Any, **kwargs: Any) -> Any:
        blocks = original(self, *args, **kwargs)
        edited: EditedBlocks | None = getattr(self, "midstream", None)
        if edited is not None:
            edited.allocate(blocks)
        return blocks

    return get_new_blocks
