"""Sweeps and path patching over HTTP: a route takes one and streams its events as they come."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from typing import Annotated, Any, Literal

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import TypedDict

from midstream.errors import MidstreamError
from midstream.plan.wire import MAX_STRANGERS_EDITS
from midstream.requests.arguments import is_chat, prompts_of
from midstream.serve.gate import RequestRefused, error_response, owner_of
from midstream.serve.remote import StreamingMessages, with_heartbeats
from midstream.serve.requests import (
    Listed,
    Server,
    SpanOfText,
    adapter_of,
    new_router,
    openapi_body,
    read_place,
    receive_body,
    server_of,
)
from midstream.settings import NAME
from midstream.sweeps.events import Event, Outline, encode_event
from midstream.sweeps.paths import frozen_points
from midstream.sweeps.sweep_run import SweepStream

MAX_BODY_BYTES = 4 << 20
MAX_PAIRS = 64
MAX_CELLS = 65_536
MAX_LISTED = 1024  # sites, layers, heads and positions that a sweep may list
MAX_TOP = 20
MESSAGE_BYTES = 16  # of a chat's message, at least, in addition to its texts
MAX_SWEEPS, MAX_SWEEPS_OF_A_KEY = 32, 4  # at a time
_log = logging.getLogger(__name__)
router = new_router()
Token = str | int
Place = int | str | SpanOfText


class ChatMessage(TypedDict):
    """One message of a chat. The model's chat template turns the chat into text."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[misc]
    role: str
    content: str


Prompt = str | Listed[int] | Listed[ChatMessage]


class _ToRun(BaseModel):
    """The arguments that a sweep and path patching share."""

    model_config = ConfigDict(extra="forbid", strict=True)
    clean: Prompt | Listed[Prompt]
    corrupt: Prompt | Listed[Prompt] | None = None
    answer: Token | Listed[Token]
    foil: Token | Listed[Token] | None = None
    layers: Literal["all"] | Annotated[list[int], Field(max_length=MAX_LISTED)] = "all"
    positions: (
        Literal["all", "together"]
        | Annotated[list[Place] | dict[str, Place | Listed[Place]], Field(max_length=MAX_LISTED)]
    ) = "all"
    heads: Literal["all"] | Annotated[list[int], Field(max_length=MAX_LISTED)] | None = None
    metric: Literal["logit_diff", "logprob", "recovered"] = "logit_diff"
    direction: Literal["denoising", "noising"] | None = None
    model: str | None = None  # the name of an adapter


class SweepToRun(_ToRun):
    """The arguments of `midstream.VLLM.sweep`. `model` names an adapter, as in OpenAI's API."""

    sites: list[str] = Field(["resid_post"], max_length=MAX_LISTED)
    source: Literal["run", "zeros", "mean"] = "run"
    coarse: list[int] | None = Field(None, min_length=2, max_length=2)
    best: int = 3
    top: int = Field(0, ge=0, le=MAX_TOP)


class PathsToPatch(_ToRun):
    """The arguments of `midstream.VLLM.path_patching`. `model` names an adapter, as in OpenAI's API."""

    receivers: Literal["logits"] | Annotated[Listed[tuple[int, int]], Field(max_length=MAX_LISTED)] = "logits"
    freeze_mlps: bool = False
    positions: (
        Literal["all", "together"]
        | Annotated[list[Place] | dict[str, Place | Listed[Place]], Field(max_length=MAX_LISTED)]
    ) = "together"
    heads: Literal["all"] | Annotated[list[int], Field(max_length=MAX_LISTED)] = "all"


@router.post("/sweeps", openapi_extra=openapi_body(f"/v1/{NAME}/sweeps", SweepToRun))
async def sweep(request: Request) -> Any:
    """Run a sweep, and stream its server-sent events: `start`, `baselines`, `cell`, `noise` and `summary`.

    An error before the first event is a plain 4xx. A later error is an event `error`. Closing the connection ends the sweep and deletes
    its recorded runs.
    """
    return await _streamed(request, SweepToRun, server_of(request).model.sweep)


@router.post("/path_patching", openapi_extra=openapi_body(f"/v1/{NAME}/path_patching", PathsToPatch))
async def path_patching(request: Request) -> Any:
    """Run path patching: the events, errors and limits of a sweep."""
    return await _streamed(request, PathsToPatch, server_of(request).model.path_patching)


async def _streamed(request: Request, body_class: type[_ToRun], start: Callable[..., SweepStream]) -> Any:
    """The response of a route. `start`: the model's method with the arguments of the body."""
    server = server_of(request)
    body = await receive_body(request, MAX_BODY_BYTES, "The sweep has {}. Send fewer prompts.")
    try:
        asked = body_class.model_validate_json(body)
    except ValidationError as error:
        errors = error.errors()
        first = next((each for each in errors if each["type"] == "too_long"), errors[0])
        field = str(first["loc"][0]) if first["loc"] else "body"
        raise RequestRefused(
            400, f"{'.'.join(map(str, first['loc'])) or 'The body'}: {first['msg']}.", field
        ) from error
    owner = owner_of(request.headers)
    if server.sweeps[owner] >= MAX_SWEEPS_OF_A_KEY:
        raise RequestRefused(
            503, f"This API key runs {MAX_SWEEPS_OF_A_KEY} sweeps already. Try again when one of them has ended."
        )
    if server.sweeps.total() >= MAX_SWEEPS:
        raise RequestRefused(503, f"The server runs {MAX_SWEEPS} sweeps already. Try again later.")
    _check_size(server, asked)
    adapter = await adapter_of(request, asked.model)
    stream = start(**_arguments(asked), lora_request=adapter, stream=True)
    server.sweeps[owner] += 1

    async def ended() -> None:
        server.sweeps -= Counter([owner])  # without entries at zero
        await stream.events.aclose()

    try:
        outline = await anext(stream.events)
        assert isinstance(outline, Outline)
        if outline.cells > MAX_CELLS:
            raise RequestRefused(
                400, f"The sweep has {outline.cells:,} cells; allowed: {MAX_CELLS:,}. Sweep fewer layers.", "layers"
            )
        _check_frozen(server, outline)
    except BaseException:
        await ended()
        raise
    return StreamingMessages(_sent(server, outline, stream.events), "text/event-stream", ended)


def _check_frozen(server: Server, outline: Outline) -> None:
    """Raise RequestRefused for path patching whose cells have more edits than a client's own plan may have."""
    if outline.paths is None:
        return
    first = min(layer for row in outline.grid.layers for layer in row)
    points = len(frozen_points(outline.paths, first, server.model.facts.num_layers))
    tokens = max(len(prompt) for pair in outline.pairs for prompt in (pair.clean, pair.corrupt or ()))
    if points * tokens > MAX_STRANGERS_EDITS:
        raise RequestRefused(
            400,
            f"A sender in layer {first} freezes {points} values at each of {tokens} tokens, {points * tokens:,} in all; allowed: "
            f"{MAX_STRANGERS_EDITS:,} over HTTP. Choose later layers=, shorter prompts or freeze_mlps=False.",
            "layers",
        )


def _check_size(server: Server, asked: _ToRun) -> None:
    """Raise RequestRefused for a sweep over the server's limits. The model's own limits are checked with the tokens."""
    for name in ("clean", "corrupt"):
        given = getattr(asked, name)
        prompts, _ = ([], True) if given is None else prompts_of(given)
        if len(prompts) > MAX_PAIRS:
            raise RequestRefused(400, f"The sweep has {len(prompts)} pairs of prompts; allowed: {MAX_PAIRS}.", name)
        if any(_bytes_of(each) > server.longest_prompt_bytes for each in prompts):
            raise RequestRefused(400, f"A prompt for this model has at most {server.longest_prompt_bytes} bytes.", name)


def _bytes_of(prompt: Any) -> int:
    """The bytes of the prompt's text; 0 for token ids. The template adds a few bytes to each message of a chat."""
    if isinstance(prompt, str):
        return len(prompt.encode(errors="replace"))
    if not is_chat(prompt):
        return 0
    return sum(MESSAGE_BYTES + sum(map(_bytes_of, message.values())) for message in prompt)


def _arguments(asked: _ToRun) -> dict[str, Any]:
    given = {name: getattr(asked, name) for name in type(asked).model_fields if name != "model"}
    positions = given["positions"]
    if isinstance(positions, list):
        positions = [read_place(place) for place in positions]
    elif isinstance(positions, dict):
        positions = {
            name: [read_place(place) for place in entry] if isinstance(entry, list) else read_place(entry)
            for name, entry in positions.items()
        }
    return {**given, "positions": positions}


async def _sent(server: Server, outline: Outline, events: AsyncGenerator[Event]) -> AsyncGenerator[bytes]:
    with server.counting_prompts():
        yield _sse("start", encode_event(outline))
        try:
            async with contextlib.aclosing(with_heartbeats(events)) as found:
                async for event in found:
                    if event is None:
                        yield b": the sweep is running\n\n"
                    else:
                        yield _sse(type(event).__struct_config__.tag, encode_event(event))
        except MidstreamError as error:
            yield _sse("error", error_response(500, str(error), error.field, type(error).__name__).body)
        except Exception:
            _log.exception("a sweep failed")
            yield _sse(
                "error", error_response(500, "The server failed. Its log says why.", kind="InternalServerError").body
            )


def _sse(name: Any, data: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (str(name).encode(), bytes(data))
