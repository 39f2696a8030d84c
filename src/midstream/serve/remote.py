"""The routes that only `midstream.Remote` uses: requests with plans and traces, and the description of the model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import Response

from midstream.engine.admission import on_a_thread
from midstream.engine.launch import checked_parameters
from midstream.errors import (
    MidstreamError,
    ParameterError,
    PlanError,
    PromptError,
    TraceError,
    TracesNotAllowedError,
    about,
)
from midstream.lowering.tiers import Lowering
from midstream.plan.values import Plan
from midstream.plan.wire import MAX_STRANGERS_BYTES
from midstream.remote.calls import MAX_PROMPTS, CallEntry, RemoteCall, UpdateWriter
from midstream.requests.arguments import MAX_ANSWERS, answers_of
from midstream.requests.invokes import Invoke, OutputStream
from midstream.runtime.request import Tier
from midstream.serve.gate import error_response
from midstream.serve.requests import (
    Server,
    adapter_of,
    new_router,
    receive_body,
    server_of,
)
from midstream.settings import NAME, Settings
from midstream.trace.shipping import ShippedCode, check_python
from midstream.transport.data import message_chunks, pack_data
from midstream.transport.messages import SentTensors

MAX_CALL_BYTES = 64 << 20  # with code and its tensors
_MAX_PART_BYTES = 2 * MAX_STRANGERS_BYTES  # of a plan or of parameters, before they are read
_MAX_ANSWERS_BYTES = 1 << 18
_PROMPT_BYTES = 1 << 10  # preparing a prompt takes as long as reading so many bytes of a plan
_ALIVE_SECONDS = 5.0
_SAVES_SECONDS = 0.5
_log = logging.getLogger(__name__)
router = new_router()


@router.get("/description")
async def description(request: Request) -> dict[str, Any]:
    """The model's modules, shapes and sites, for `midstream.Remote`."""
    model = server_of(request).model
    names = ("architectures", "vocab_size", "num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim")
    config = model.vllm_config.model_config.hf_text_config
    return {
        **model.description,
        "model": model.model_name,
        "config": {name: getattr(config, name, None) for name in names},
        "hf_config": json.loads(model.config.to_json_string(use_diff=False)),
        "generation": dict(model._generation),
        "max_model_len": model.vllm_config.model_config.max_model_len,
    }


@router.get("/tokenizer")
async def tokenizer(request: Request) -> Any:
    """The tokenizer as the JSON of the tokenizers library, and the settings of transformers' around it."""
    found = server_of(request).model.tokenizer
    if not found.is_fast:
        return error_response(404, "The model's tokenizer has no JSON form: load it by its name, with transformers.")
    settings = {
        **found.special_tokens_map,
        "chat_template": found.chat_template,
        "clean_up_tokenization_spaces": found.clean_up_tokenization_spaces,
        "model_max_length": found.model_max_length,
    }
    return {"tokenizer": found.backend_tokenizer.to_str(), "settings": settings}


@router.post("/generate")
async def generate(request: Request) -> Any:
    """Requests of `midstream.Remote`, with plans and, if the server allows it, traces. The body and the response are binary.

    Closing the connection ends the requests.
    """
    server = server_of(request)
    body = await receive_body(
        request, MAX_CALL_BYTES, "The call has {}. Send fewer prompts, or smaller tensors, in one call."
    )
    call = _read(server, body)
    adapters = {name: await adapter_of(request, name) for name in {asked.model for asked in call.asked}}
    stream = await on_a_thread(len(body) + _PROMPT_BYTES * len(call.asked), _stream, server, call, adapters)
    return StreamingMessages(_messages(server, stream, call))


def _read(server: Server, body: bytes) -> RemoteCall:
    try:
        call = msgspec.msgpack.decode(body, type=RemoteCall)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ParameterError(f"The call is not what midstream.Remote sends: {error}.") from error
    if not call.asked:
        raise PromptError(f"One call has 1 to {MAX_PROMPTS} prompts; none was sent.", field="asked")
    if call.programs:
        _check_code(server, call)
    return call


def _check_code(server: Server, call: RemoteCall) -> None:
    with about("programs"):
        if not Settings.of(server.model.vllm_config).allow_traces:
            raise TracesNotAllowedError(
                "This server takes plans and no code. Its operator allows traces by `midstream serve --midstream-allow-traces "
                "--api-key ...`."
            )
        check_python(call.programs)
    with about("version"):
        if call.version != (own_version := metadata.version(NAME)):
            raise TraceError(
                f"The client's midstream is {call.version} and the server's is {own_version}. For traces they have to be the same."
            )
    for name in ("bodies", "keeps_to_graphs"):
        with about(name):
            if len(getattr(call, name)) != len(call.asked):
                raise ParameterError(
                    f"The call is not what midstream.Remote sends: {name} has one entry for each prompt."
                )


def _stream(server: Server, call: RemoteCall, adapters: Mapping[str | None, Any]) -> OutputStream:
    """The call's requests. `adapters`: by name. Not called on the event loop: a call may have many plans and long prompts."""
    plans = []
    for number, plan in enumerate(call.plans):
        with about(f"plans[{number}]"):
            plans.append(server.read_plan(_loaded(plan, _MAX_PART_BYTES, "A plan", PlanError)))
            server.model.planner.check(plans[-1])  # alone, so that the error says which plan is wrong
    invokes = [
        replace(_invoke(server, asked, plans, f"asked[{number}]"), adapter=adapters[asked.model])
        for number, asked in enumerate(call.asked)
    ]
    with about("asked"):
        prompts = server.model._all_token_ids(invokes)
    code = ShippedCode(call.programs, call.bodies) if call.programs else None
    with about("own"):
        lowering = _lowering(call, plans, prompts) if code is not None else None
        if code is None and call.own:
            _check_engine_wide_plan(server, call, plans)
    try:
        return server.model.stream(invokes, prompts, code, call.together, lowering)
    except PlanError:  # the plan does not fit its prompt
        with about("plans"):
            raise
    except (PromptError, ParameterError):
        with about("asked"):
            raise


def _check_engine_wide_plan(server: Server, call: RemoteCall, plans: Sequence[Plan]) -> None:
    """Raise PlanError for traces that were sent as plans, if the engine-wide plan edits a point that they read or write.

    A trace acts after the edits of another plan. In one plan, the edits would have another order.
    """
    model = server.model
    lowering = Lowering(Tier.PLAN, _own(call, plans, len(call.asked)), [])
    if not lowering.stands_beside([Plan(model.plan.edits)] * len(call.asked), model.num_layers):
        raise PlanError(
            "The server's engine-wide plan edits a site and layer that this trace reads or writes. Use others, or have an administrator "
            "delete that plan."
        )


def _own(call: RemoteCall, plans: Sequence[Plan], prompts: int) -> list[Plan]:
    """The plan of each prompt's trace."""
    if len(call.own) != prompts or not all(0 <= number < len(plans) for number in call.own):
        raise ParameterError("The call is not what midstream.Remote sends: own has a plan's number for each prompt.")
    return [plans[number] for number in call.own]


def _lowering(call: RemoteCall, plans: Sequence[Plan], prompts: Sequence[list[int]]) -> Lowering:
    """The client's lowering of its traces. If a plan lacks a capture that its trace reads, only that trace fails."""
    if call.tier is Tier.FORWARD or call.lengths != list(map(len, prompts)):
        return Lowering(Tier.FORWARD, [Plan()] * len(prompts), call.keeps_to_graphs)
    if call.tier is not Tier.BEHIND:
        raise ParameterError("The call is not what midstream.Remote sends: its code runs in the forward or behind it.")
    return Lowering(Tier.BEHIND, _own(call, plans, len(prompts)), call.keeps_to_graphs)


def _invoke(server: Server, asked: CallEntry, plans: Sequence[Plan], place: str) -> Invoke:
    model = server.model
    with about(f"{place}.plan"):
        if asked.plan is not None and not 0 <= asked.plan < len(plans):
            raise ParameterError(f"The call has no plan {asked.plan}.")
        plan = Plan() if asked.plan is None else plans[asked.plan]
        server.check_probe_names(plan)
    with about(f"{place}.answers"):
        given = _loaded(asked.answers, _MAX_ANSWERS_BYTES, "A list of answers", PromptError, list[str | int])
        if len(given) > MAX_ANSWERS:
            raise PromptError(f"answers has {len(given)} entries; allowed: up to {MAX_ANSWERS}.")
        (answers,) = answers_of([given] if given else [], 1, lambda: model.tokenizer, model.vocab_size)
    with about(f"{place}.params"):
        params = checked_parameters(
            _loaded(asked.params, _MAX_PART_BYTES, "A set of parameters", ParameterError, dict[str, Any])
        )
    with about(f"{place}.prompt"):
        longest = server.longest_prompt_bytes
        prompt = _loaded(asked.prompt, longest, "A prompt for this model", PromptError, str | list[int])
    return Invoke(prompt, None, params, plan, answers)


def _loaded(part: msgspec.Raw, limit: int, what: str, too_large: type[MidstreamError], form: Any = Any) -> Any:
    """A part of a call. Raises `too_large` if it is over `limit` bytes, ParameterError if it is of another form."""
    if (size := memoryview(part).nbytes) > limit:
        raise too_large(f"{what} has at most {limit} bytes as msgpack; {size} were sent.")
    try:
        return msgspec.msgpack.decode(part, type=form)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ParameterError(f"The call is not what midstream.Remote sends: {error}.") from error


async def _messages(server: Server, stream: OutputStream, call: RemoteCall) -> AsyncGenerator[bytes]:
    """The messages for the client: outputs as they come, an error, and None as a sign of life."""
    sent, loop = SentTensors(), asyncio.get_running_loop()
    hidden = {probe.name for probe in server.model.connection.watched}
    with server.counting_prompts(len(call.asked)):
        async with contextlib.aclosing(_values(stream, call, hidden)) as values:
            async for value in values:
                packed = await loop.run_in_executor(None, partial(pack_data, value, sent))
                for chunk in message_chunks(packed):
                    yield chunk
                    await asyncio.sleep(0)  # gives way to other requests: a fast client never makes the server wait


async def _values(stream: OutputStream, call: RemoteCall, hidden: Collection[str]) -> AsyncGenerator[Any]:
    writers = [UpdateWriter(index, hidden) for index in range(len(call.asked))]
    loop, items = asyncio.get_running_loop(), with_heartbeats(stream.items())
    last = loop.time()
    try:
        async with contextlib.aclosing(items):
            async for item in items:
                if item is None:
                    yield None
                    continue
                index, output, result = item
                if result is None and not call.stream:  # now and then, in case the client loses the connection
                    if loop.time() - last < (_SAVES_SECONDS if output.saves else _ALIVE_SECONDS):
                        continue
                    if not output.saves:
                        last = loop.time()
                        yield None
                        continue
                last = loop.time()
                if result is not None:  # captured rows may have to be joined
                    yield await loop.run_in_executor(None, writers[index].message, output, result)
                else:
                    yield writers[index].message(output, None)
    except MidstreamError as error:
        yield error
    except Exception:
        _log.exception("a request of midstream.Remote failed")
        yield MidstreamError("The server failed. Its log says why.")


async def with_heartbeats(items: Any) -> AsyncGenerator[Any]:
    """The items, and None whenever none has come for some seconds, as a sign of life."""
    async with contextlib.aclosing(items):
        while True:
            waiting = asyncio.ensure_future(anext(items, _END))
            try:
                while not (await asyncio.wait([waiting], timeout=_ALIVE_SECONDS))[0]:
                    yield None
                if (item := waiting.result()) is _END:
                    return
            finally:
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
            yield item


_END = object()


class StreamingMessages(Response):
    """A streamed response that closes its source, which ends the requests, as soon as the client has gone.

    Args:
        ended: called at the end, also if the client has gone before the source was started.
    """

    def __init__(
        self,
        source: AsyncGenerator[bytes],
        media_type: str = "application/x-midstream",
        ended: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__()
        self._source, self._type, self._ended = source, media_type, ended

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        sending = asyncio.create_task(self._send(send))
        gone = asyncio.create_task(self._until_gone(receive))
        try:
            await asyncio.wait([sending, gone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, gone):
                task.cancel()
            await asyncio.shield(asyncio.gather(sending, gone, return_exceptions=True))
            if self._ended is not None:
                await asyncio.shield(self._ended())

    async def _send(self, send: Any) -> None:
        headers = [
            (b"content-type", self._type.encode()),
            (b"x-accel-buffering", b"no"),
            (b"cache-control", b"no-store"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with contextlib.aclosing(self._source) as chunks:
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _until_gone(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
