"""Plans and vLLM's prefix cache, in the scheduler's process: which KV blocks a planned request may read, and who may read its own.

A block's hash gets a key made of everything that the plan has changed before the block's end. Blocks before the first change get no key and
are shared with all requests; blocks that differ in any edit are never shared. A request that captures part of its prompt takes cache hits
only up to the lowest captured position. Workers may refuse a plan and compute the step without it, so a request's blocks from the first
change on stay out of the cache until the workers have taken its plan.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from midstream.engine.plugin import Replacement
from midstream.errors import PlanError
from midstream.plan.keys import PlanKeys, lowest_captured
from midstream.runtime.request import Memory, PlanRequest, has_open_names, may_be_gone, share

_COORDINATOR = "vllm.v1.core.kv_cache_manager.KVCacheManager.coordinator"


def block_key(request: Any, end: int) -> str | None:
    """The key of a request's block that ends at position `end`; None if it may be shared with all requests."""
    if _is_plain(request):
        return None
    keys = _rules_of(request).keys
    return keys.at(end) if keys is not None else None


def longest_hit(request: Any) -> int | None:
    """How many of the request's tokens may come from the cache; None if there is no limit."""
    return None if _is_plain(request) else _rules_of(request).hit


def remember(request: Any) -> None:
    """Has to be called before a request of streaming input gets other sampling parameters: its blocks so far have the current ones."""
    _rules_of(request)


def rekey(request: Any) -> None:
    """Has to be called when a request is preempted.

    A session's plan applies to all positions that are computed again, including those that were first computed before the plan came. Their
    blocks have older keys.
    """
    rules: _Rules | None = getattr(request, "midstream_cache", None)
    if rules is not None and isinstance(rules.keys, _UniqueKey):
        request.block_hashes.clear()
        request.update_block_hashes()


def _is_plain(request: Any) -> bool:
    """Whether the request has no plan and, if its input is streamed, never had one. Has to be quick: it is called for every request."""
    rules: _Rules | None = getattr(request, "midstream_cache", None)
    return getattr(request.sampling_params, "extra_args", None) is None and (rules is None or rules.keys is None)


class _UniqueKey:
    """A key that no other request has."""

    def __init__(self) -> None:
        self._key = secrets.token_hex(16)

    def at(self, end: int) -> str:
        return self._key


class _Rules(NamedTuple):
    """What a request's plan means for the cache, for a prompt of `length` tokens.

    Attributes:
        keys: of its blocks; None if it shares all of them.
        hit: see `longest_hit`.
        may_be_gone: whether the plan needs something that may be deleted before the request begins.
    """

    length: int
    keys: PlanKeys | _UniqueKey | None
    hit: int | None
    may_be_gone: bool = False


def _rules_of(request: Any) -> _Rules:
    # The prompt itself: vLLM hashes the blocks of streaming input before it counts them.
    length = len(request.prompt_token_ids) if request.prompt_token_ids is not None else request.num_prompt_tokens
    rules: _Rules | None = getattr(request, "midstream_cache", None)
    if rules is None or rules.length != length:
        made = _make_rules(request, length)
        if rules is not None and (rules.keys is not None or made.keys is not None):
            made = made._replace(keys=_UniqueKey())  # streaming input: the edits so far were for a shorter prompt
        rules = request.midstream_cache = made
    return rules


def _make_rules(request: Any, length: int) -> _Rules:
    try:
        planned = PlanRequest.of(request.sampling_params)
        if planned is None:
            return _Rules(length, None, None)
        known = _known_keys.get(
            (planned.wire, length, planned.num_layers),
            lambda: _make_keys(planned, length),
            lambda found: sys.maxsize if found.is_open else len(planned.wire) + (found.keys.size if found.keys else 0),
        )
        if not known.is_open:
            share(request.sampling_params, known.wire)
        if known.keys is None or known.keys.floor is None:
            return _Rules(length, None, known.hit)
        return _Rules(length, known.keys, known.hit, known.may_be_gone)
    except PlanError:  # the worker will refuse the plan
        return _Rules(length, _UniqueKey(), 0)


class _PlanKeys(NamedTuple):
    """What a plan means for the cache, for prompts of one length.

    Attributes:
        keys: None if the plan is empty.
        hit: see `longest_hit`.
        wire: the packed plan, one object for all requests that have it.
        is_open: whether it names vectors that may be replaced by others later.
        may_be_gone: see `_Rules`.
    """

    keys: PlanKeys | None
    hit: int | None
    wire: bytes
    is_open: bool
    may_be_gone: bool


_known_keys: Memory[_PlanKeys] = Memory()


def _make_keys(planned: PlanRequest, length: int) -> _PlanKeys:
    plan = planned.plan
    if not plan:
        return _PlanKeys(None, None, planned.wire, False, False)
    keys = PlanKeys(plan, length, planned.num_layers)
    return _PlanKeys(keys, lowest_captured(plan, length), planned.wire, has_open_names(plan), may_be_gone(plan))


class Taken:
    """The plans that an engine's workers have taken."""

    def __init__(self) -> None:
        self._plans: Memory[None] = Memory()

    def held_from(self, request: Any) -> int | None:
        """The position from which a request's blocks are held back until its plan is taken.

        None if the plan is sure to be taken, or if no other request has the same keys.
        """
        rules = None if _is_plain(request) else _rules_of(request)
        if rules is None or not isinstance(rules.keys, PlanKeys):
            return None
        is_sure = not rules.may_be_gone and _case(request.sampling_params) in self._plans
        return None if is_sure else rules.keys.floor

    def add(self, sampling_params: Any) -> None:
        """Note that the workers have begun a request without refusing its plan."""
        if (case := _case(sampling_params)) is not None:
            self._plans.get(case, lambda: None, lambda _: len(case[0]))


def _case(sampling_params: Any) -> tuple[bytes, bool, bool] | None:
    """Everything that the workers judge a plan by; None without a readable plan."""
    try:
        planned = PlanRequest.of(sampling_params)
    except PlanError:
        return None
    return None if planned is None else (planned.wire, planned.capture is None, planned.record is None)


class EditedBlocks:
    """The KV blocks that hold what plans and traces have changed, until they are cleared for their next request.

    Some attention kernels (vLLM's on the CPU) multiply the masked rows of a block by zero, and zero times infinity is NaN. So a block that
    still holds what another request's edits wrote must not be used.
    """

    def __init__(self) -> None:
        self._written: set[int] = set()
        self._to_clear: list[int] = []

    def write(self, block_ids: Iterable[Iterable[int]]) -> None:
        """Note the blocks, for each group of layers, that were given to a request with edits or a trace."""
        for group in block_ids:
            self._written.update(group)

    def allocate(self, blocks: Iterable[Any]) -> None:
        """Note the blocks that are given to a request which computes all of their rows itself."""
        if self._written:
            old = [block.block_id for block in blocks if block.block_id in self._written]
            self._written.difference_update(old)
            self._to_clear += old

    def take(self) -> list[int]:
        """The blocks to clear before the coming step."""
        blocks, self._to_clear = self._to_clear, []
        return blocks


class _LimitedCoordinator:
    """vLLM's KVCacheCoordinator, with cache hits of at most `longest` tokens."""

    def __init__(self, coordinator: Any, longest: int) -> None:
        self._coordinator, self._longest = coordinator, longest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coordinator, name)

    def find_longest_cache_hit(self, block_hashes: Any, max_cache_hit_length: int, *args: Any, **kwargs: Any) -> Any:
        longest = min(max_cache_hit_length, self._longest)
        return self._coordinator.find_longest_cache_hit(block_hashes, longest, *args, **kwargs)


class _HoldingCoordinator:
    """vLLM's KVCacheCoordinator, which caches the blocks of the requests in `held` only up to the position given there."""

    def __init__(self, coordinator: Any, held: Mapping[str, int]) -> None:
        self._coordinator, self._held = coordinator, held

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coordinator, name)

    def cache_blocks(self, request: Any, num_computed_tokens: int, *args: Any, **kwargs: Any) -> None:
        tokens = min(num_computed_tokens, self._held.get(request.request_id, num_computed_tokens))
        self._coordinator.cache_blocks(request, tokens, *args, **kwargs)


def holding_back(manager: Any, held: Mapping[str, int]) -> Replacement:
    """Hold blocks of vLLM's KVCacheManager back in a with-block: `held` is request id -> `Taken.held_from`."""
    return Replacement(_COORDINATOR, manager, _HoldingCoordinator(manager.coordinator, held))


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
        with Replacement(_COORDINATOR, self, _LimitedCoordinator(self.coordinator, longest)):
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
