"""Parses and checks plans in the front end of any vLLM engine, and packs them into their wire form before the request is sent.

Only the workers know the model's sites, the named vectors and the recorded runs. They check these, and end a refused request
with `finish_reason="error"` and the message as its `stop_reason`. `midstream.VLLM` checks everything before it sends a request.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import difflib
import functools
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from itertools import islice
from types import SimpleNamespace
from typing import Any, TypeVar

from msgspec.structs import replace

from midstream.engine.launch import adapter_among, load_first
from midstream.errors import MidstreamError, PlanError
from midstream.memory import Memory
from midstream.plan import fields
from midstream.plan.ops.final import check_final
from midstream.plan.strangers import check_strangers
from midstream.plan.values import Capture, Intervention, ModelFacts, Plan, check, counted_from_0
from midstream.runtime.request import Envelope, PlanRequest, given_plan, packed, unpacked
from midstream.settings import NAME, WORKER, Settings

T = TypeVar("T")
_SIMILARITY = 0.88  # the ratio from which on a key looks like "midstream" misspelt
_MOST_KEYS = 64  # how many keys are compared
_ITEM_CHARACTERS = 8  # of a number or a key in JSON
_LARGE = 1 << 16  # characters of a plan's JSON
_READERS = 2  # threads for small plans, and as many for large ones
# The owner of the HTTP request that is being answered: a hash of its API key.
OWNER: ContextVar[bytes] = ContextVar("owner", default=b"")
_DRAFTING = ("ngram", "eagle")  # methods of speculative decoding
_RESIDUAL = ("resid_pre", "resid_mid", "resid_post", "attn_in", "attn_out", "mlp_in", "mlp_out")


class Readers:
    """Threads that parse strangers' data. Owners take turns, and no owner has more than one thread at a time.

    Args:
        threads: how many.
    """

    def __init__(self, threads: int) -> None:
        self._pool, self._free = ThreadPoolExecutor(threads, "midstream-plans"), threads
        self._waiting: dict[bytes, deque[tuple[Future[Any], Callable[[], Any]]]] = {}  # the first owner is next
        self._served = set[bytes]()
        self._lock = threading.Lock()

    def submit(self, owner: bytes, read: Callable[[], T]) -> Future[T]:
        """Call `read` on a thread, after this owner's earlier calls."""
        future: Future[T] = Future()
        with self._lock:
            self._waiting.setdefault(owner, deque()).append((future, read))
            self._start()
        return future

    def _start(self) -> None:
        """Start the calls for which there are threads. The caller holds the lock."""
        for owner in [owner for owner in self._waiting if owner not in self._served][: self._free]:
            call = self._waiting[owner].popleft()
            if not self._waiting[owner]:
                del self._waiting[owner]
            self._served.add(owner)
            self._free -= 1
            self._pool.submit(self._call, owner, *call)

    def _call(self, owner: bytes, future: Future[Any], read: Callable[[], Any]) -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(read())
            except BaseException as error:
                future.set_exception(error)
        with self._lock:
            self._served.discard(owner)
            if owner in self._waiting:
                self._waiting[owner] = self._waiting.pop(owner)  # behind all others, also those that came meanwhile
            self._free += 1
            self._start()


_readers = {is_large: Readers(_READERS) for is_large in (False, True)}


async def on_a_thread(size: int, read: Callable[..., T], *arguments: Any) -> T:
    """Run `read`, which parses a stranger's data, on another thread: the server's event loop serves all clients.

    Small and large plans have threads of their own, so a small plan never waits for a large one. API keys take turns, so a key's plan never
    waits for all plans of another key.

    Args:
        size: the approximate size of the data as JSON, in characters.
    """
    return await asyncio.wrap_future(_readers[size > _LARGE].submit(OWNER.get(), functools.partial(read, *arguments)))


def json_size(given: Any) -> int:
    """The approximate size of a value as JSON, in characters. Above `_LARGE` it stops counting."""
    size, parts = 0, [given]
    while parts and size <= _LARGE:
        match parts.pop():
            case str() as text:
                size += len(text)
            case list() | tuple() as items:
                size += _ITEM_CHARACTERS * len(items)
                parts += items[:_LARGE]
            case Mapping() as items:
                size += 2 * _ITEM_CHARACTERS * len(items)
                parts += islice(items.values(), _LARGE)
    return size


def parsing_on_a_thread(original: Callable[..., Any]) -> Callable[..., Any]:
    """An `AsyncLLM.add_request` that parses strangers' plans on another thread, since it runs on the server's event loop.

    It also has the workers load a new adapter first.
    """
    from vllm.v1.engine import EngineCoreRequest

    async def add_request(self: Any, request_id: Any, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        extra = getattr(params, "extra_args", None)
        given = (extra or {}).get(NAME)
        is_strangers = isinstance(given, (str, Mapping)) and not isinstance(given, Envelope)
        if is_strangers and not isinstance(prompt, EngineCoreRequest):
            try:
                own = await on_a_thread(json_size(given), _enveloped, self.vllm_config, given)
            except PlanError as error:
                raise as_client_error(error) from error
            params = copy.copy(params)
            params.extra_args = {**(extra or {}), NAME: own}
        await load_first(self, adapter_among(args, kwargs))
        return await original(self, request_id, prompt, params, *args, **kwargs)

    return add_request


def checking_plans(original: Callable[..., Any]) -> Callable[..., Any]:
    """An `InputProcessor.process_inputs` that checks plans. It is the first function that knows the prompt's tokens."""

    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = original(self, *args, **kwargs)
        params, settings = request.sampling_params, Settings.of(self.vllm_config)
        if params is None or (settings.plan is None and not params.extra_args):
            return request
        try:
            payload = admitted(self.vllm_config, settings, request)
        except PlanError as error:
            raise as_client_error(error) from error
        if payload is not None:
            params.extra_args = {**(params.extra_args or {}), NAME: payload}
        return request

    return process_inputs


def _enveloped(config: Any, given: Any) -> Envelope:
    """A plan from `extra_args`, in the form of midstream's own clients. Raises PlanError."""
    plan, is_strangers = given_plan(given)
    if is_strangers:
        check_strangers(plan, config.model_config.hf_text_config.num_hidden_layers, config.device_config.device_type)
    return Envelope(plan=packed(plan), shares=is_strangers)


def misspelt_key(extra: Mapping[str, Any]) -> str | None:
    """A key that is a misspelt "midstream", if there is one. vLLM ignores unknown keys."""
    for key in islice(extra, _MOST_KEYS):  # a client chooses how many there are, and how long they are
        name = re.sub(r"[^a-z]", "", str(key)[:32].lower())
        near = abs(len(name) - len(NAME)) <= 2 and difflib.SequenceMatcher(None, name, NAME).ratio() > _SIMILARITY
        if key != NAME and (near or name.startswith(NAME)):
            return key
    return None


def misspelt_key_error(place: str, key: str) -> PlanError:
    """The error for a misspelt key."""
    text = f"{place} has the unknown key {fields.shown(key)}; did you mean {NAME!r}?"
    return PlanError(text, field=key)


def as_client_error(error: MidstreamError) -> PlanError:
    """The error in a class of client errors of vLLM: `AsyncLLM` raises it unchanged, and servers answer 400 with its field as `param`."""
    return _refusal()(str(error), field=error.field)


@functools.cache
def _refusal() -> type[PlanError]:
    from vllm.exceptions import VLLMValidationError

    def init(self: Any, text: str, field: str | None) -> None:
        VLLMValidationError.__init__(self, text, parameter=field)
        self.field = field

    body = {
        "__module__": PlanError.__module__,
        "__init__": init,
        "__str__": Exception.__str__,  # vLLM's would repeat the parameter
    }
    return type("PlanError", (VLLMValidationError, PlanError), body)


def admitted(config: Any, settings: Settings, request: Any) -> dict[str, Any] | None:
    """The request's plan and trace in the form for the engine, with the engine-wide plan first. None if there are none.

    Raises:
        PlanError: the plan cannot be honoured.
    """
    params, engine_wide = request.sampling_params, settings.plan
    extra = params.extra_args or {}
    given = extra.get(NAME)
    if given is None:
        if config.parallel_config.worker_cls == WORKER and (key := misspelt_key(extra)) is not None:
            raise misspelt_key_error("extra_args", key)
        if engine_wide is None:
            return None
    _check_engine(config)
    envelope = given if type(given) is Envelope else _enveloped(config, given) if given is not None else Envelope()
    payload = PlanRequest.of(SimpleNamespace(extra_args={NAME: envelope or None}))
    if payload is None:
        if engine_wide is None:
            return dict(envelope)
        payload = PlanRequest(packed(Plan.of(None)))
    if getattr(request, "prompt_embeds", None) is not None:
        raise PlanError(
            "A plan refers to the positions of a prompt's tokens, and this prompt was given as prompt_embeds. Give token ids, and the "
            "embeddings as patches of resid_pre at layer 0."
        )
    layers = payload.num_layers or config.model_config.hf_text_config.num_hidden_layers
    if not payload.checked or engine_wide is not None:
        payload = _checked(config, engine_wide, request, payload, layers)
    elif request.mm_features:  # only vLLM sees them in a served prompt
        check(payload.plan, ModelFacts(), None, None, vectors=None, runs=None, multimodal=True)
    prompt_length, device = len(request.prompt_token_ids or ()), config.device_config.device_type
    trace = {"trace": envelope["trace"]} if "trace" in envelope else {}
    return {**trace, **payload.for_scheduler(prompt_length, layers, device).to_extra_args()[NAME]}


def _checked(config: Any, engine_wide: Any, request: Any, payload: PlanRequest, layers: int) -> PlanRequest:
    """The request with the engine-wide plan before its own. Raises PlanError for mistakes that the front end can see."""
    params, own = request.sampling_params, payload.plan
    wide = _engine_wide_plan(engine_wide) if engine_wide is not None else Plan()
    plan = _with_absolute_paths(wide + own if wide else own)
    unread = wide.probes if payload.checked else wide.probes + own.probes
    if not all(probe.stops for probe in unread):
        raise PlanError(
            "Only midstream.VLLM and `midstream serve` return scores, those of a request's own probes. A probe in any other plan needs "
            "stop_above or stop_below."
        )
    plan = counted_from_0(plan, layers)
    wire = payload.wire if plan is own else packed(plan)
    model = (layers, config.model_config.get_hidden_size(), str(config.model_config.dtype).removeprefix("torch."))
    case = (wire, model, len(request.prompt_token_ids or ()), params.max_tokens, bool(request.mm_features))
    _admitted.get(case, lambda: _check(*case), lambda _: len(wire))
    if payload.capture is None and payload.record is None and any(None in capture.sinks for capture in plan.captures):
        raise PlanError(
            "Capture.to is None, and only midstream.VLLM receives captured rows. Python in the engine's front end may name a directory "
            "or a Consumer; over HTTP, `midstream serve` returns the rows."
        )
    return replace(payload, wire=wire, num_layers=layers, checked=False)


def _check_engine(config: Any) -> None:
    """Raise PlanError for an engine that cannot carry out plans and traces."""
    if config.parallel_config.worker_cls != WORKER:
        raise PlanError(
            "This engine was not started with midstream, so it would silently ignore the plan. Start it by midstream.VLLM(...), "
            "or with vllm.LLM(model, **midstream.engine_arguments())."
        )
    if config.kv_transfer_config is not None:
        raise PlanError(
            "This engine has a KV connector (kv_transfer_config), which identifies KV by its tokens alone: it would give KV that a plan or "
            "a trace has changed to other requests. Start the engine without one."
        )
    if (speculative := config.speculative_config) is None:
        return
    if speculative.method not in _DRAFTING:
        raise PlanError(
            f"This engine drafts tokens by the method {speculative.method!r}, which midstream does not support. Start it with the "
            f"method {' or '.join(_DRAFTING)}, or without speculative_config."
        )
    if config.scheduler_config.async_scheduling:
        raise PlanError(
            "With speculative decoding and async scheduling, a step starts before midstream knows how many drafted tokens the last step "
            "kept, so it cannot tell the positions that a plan acts on. Start the engine with async_scheduling=False, or without "
            "speculative_config."
        )


def _with_absolute_paths(plan: Plan) -> Plan:
    """The plan with absolute directories, since the engine may have another working directory."""

    def absolute(to: Any) -> Any:
        return os.path.abspath(os.path.expanduser(to)) if isinstance(to, str) else to

    if not any(absolute(to) != to for capture in plan.captures for to in capture.sinks):
        return plan
    items = plan.interventions
    return Plan(
        tuple(dataclasses.replace(i, to=tuple(map(absolute, i.sinks))) if isinstance(i, Capture) else i for i in items)
    )


_engine_wide_plan = functools.lru_cache(1)(Plan.of)
_admitted: Memory[None] = Memory()


def _check(wire: bytes, model: tuple[int, int, str], prompt: int, max_tokens: int | None, multimodal: bool) -> None:
    """Raise PlanError for mistakes that the front end can see. It knows the width of the residual stream only."""
    plan = unpacked(wire)
    layers, hidden, dtype = model
    if plan.has_final:  # below, only parts of the plan are checked together
        check_final(plan.edits, layers)
    widths = {(site, layer): hidden for site in _RESIDUAL for layer in range(layers)}
    residual, others = list[Intervention](), list[Intervention]()
    for item in plan.interventions:
        sites = {item.site, *(site for site, _ in item.further)}
        (residual if sites.issubset(_RESIDUAL) else others).append(item)
    for part, facts in ((residual, ModelFacts(layers, widths, dtype)), (others, ModelFacts(layers, {}, dtype))):
        check(Plan(tuple(part)), facts, prompt, max_tokens, vectors=None, runs=None, multimodal=multimodal)
