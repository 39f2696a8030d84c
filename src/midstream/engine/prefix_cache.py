"""Plans and the prefix cache, on the scheduler's side: whose KV blocks a planned request may read, and who may read its own.

A block's hash gets a key from all that the plan has changed below the block's end. Blocks below the first such change have none and are
shared with everybody; blocks that differ in any edit never meet. A request whose prompt is to be captured takes cache hits up to the
lowest captured position and no further. Until the workers have taken a request's plan, which they compute without if they refuse it, its
blocks from the first change on are held back from the cache.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from midstream.engine.patches import replace
from midstream.errors import PlanError
from midstream.plan.keys import PlanKeys, lowest_captured
from midstream.plan.memory import Memory
from midstream.runtime.plan_request import PlanRequest, has_open_names, may_be_gone, share


def block_key(request: Any, end: int) -> str | None:
    """What sets a request's block that ends at position `end` apart."""
    if _is_plain(request):
        return None
    keys = _known(request).keys
    return keys.at(end) if keys is not None else None


def longest_hit(request: Any) -> int | None:
    """How many of the request's tokens may come from the cache; None for as many as there are."""
    return None if _is_plain(request) else _known(request).hit


def remember(request: Any) -> None:
    """To be called before the request, of streaming input, gets other sampling parameters: its blocks so far have these."""
    _known(request)


def rekey(request: Any) -> None:
    """To be called when the request is preempted: a session's plan is for all positions that are now computed again, also for those that
    had been computed before it came and whose blocks therefore have older keys."""
    known: _OfRequest | None = getattr(request, "midstream_cache", None)
    if known is not None and isinstance(known.keys, _Alone):
        request.block_hashes.clear()
        request.update_block_hashes()


def _is_plain(request: Any) -> bool:
    """Whether it has no plan and, if its input is streamed, never had one: quick to tell, since all requests come here."""
    known: _OfRequest | None = getattr(request, "midstream_cache", None)
    return getattr(request.sampling_params, "extra_args", None) is None and (known is None or known.keys is None)


class _OfRequest(NamedTuple):
    """What a request's plan means to the cache, for a prompt of this length."""

    length: int
    keys: Any
    hit: int | None
    may_be_gone: bool = False


def _known(request: Any) -> _OfRequest:
    # The prompt itself: vLLM hashes the blocks of streaming input before it counts them.
    length = len(request.prompt_token_ids) if request.prompt_token_ids is not None else request.num_prompt_tokens
    known: _OfRequest | None = getattr(request, "midstream_cache", None)
    if known is None or known.length != length:
        made = _make(request, length)
        if known is not None and (known.keys is not None or made.keys is not None):
            made = made._replace(keys=_Alone())  # streaming input: before, it had the edits for a shorter prompt
        known = request.midstream_cache = made
    return known


def _make(request: Any, length: int) -> _OfRequest:
    try:
        carried = PlanRequest.of(request.sampling_params)
        if carried is None:
            return _OfRequest(length, None, None)
        known = _known_keys.get(
            (carried.wire, length, carried.num_layers),
            lambda: _keyed(carried, length),
            lambda found: sys.maxsize if found.is_open else len(carried.wire) + (found.keys.size if found.keys else 0),
        )
        if not known.is_open:
            share(request.sampling_params, known.wire)
        if known.keys is None or known.keys.floor is None:
            return _OfRequest(length, None, known.hit)
        return _OfRequest(length, known.keys, known.hit, known.may_be_gone)
    except PlanError:  # the worker will refuse it; until then its blocks are nobody's
        return _OfRequest(length, _Alone(), 0)


class Taken:
    """The plans that an engine's workers have taken."""

    def __init__(self) -> None:
        self._plans: Memory[None] = Memory()

    def held_from(self, request: Any) -> int | None:
        """From which position on a request's blocks are held back until its plan is taken; None if it will be, or nobody has its keys."""
        known = None if _is_plain(request) else _known(request)
        if known is None or not isinstance(known.keys, PlanKeys):
            return None
        is_sure = not known.may_be_gone and _case(request.sampling_params) in self._plans
        return None if is_sure else known.keys.floor

    def add(self, sampling_params: Any) -> None:
        """The workers have begun a request, and had nothing against its plan."""
        if (case := _case(sampling_params)) is not None:
            self._plans.get(case, lambda: None, lambda _: len(case[0]))


def _case(sampling_params: Any) -> tuple[bytes, bool, bool] | None:
    """All that the workers judge a plan by; None if there is no plan, or none that can be read."""
    try:
        carried = PlanRequest.of(sampling_params)
    except PlanError:
        return None
    return None if carried is None else (carried.wire, carried.capture is None, carried.record is None)


class _Known(NamedTuple):
    """What a plan says of the cache, for prompts of one length.

    Attributes:
        keys: None if it is empty.
        hit: how far requests with it take cache hits; None for as far as there are any.
        wire: the plan, packed, one object for all that have it.
        is_open: whether it names vectors that may be others the next time.
        may_be_gone: whether it needs what may be deleted.
    """

    keys: PlanKeys | None
    hit: int | None
    wire: bytes
    is_open: bool
    may_be_gone: bool


_known_keys: Memory[_Known] = Memory()


def _keyed(carried: PlanRequest, length: int) -> _Known:
    plan = carried.plan
    if not plan:
        return _Known(None, None, carried.wire, False, False)
    keys = PlanKeys(plan, length, carried.num_layers)
    return _Known(keys, lowest_captured(plan, length), carried.wire, has_open_names(plan), may_be_gone(plan))


class _Alone:
    """Keys that no other request has."""

    def __init__(self) -> None:
        self._key = secrets.token_hex(16)

    def at(self, end: int) -> str:
        return self._key


class EditedBlocks:
    """The KV blocks that hold what plans and traces have changed, until they are cleared for their next request.

    Some attention kernels (vLLM's on the CPU) multiply the masked rows of a block by zero, and zero times infinity is NaN. So no request
    may be given a block that still holds what another request's edits wrote.
    """

    def __init__(self) -> None:
        self._written: set[int] = set()
        self._to_clear: list[int] = []

    def write(self, block_ids: Iterable[Iterable[int]]) -> None:
        """A request with a plan's edits or a trace was given these blocks, in each group of layers."""
        for group in block_ids:
            self._written.update(group)

    def allocate(self, blocks: Iterable[Any]) -> None:
        """These blocks go to a request that computes all of their rows itself."""
        if self._written:
            old = [block.block_id for block in blocks if block.block_id in self._written]
            self._written.difference_update(old)
            self._to_clear += old

    def take(self) -> list[int]:
        """The blocks to clear before the coming step."""
        blocks, self._to_clear = self._to_clear, []
        return blocks


class _Limited:
    """vLLM's KVCacheCoordinator, with cache hits up to `longest` tokens."""

    def __init__(self, coordinator: Any, longest: int) -> None:
        self._coordinator, self._longest = coordinator, longest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coordinator, name)

    def find_longest_cache_hit(self, block_hashes: Any, longest: int, *args: Any, **kwargs: Any) -> Any:
        return self._coordinator.find_longest_cache_hit(block_hashes, min(longest, self._longest), *args, **kwargs)


class _Holding:
    """vLLM's KVCacheCoordinator, which caches the blocks of requests in `held` up to the position there."""

    def __init__(self, coordinator: Any, held: Mapping[str, int]) -> None:
        self._coordinator, self._held = coordinator, held

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coordinator, name)

    def cache_blocks(self, request: Any, tokens: int, *args: Any, **kwargs: Any) -> None:
        tokens = min(tokens, self._held.get(request.request_id, tokens))
        self._coordinator.cache_blocks(request, tokens, *args, **kwargs)


@contextlib.contextmanager
def holding_back(manager: Any, held: Mapping[str, int]) -> Iterator[None]:
    """Have vLLM's KVCacheManager hold back blocks: `held` is request id -> `Taken.held_from`."""
    coordinator = manager.coordinator
    manager.coordinator = _Holding(coordinator, held)
    try:
        yield
    finally:
        manager.coordinator = coordinator


def heed_plans() -> None:
    """Have vLLM's prefix cache heed plans. Once a process; seen on vLLM 0.26 and 0.32.

    Classes and modules are changed, not objects: with two methods put onto the cache's objects, which the scheduler calls for every token,
    its part of a plain step was measured to be 4 % longer.
    """
    _key_blocks()
    _limit_hits()
    _note_allocations()


def _note_allocations() -> None:
    """Have an engine's `EditedBlocks` hear which blocks are handed out; `scheduler` puts it onto the block pool."""
    from vllm.v1.core.block_pool import BlockPool

    def make(original: Any) -> Any:
        def get_new_blocks(self: Any, *args: Any, **kwargs: Any) -> Any:
            blocks = original(self, *args, **kwargs)
            edited: EditedBlocks | None = getattr(self, "midstream", None)
            if edited is not None:
                edited.allocate(blocks)
            return blocks

        return get_new_blocks

    replace(BlockPool, "get_new_blocks", make)


def _limit_hits() -> None:
    """Have requests take cache hits up to `longest_hit`."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    def make(original: Any) -> Any:
        def get_computed_blocks(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            longest = longest_hit(request)
            if longest is None:
                return original(self, request, *args, **kwargs)
            coordinator, self.coordinator = self.coordinator, _Limited(self.coordinator, longest)
            try:
                return original(self, request, *args, **kwargs)
            finally:
                self.coordinator = coordinator

        return get_computed_blocks

    replace(KVCacheManager, "get_computed_blocks", make)


def _key_blocks() -> None:
    """Have block hashes carry the plans' keys."""
    import vllm.v1.core.kv_cache_utils as module

    def make(original: Any) -> Any:
        def generate_block_hash_extra_keys(request: Any, start: int, end: int, *args: Any, **kwargs: Any) -> Any:
            found = original(request, start, end, *args, **kwargs)
            own = block_key(request, end)
            return found if own is None else ((*(found[0] or ()), ("midstream", own)), found[1])

        return generate_block_hash_extra_keys

    replace(module, "generate_block_hash_extra_keys", make)
