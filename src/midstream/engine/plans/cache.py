"""Plans and the prefix cache, on the scheduler's side: whose KV blocks a planned request may read, and who may read its own.

A block's hash gets a key from all that the plan has changed below the block's end. Blocks below the first such change have none and are
shared with everybody; blocks that differ in any edit never meet. A request whose prompt is to be captured takes cache hits up to the
lowest captured position and no further.
"""

from __future__ import annotations

import secrets
import sys
from typing import Any, NamedTuple

from midstream.engine.patches import replace
from midstream.engine.plans.request import PlanRequest, has_open_names, share
from midstream.errors import PlanError
from midstream.plan.keys import PlanKeys, lowest_captured
from midstream.plan.memory import Memory


def block_key(request: Any, end: int) -> str | None:
    """What sets a request's block that ends at position `end` apart."""
    if _is_plain(request):
        return None
    keys = _known(request)[0]
    return keys.at(end) if keys is not None else None


def longest_hit(request: Any) -> int | None:
    """How many of the request's tokens may come from the cache; None for as many as there are."""
    return None if _is_plain(request) else _known(request)[1]


def remember(request: Any) -> None:
    """To be called before the request, of streaming input, gets other sampling parameters: its blocks so far have these."""
    _known(request)


def rekey(request: Any) -> None:
    """To be called when the request is preempted: a session's plan is for all positions that are now computed again, also for those that
    had been computed before it came and whose blocks therefore have older keys."""
    known = getattr(request, "midstream_cache", None)
    if known is not None and isinstance(known[1], _Alone):
        request.block_hashes.clear()
        request.update_block_hashes()


def _is_plain(request: Any) -> bool:
    """Whether it has no plan and, if its input is streamed, never had one: quick to tell, since all requests come here."""
    known = getattr(request, "midstream_cache", None)
    return getattr(request.sampling_params, "extra_args", None) is None and (known is None or known[1] is None)


def _known(request: Any) -> tuple[Any, int | None]:
    # The prompt itself: vLLM hashes the blocks of streaming input before it counts them.
    length = len(request.prompt_token_ids) if request.prompt_token_ids is not None else request.num_prompt_tokens
    known: tuple[int, Any, int | None] | None = getattr(request, "midstream_cache", None)
    if known is None or known[0] != length:
        keys, hit = _make(request, length)
        if known is not None and (known[1] is not None or keys is not None):
            keys = _Alone()  # streaming input: what was computed before has the edits for a shorter prompt
        known = request.midstream_cache = (length, keys, hit)
    return known[1:]


def _make(request: Any, length: int) -> tuple[Any, int | None]:
    try:
        carried = PlanRequest.of(request.sampling_params)
        if carried is None:
            return None, None
        known = _known_keys.get(
            (carried.wire, length, carried.num_layers),
            lambda: _keyed(carried, length),
            lambda found: sys.maxsize if found.is_open else len(carried.wire) + (found.keys.size if found.keys else 0),
        )
        if not known.is_open:
            share(request.sampling_params, known.wire)
        if known.keys is None or known.keys.floor is None:
            return None, known.hit
        return known.keys if carried.checked or carried.wire in _accepted else _Unshared(known.keys), known.hit
    except PlanError:  # the worker will refuse it; until then its blocks are nobody's
        return _Alone(), 0


def accept(sampling_params: Any) -> None:
    """The workers have begun a request, and had nothing against its plan."""
    try:
        carried = PlanRequest.of(sampling_params)
    except PlanError:  # the workers refuse it
        return
    if carried is not None and not carried.checked:
        _accepted.get(carried.wire, lambda: None, lambda _: len(carried.wire))


class _Known(NamedTuple):
    """What a plan says of the cache, for prompts of one length.

    Attributes:
        keys: None if it is empty.
        hit: how far requests with it take cache hits; None for as far as there are any.
        wire: the plan, packed, one object for all that have it.
        is_open: whether it names vectors that may be others the next time.
    """

    keys: PlanKeys | None
    hit: int | None
    wire: bytes
    is_open: bool


_known_keys: Memory[_Known] = Memory()
_accepted: Memory[None] = Memory()


def _keyed(carried: PlanRequest, length: int) -> _Known:
    plan = carried.plan
    if not plan:
        return _Known(None, None, carried.wire, False)
    keys = PlanKeys(plan, length, carried.num_layers)
    return _Known(keys, lowest_captured(plan, length), carried.wire, has_open_names(plan))


class _Alone:
    """Keys that no other request has."""

    def __init__(self) -> None:
        self._key = secrets.token_hex(16)

    def at(self, end: int) -> str:
        return self._key


class _Unshared:
    """The keys of a plan that the workers may yet refuse: until they have, its KV is computed without its edits, and another plan may have
    the same edits up there. Below the floor, where there are none, blocks are shared as ever."""

    def __init__(self, keys: PlanKeys) -> None:
        self._keys = keys
        self._nonce = secrets.token_hex(16)

    def at(self, end: int) -> str | None:
        key = self._keys.at(end)
        return f"{key} {self._nonce}" if key is not None else None


class _Limited:
    """vLLM's KVCacheCoordinator, with cache hits up to `longest` tokens."""

    def __init__(self, coordinator: Any, longest: int) -> None:
        self._coordinator, self._longest = coordinator, longest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coordinator, name)

    def find_longest_cache_hit(self, block_hashes: Any, longest: int, *args: Any, **kwargs: Any) -> Any:
        return self._coordinator.find_longest_cache_hit(block_hashes, min(longest, self._longest), *args, **kwargs)


def heed_plans() -> None:
    """Have vLLM's prefix cache heed plans. Once a process; seen on vLLM 0.26 and 0.32.

    Classes and modules are changed, not objects: with two methods put onto the cache's objects, which the scheduler calls for every token,
    its part of a plain step was measured to be 4 % longer.
    """
    _key_blocks()
    _limit_hits()


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
