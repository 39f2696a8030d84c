"""vLLM's endpoint plugin: midstream's routes under /v1/midstream, and plans in the requests of vLLM's own.

vLLM loads it where VLLM_PLUGINS names midstream (entry point group `vllm.endpoint_plugins`), which `midstream serve` sees to.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response

from midstream import __version__
from midstream.engine.plugin import apply
from midstream.engine.seams import Role
from midstream.errors import MidstreamError, PlanError
from midstream.plan.ops.edit import kinds
from midstream.plan.vectors import read_vectors
from midstream.plan.wire import MAX_STRANGERS_BYTES, MAX_STRANGERS_EDITS
from midstream.serve.captures import MAX_INLINE_BYTES, CaptureStore
from midstream.serve.requests import Server, owner_of
from midstream.settings import NAME, WORKER

MAX_UPLOAD_BYTES = 64 << 20
MAX_VECTOR_BYTES = 256 << 20  # of all named vectors together
CAPTURE_BYTES = "MIDSTREAM_CAPTURE_BYTES"  # environment variables of the server
CAPTURE_SECONDS = "MIDSTREAM_CAPTURE_SECONDS"
router = APIRouter(prefix=f"/v1/{NAME}", tags=[NAME])


class Plugin:
    """See vLLM's `EndpointPlugin`."""

    name = NAME
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Prepare the server. Raises MidstreamError, which ends it, if it was started in a way that midstream does not support."""
        config = engine_client.vllm_config
        if config.parallel_config.worker_cls != WORKER:
            raise MidstreamError(
                "VLLM_PLUGINS names midstream, and the engine was started without it. Start the server by `midstream serve`, or with the "
                "flags that `midstream serve --flags` prints."
            )
        if (count := getattr(args, "api_server_count", None) or 1) > 1:
            raise MidstreamError(
                f"--api-server-count={count} is not supported by midstream: named vectors and captures live in one front end. Leave it "
                "out, or start several servers behind a load balancer."
            )
        if (size := config.parallel_config.data_parallel_size) > 1:
            raise MidstreamError(
                f"--data-parallel-size={size} is not supported by midstream: named vectors live in each engine. Start one server for each "
                "engine, behind a load balancer."
            )
        apply(Role.SERVER)
        captures = CaptureStore(
            int(os.environ.get(CAPTURE_BYTES, 4 << 30)), float(os.environ.get(CAPTURE_SECONDS, 600))
        )
        server = Server(engine_client, captures)
        await server.model.start()
        engine_client.midstream_server = state.midstream = server


def _server(request: Request) -> Server:
    return request.app.state.midstream  # type: ignore[no-any-return]


def _problem(status: int, message: str, parameter: str | None = None) -> JSONResponse:
    """An error in OpenAI's form."""
    kind = {404: "NotFoundError", 413: "RequestTooLargeError", 403: "PermissionDeniedError"}.get(
        status, "BadRequestError"
    )
    return JSONResponse({"error": {"message": message, "type": kind, "param": parameter, "code": status}}, status)


def _answering_400(route: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @wraps(route)
    async def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return await route(*args, **kwargs)
        except PlanError as error:
            return _problem(400, str(error))

    return call


@router.get("/capabilities")
async def capabilities(request: Request) -> dict[str, Any]:
    """The model, its sites, and what this server accepts."""
    import vllm

    server = _server(request)
    model = server.model
    sites: dict[str, dict[str, Any]] = {}
    for (site, layer), width in sorted(model.facts.widths.items()):
        sites.setdefault(site, {"width": width, "layers": []})["layers"].append(layer)
    return {
        "midstream": __version__,
        "vllm": vllm.__version__,
        "model": model.model_name,
        "dtype": model.facts.dtype,
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "sites": sites,
        "kinds": [*kinds(), "capture"],
        "limits": {
            "plan_bytes": MAX_STRANGERS_BYTES,
            "plan_edits": MAX_STRANGERS_EDITS,
            "upload_bytes": MAX_UPLOAD_BYTES,
            "vector_bytes": MAX_VECTOR_BYTES,
            "inline_bytes": MAX_INLINE_BYTES,
            "capture_bytes": server.captures.budget,
            "capture_seconds": server.captures.seconds,
        },
    }


@router.get("/vectors")
async def list_vectors(request: Request) -> dict[str, Any]:
    """The named vectors, and the width of each."""
    return {"vectors": {name: {"width": width} for name, width in _server(request).model.vectors.widths.items()}}


@router.post("/vectors")
@_answering_400
async def upload_vectors(request: Request) -> Any:
    """Register every vector `[hidden]` of a safetensors file, which is the request's body, under its name in the file.

    A name that is taken is an error: delete it first.
    """
    server, data = _server(request), bytearray()
    async for part in request.stream():
        data += part
        if len(data) > MAX_UPLOAD_BYTES:
            return _problem(413, f"The file has over {MAX_UPLOAD_BYTES >> 20} MiB; send its vectors in several files.")
    vectors = server.model.vectors
    found = await asyncio.get_running_loop().run_in_executor(None, read_vectors, bytes(data), "the body")
    if taken := sorted(found.keys() & vectors.keys()):
        raise PlanError(f"The vector {taken[0]!r} is there already: delete it first, or use another name.")
    held = sum(vector.data.nbytes for vector in [*vectors.values(), *found.values()])
    if held > MAX_VECTOR_BYTES:
        return _problem(413, f"All vectors together may have {MAX_VECTOR_BYTES >> 20} MiB. Delete some first.")
    vectors.update(found)
    server.vector_owners.update(dict.fromkeys(found, owner_of(request.headers)))
    async with server.model.connection.sending:
        await server.model.connection.send_vectors()
    return {"vectors": {name: {"width": vector.width} for name, vector in found.items()}}


@router.delete("/vectors/{name}")
async def delete_vector(request: Request, name: str) -> Any:
    """Forget a vector. Only the API key that has uploaded it may."""
    server = _server(request)
    vectors = server.model.vectors
    if name not in vectors:
        return _problem(404, f"There is no vector {name!r}. Known: {', '.join(vectors) or 'none'}.", "name")
    if server.vector_owners.get(name) != owner_of(request.headers):
        return _problem(403, f"The vector {name!r} was uploaded with another API key.", "name")
    del vectors[name], server.vector_owners[name]
    return {"deleted": name}


@router.get("/captures/{handle}")
async def get_capture(request: Request, handle: str) -> Any:
    """A captured tensor `[positions, width]` as a safetensors file with the tensor `rows`; its metadata is the response's entry."""
    held = _server(request).captures.get(owner_of(request.headers), handle)
    if held is None:
        return _problem(
            404, "There are no captures under this handle: it has expired, or is another API key's.", "handle"
        )

    def file() -> bytes:
        from safetensors.torch import save

        return save({"rows": held.tensor}, {name: str(value) for name, value in held.about.items()})

    data = await asyncio.get_running_loop().run_in_executor(None, file)
    return Response(data, media_type="application/octet-stream")


@router.delete("/captures/{handle}")
async def delete_capture(request: Request, handle: str) -> Any:
    """Forget captured rows before their handle expires."""
    if not _server(request).captures.drop(owner_of(request.headers), handle):
        return _problem(
            404, "There are no captures under this handle: it has expired, or is another API key's.", "handle"
        )
    return {"deleted": handle}


@router.get("/gauges")
async def gauges(request: Request) -> dict[str, Any]:
    """What the server and each worker hold."""
    server = _server(request)
    return {"server": server.captures.gauges, "workers": await server.model.gauges()}
