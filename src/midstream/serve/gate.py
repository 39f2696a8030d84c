"""The middleware around all routes of the server, vLLM's and midstream's. It handles bodies that stall, plans in the wrong place, and
responses that would be cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers

from midstream.engine.admission import OWNER
from midstream.settings import NAME

TAKING = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
_STALLED_SECONDS = 30.0  # a body is given up if no part of it comes for so long
_LAST_SECONDS = 5  # time for clients to read the rest of their responses after the engine has ended
_RETRY_AFTER = b"5"  # seconds
_ENDING = "The server is ending. Ask another one, or try again later."
_KINDS = {
    403: "PermissionDeniedError",
    404: "NotFoundError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}  # names as the openai client has them


class RequestRefused(Exception):
    """The request is answered with this status and message."""

    def __init__(self, status: int, message: str, parameter: str | None = None) -> None:
        super().__init__(status, message, parameter)


def error_response(status: int, message: str, parameter: str | None = None, kind: str | None = None) -> JSONResponse:
    """A response with an error in OpenAI's form. By default its type, `kind`, follows from the status."""
    kind = kind or _KINDS.get(status, "BadRequestError")
    return JSONResponse({"error": {"message": message, "type": kind, "param": parameter, "code": status}}, status)


def owner_of(headers: Mapping[str, str]) -> bytes:
    """The owner of a request with these headers: a hash of the API key."""
    return hashlib.sha256(headers.get("authorization", "").partition(" ")[2].encode()).digest()


class Gate:
    """ASGI middleware around all routes.

    - A body of which no part comes for 30 seconds is answered with 408, and JSON that is nested too deeply for Python with 400.
    - The field "midstream" is refused on routes that would ignore it.
    - A server that is ending refuses new requests. It does not wait long for clients that neither send nor read, even if its engine has
      died; uvicorn alone would.
    - A request that fails or outlives the server ends with an error in OpenAI's form: as its response, or in a stream as an event `error`.
    - Every response with status 429 or 503, also vLLM's, says when to try again.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" and (uvicorn := getattr(scope["app"].state, "server", None)) is not None:
            uvicorn.config.timeout_graceful_shutdown = _LAST_SECONDS
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        OWNER.set(owner_of(Headers(scope=scope)))
        answer = _Answer(scope, send)
        try:
            if scope["method"] not in ("GET", "HEAD"):
                OWNER.set(owner_of(Headers(scope=scope)))
                receive = await _checked(scope, _timed(receive))
            await self._app(scope, receive, answer.send)
        except RequestRefused as error:
            await answer.fail(*error.args)
        except RecursionError:
            await answer.fail(400, "The request is nested too deeply.")
        except asyncio.CancelledError:  # uvicorn cancels requests that outlive the server
            await answer.fail(503, _ENDING)
            raise
        except Exception:
            if answer.has_begun:  # else vLLM answers
                await answer.fail(500, "The server failed. Its log says why.")
            raise


class _Answer:
    """A response as it is sent."""

    def __init__(self, scope: Any, send: Any) -> None:
        self._scope, self._send = scope, send
        self.has_begun = self._has_ended = self._is_events = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.has_begun, headers = True, {name.lower(): value for name, value in message["headers"]}
            self._is_events = headers.get(b"content-type", b"").startswith(b"text/event-stream")
            if message["status"] in (429, 503) and b"retry-after" not in headers:
                message["headers"] = [*message["headers"], (b"retry-after", _RETRY_AFTER)]
        elif message["type"] == "http.response.body":
            self._has_ended = not message.get("more_body", False)
        await self._send(message)

    async def fail(self, status: int, message: str, parameter: str | None = None) -> None:
        """End the response with an error, if it still can have one."""
        response = error_response(status, message, parameter)
        if not self.has_begun:
            await response(self._scope, None, self.send)  # type: ignore[arg-type]
        elif self._is_events and not self._has_ended:
            event = b"event: error\ndata: %b\n\n" % bytes(response.body)
            await self.send({"type": "http.response.body", "body": event, "more_body": False})


def _timed(receive: Any) -> Any:
    """`receive`, which raises RequestRefused if no part of an unfinished body comes for a while."""
    is_complete = False

    async def receiving() -> Any:
        nonlocal is_complete
        if is_complete:  # the next message says that the client has left
            return await receive()
        try:
            message = await asyncio.wait_for(receive(), _STALLED_SECONDS)
        except TimeoutError:
            text = f"Nothing of the body came for {_STALLED_SECONDS:.0f} seconds."
            raise RequestRefused(408, text) from None
        is_complete = message["type"] != "http.request" or not message.get("more_body", False)
        return message

    return receiving


async def _checked(scope: Any, receive: Any) -> Any:
    """A `receive` for the route. For vLLM's routes, the body is read and checked first. Raises RequestRefused."""
    path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
    server = getattr(scope["app"].state, NAME, None)
    if scope["method"] == "POST" and server is not None and server.is_draining:
        raise RequestRefused(503, _ENDING)
    if path.startswith(f"/v1/{NAME}/"):  # these read and limit their bodies themselves
        return receive
    messages = [await receive()]
    while messages[-1]["type"] == "http.request" and messages[-1].get("more_body"):
        messages.append(await receive())
    if path not in TAKING and _has_field(b"".join(message.get("body", b"") for message in messages), path):
        raise RequestRefused(400, f"{path} takes no plan in this place. Routes that do: {', '.join(TAKING)}.", NAME)
    remaining = iter(messages)

    async def again() -> Any:
        return next(remaining, None) or await receive()

    return again


def _has_field(body: bytes, path: str) -> bool:
    if not any(each in body for each in (NAME.encode(), b"\\u", b"\0")):  # as it is, in escapes, or in UTF-16
        return False
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(given := json.loads(body), dict):
            places = [given, given.get("sampling_params")]
            if path != f"{TAKING[1]}/batch":  # this route passes vllm_xargs on to the engine
                places.append(given.get("vllm_xargs"))
            return any(isinstance(place, dict) and NAME in place for place in places)
    return False
