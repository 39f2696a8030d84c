"""vLLM's endpoint plugin: midstream's routes under /v1/midstream, and plans in the requests of vLLM's own.

vLLM loads this plugin if VLLM_PLUGINS names midstream (entry point group `vllm.endpoint_plugins`). `midstream serve` sets VLLM_PLUGINS.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import sys
from collections.abc import AsyncIterator, Iterator
from importlib import metadata
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response, StreamingResponse
from prometheus_client import REGISTRY, Metric
from prometheus_client.core import GaugeMetricFamily
from pydantic import BaseModel, ConfigDict, ValidationError

from midstream.engine.admission import on_a_thread
from midstream.engine.plugin import apply_replacements
from midstream.engine.seams import Role
from midstream.errors import EngineClosedError, MidstreamError, PromptError, about
from midstream.plan import fields
from midstream.plan.ops.edit import READINGS, kinds
from midstream.plan.values import Plan
from midstream.plan.vectors import Named, Vector, read_vectors, written_vectors
from midstream.plan.wire import MAX_STRANGERS_BYTES, MAX_STRANGERS_EDITS, SAE_KIND
from midstream.requests.vectors_and_runs import RunRequest
from midstream.serve import remote, saes, studio, sweeps
from midstream.serve.capture_store import MAX_INLINE_BYTES, MOST_HELD, CaptureStore
from midstream.serve.command import check_arguments
from midstream.serve.files import PLAN, SAES, check_widths, errors_in, read_files
from midstream.serve.gate import Gate, RequestRefused, error_response, owner_of
from midstream.serve.requests import (
    Listed,
    SelectorOfRows,
    Server,
    SpanOfText,
    adapter_of,
    add_owned,
    check_admin,
    check_free,
    check_quota,
    check_theirs,
    check_there,
    delete_owned,
    new_router,
    openapi_body,
    read_place,
    receive_body,
    server_of,
)
from midstream.settings import NAME, WORKER, Settings
from midstream.sites import LAYER_SITES
from midstream.vllm.vllm_model import VLLM

MAX_UPLOAD_BYTES = 64 << 20
MAX_RUN_BYTES = 8 << 20  # of the body that records a run: a prompt of a million token ids
MAX_VECTORS = 4096
MAX_RUNS = 1024
MAX_VECTOR_BYTES = 256 << 20  # of all named vectors together
CAPTURE_BYTES = "MIDSTREAM_CAPTURE_BYTES"  # environment variables of the server
CAPTURE_SECONDS = "MIDSTREAM_CAPTURE_SECONDS"
# How long a thread that reads plans may keep Python's lock from the event loop; Python's default is 5 ms.
_SWITCH_SECONDS = 1e-3
_NO_CAPTURES = "There are no captures under this handle: it has expired, or is another API key's."
router = new_router()


class RunToRecord(BaseModel):
    """A prompt, as text or token ids, and which of its activations to keep, as in `midstream.VLLM.record`.

    With `replace`, an older run of that name and this API key is deleted. `model` names an adapter, as in OpenAI's API.
    """

    model_config = ConfigDict(extra="forbid")
    prompt: str | Listed[int]
    sites: Listed[str]
    layers: Listed[int] | Literal["all"] = "all"
    positions: Listed[int] | Literal["all_prompt", "last_prompt"] | SpanOfText | SelectorOfRows = "all_prompt"
    replace: bool = False
    name: str | None = None
    model: str | None = None


# The fields of errors of the `Capture` that records a run.
_FIELDS_OF_A_RUN = {"Capture.site": "sites", "Capture.layers": "layers", "Capture.positions": "positions"}


class Plugin:
    """See vLLM's `EndpointPlugin`."""

    name = NAME
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        app.include_router(router)
        app.include_router(remote.router)
        app.include_router(sweeps.router)
        app.include_router(saes.router)
        app.include_router(studio.router)
        app.add_middleware(Gate)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Prepare the server. Raises MidstreamError, which ends the server, if its arguments are not supported."""
        config = engine_client.vllm_config
        if config.parallel_config.worker_cls != WORKER:
            raise MidstreamError(
                "VLLM_PLUGINS names midstream, and the engine was started without it. Start the server by `midstream serve`, or with the "
                "flags that `midstream serve --flags` prints."
            )
        check_arguments(args, Settings.of(config))
        apply_replacements(Role.SERVER)
        sys.setswitchinterval(_SWITCH_SECONDS)
        captures = CaptureStore(
            int(os.environ.get(CAPTURE_BYTES, 4 << 30)), float(os.environ.get(CAPTURE_SECONDS, 600))
        )
        server = Server(engine_client, captures)
        await server.model.start()
        await _take_files(server, Settings.of(config))
        if not config.model_config.skip_tokenizer_init:  # else all clients would wait while the first answers load it
            await asyncio.to_thread(lambda: server.model.tokenizer)
        engine_client.midstream_server = state.midstream = server
        REGISTRY.register(Metrics(server, asyncio.get_running_loop()))


async def _take_files(server: Server, settings: Settings) -> None:
    """Take vectors, SAEs and the engine-wide plan from the server's files. Raises MidstreamError."""
    found = await asyncio.to_thread(read_files, settings)
    check_widths(found.vectors, server.model.facts)
    server.model.vectors.update(found.vectors)
    for name, sae in found.saes.items():
        with errors_in(SAES, f"{name}={settings.saes[name]}"):
            server.saes[name] = await asyncio.to_thread(saes.checked, server, sae)
    if found.plan is not None:
        with errors_in(PLAN, settings.plan_file):
            server.set_plan(await asyncio.to_thread(server.read_plan, found.plan, may_be_final=True))
    await server.model.connection.send_vectors()


class Metrics:
    """midstream's gauges in Prometheus form, for vLLM's /metrics. The workers' values are from the scrape before."""

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        self._server, self._loop = server, loop
        self._workers: list[dict[str, int]] = []

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client at every scrape, on any thread."""
        asyncio.run_coroutine_threadsafe(self._refresh(), self._loop)
        for name, value in self._server.gauges.items():
            yield GaugeMetricFamily(f"{NAME}_{name}", f"{NAME}: {name.replace('_', ' ')} of the server", value)
        yield from self._server.monitors.metrics()
        for name in self._workers[0] if self._workers else ():
            family = GaugeMetricFamily(f"{NAME}_worker_{name}", f"{NAME}: {name.replace('_', ' ')}", labels=["worker"])
            for number, gauges in enumerate(self._workers):
                family.add_metric([str(number)], gauges[name])
            yield family

    async def _refresh(self) -> None:
        with contextlib.suppress(EngineClosedError):
            self._workers = await self._server.model.gauges()


@router.get("/capabilities")
async def capabilities(request: Request) -> dict[str, Any]:
    """The model, its sites, and what this server accepts."""
    import vllm

    server = server_of(request)
    model = server.model
    sites: dict[str, dict[str, Any]] = {}
    in_order = sorted(model.facts.widths.items(), key=lambda point: (LAYER_SITES.index(point[0][0]), point[0][1]))
    for (site, layer), width in in_order:
        sites.setdefault(site, {"width": width, "layers": []})["layers"].append(layer)
    return {
        "midstream": metadata.version("midstream"),
        "vllm": vllm.__version__,
        "model": model.model_name,
        "dtype": model.facts.dtype,
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "sites": sites,
        "kinds": [*kinds(), *READINGS, SAE_KIND],
        "limits": {
            "plan_bytes": MAX_STRANGERS_BYTES,
            "plan_edits": MAX_STRANGERS_EDITS,
            "upload_bytes": MAX_UPLOAD_BYTES,
            "vectors": MAX_VECTORS,
            "vector_bytes": MAX_VECTOR_BYTES,
            "saes": saes.MAX_SAES,
            "sae_bytes": saes.MAX_SAE_BYTES,
            "runs": MAX_RUNS,
            "inline_bytes": MAX_INLINE_BYTES,
            "captures": MOST_HELD,
            "capture_bytes": server.captures.budget,
            "capture_seconds": server.captures.seconds,
            "sweeps": sweeps.MAX_SWEEPS,
            "sweeps_of_a_key": sweeps.MAX_SWEEPS_OF_A_KEY,
            "sweep_pairs": sweeps.MAX_PAIRS,
            "sweep_cells": sweeps.MAX_CELLS,
        },
    }


@router.get("/vectors")
async def list_vectors(request: Request) -> dict[str, Any]:
    """The named vectors: the width of each, and a digest of its numbers."""
    return {"vectors": {name: _about(vector) for name, vector in server_of(request).model.vectors.items()}}


def _about(vector: Vector) -> dict[str, Any]:
    return {"width": vector.width, "digest": vector.digest}


@router.post("/vectors")
async def upload_vectors(request: Request, replace: bool = False) -> Any:
    """Register every vector `[hidden]` of a safetensors file, which is the request's body, under its name in the file.

    A name that is taken is an error; with `replace`, only if this API key may not replace the vector.
    """
    server = server_of(request)
    data = await receive_body(request, MAX_UPLOAD_BYTES, "The file has {}; send its vectors in several files.")
    vectors = server.model.vectors
    found = await asyncio.get_running_loop().run_in_executor(None, read_vectors, data, "the body")
    with about("body"):
        for name in found:
            Named(name)  # raises for an invalid name
    for name in sorted(found):
        check_free(request, "vectors", name, vectors, replace, "body")
    add_owned(request, "vectors", vectors, found, lambda each: each.data.nbytes, MAX_VECTORS, MAX_VECTOR_BYTES)
    await server.model.connection.send_vectors()
    return {"vectors": {name: _about(vector) for name, vector in found.items()}}


@router.get("/vectors/{name:path}")
async def get_vector(request: Request, name: str) -> Any:
    """A named vector as a safetensors file, float32 under its name."""
    vectors = server_of(request).model.vectors
    check_there("vectors", name, vectors)
    return Response(written_vectors({name: vectors[name]}), media_type="application/octet-stream")


@router.delete("/vectors/{name:path}")
async def delete_vector(request: Request, name: str) -> Any:
    """Forget a vector. Only for the API key that has uploaded it, and for administrators."""
    model = server_of(request).model
    deleted = delete_owned(request, "vectors", name, model.vectors)
    await model.connection.send_vectors()
    return deleted


@router.get("/runs")
async def list_runs(request: Request) -> dict[str, Any]:
    """The recorded runs, the least recently used first."""
    return {"runs": await _runs(server_of(request).model)}


@router.post("/runs", openapi_extra=openapi_body(f"/v1/{NAME}/runs", RunToRecord))
async def record_run(request: Request) -> Any:
    """Run a prompt, and keep its activations on the server as the source of patches: `"source": {"run": NAME}`.

    A name that is taken is an error, unless `replace` is set. A run that no request uses may be dropped to make room for others.
    """
    server, model = server_of(request), server_of(request).model
    data = await receive_body(request, MAX_RUN_BYTES, "The body has {}; no model takes such a prompt.")
    run = await on_a_thread(len(data), _run_to_record, server, data)
    adapter = await adapter_of(request, run.model)
    with about("name"):
        name = secrets.token_hex(4) if run.name is None else fields.name("name", run.name)
    await model.runs.listing()  # forgets runs that the workers have dropped
    names, owner = {each.name for each in model.runs.handles} | server.recording.keys(), owner_of(request.headers)
    check_free(request, "runs", name, names, run.replace and name not in server.recording, "name")
    for gone in [each for what, each in server.owners if what == "runs" and each not in names]:
        del server.owners["runs", gone]
    owners = {each: who for (what, each), who in server.owners.items() if what == "runs"} | server.recording
    mine = {each for each, who in owners.items() if who == owner}
    check_quota("runs", len(mine | {name}), len(names | {name}), MAX_RUNS, len(mine))
    server.recording[name] = owner
    try:
        asked = RunRequest(run.prompt, run.sites, run.layers, read_place(run.positions), name, adapter, owner.hex())
        # A long text takes seconds to tokenize.
        await (await on_a_thread(len(data), model._recording, asked))
        server.owners["runs", name] = owner
    except MidstreamError as error:
        error.field = _FIELDS_OF_A_RUN.get(error.field or "", error.field)
        raise
    finally:
        del server.recording[name]
    if name not in (runs := await _runs(model)):
        raise RequestRefused(
            503, f"The run {name!r} was dropped at once, to make room for others. Delete some first.", "name"
        )
    return {"runs": {name: runs[name]}}


def _run_to_record(server: Server, data: bytes) -> RunToRecord:
    """Parse the body. Raises RequestValidationError, or PromptError for a text that is too long for the model."""
    try:
        run = RunToRecord.model_validate_json(data)
    except ValidationError as error:
        mistakes = error.errors(include_url=False)
        raise RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in mistakes]) from error
    if isinstance(run.prompt, str) and len(run.prompt.encode(errors="replace")) > server.longest_prompt_bytes:
        with about("prompt"):
            raise PromptError(f"A prompt for this model has at most {server.longest_prompt_bytes} bytes.")
    return run


@router.delete("/runs/{name:path}")
async def delete_run(request: Request, name: str) -> Any:
    """Forget a run. Running requests that use it go on. Only for the API key that has recorded it, and for administrators."""
    runs = server_of(request).model.runs
    check_theirs(request, "runs", name, [each.name for each in runs.handles])
    server_of(request).owners.pop(("runs", name), None)  # before another client can record a run of this name
    await runs.delete(name)
    return {"deleted": name}


async def _runs(model: VLLM) -> dict[str, dict[str, Any]]:
    infos = await model.runs.listing()
    handles = {run.id: run for run in model.runs.handles}
    return {info.name: {**info._asdict(), **vars(handles[info.id])} for info in infos if info.id in handles}


@router.get("/plan")
async def get_plan(request: Request) -> dict[str, Any]:
    """The engine-wide plan. It comes before every request's own plan; its final edits come after."""
    return {"plan": json.loads(server_of(request).model.plan.to_json())}


@router.put("/plan")
async def set_plan(request: Request) -> Any:
    """Set the engine-wide plan; the body is `{"plan": ...}` as in a request's field. The plan may have the key `final`. It may not capture.
    Scores of its probes are in the server's metrics. For administrators."""
    check_admin(request)
    server = server_of(request)
    data = await receive_body(
        request, 2 * MAX_STRANGERS_BYTES, "The plan has {}; vectors are shortest in base64, or as names."
    )
    served = await server.read(data.decode(errors="replace"), owner_of(request.headers), may_be_final=True)
    if served.answers or served.inline:
        raise RequestRefused(400, "The engine-wide plan is a plan alone: leave answers and inline out.", NAME)
    server.set_plan(served.plan)
    return await get_plan(request)


@router.delete("/plan")
async def clear_plan(request: Request) -> Any:
    """Remove the engine-wide plan. For administrators."""
    check_admin(request)
    server_of(request).set_plan(Plan())
    return await get_plan(request)


@router.get("/captures/{handle}")
async def get_capture(request: Request, handle: str) -> Any:
    """A captured tensor `[positions, width]` as a safetensors file with the tensor `rows`; its metadata is the response's entry."""
    held = server_of(request).captures.get(owner_of(request.headers), handle)
    if held is None:
        return error_response(404, _NO_CAPTURES, "handle")

    size, parts = await asyncio.get_running_loop().run_in_executor(None, held.file)

    async def sent() -> AsyncIterator[bytes]:
        for part in parts:
            yield part
            await asyncio.sleep(0)  # gives way to other requests: a fast client never makes the server wait

    return StreamingResponse(sent(), media_type="application/octet-stream", headers={"Content-Length": str(size)})


@router.delete("/captures/{handle}")
async def delete_capture(request: Request, handle: str) -> Any:
    """Forget captured rows before their handle expires."""
    if not server_of(request).captures.drop(owner_of(request.headers), handle):
        return error_response(404, _NO_CAPTURES, "handle")
    return {"deleted": handle}


@router.get("/gauges")
async def gauges(request: Request) -> dict[str, Any]:
    """Counts of the objects that the server and each worker hold."""
    server = server_of(request)
    return {"server": server.gauges, "workers": await server.model.gauges()}
