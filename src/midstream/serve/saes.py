"""The routes of a server for sparse autoencoders: plans name them, `{"kind": "sae", "sae": NAME, "do": "capture", "top_k": 32}`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request, Response

from midstream.plan import fields
from midstream.plan.values import Plan
from midstream.sae import SAE
from midstream.serve.requests import (
    RequestRefused,
    Server,
    answering_errors,
    check_quota,
    not_theirs,
    owner_of,
    receive_body,
    server_of,
)
from midstream.settings import NAME

MAX_FILE_BYTES = 128 << 20  # of one SAE
MAX_SAE_BYTES = 1 << 30  # of all that API keys have uploaded
MAX_SAES = 64
router = APIRouter(prefix=f"/v1/{NAME}", tags=[NAME])


def _about(sae: SAE) -> dict[str, Any]:
    return {
        "architecture": sae.architecture,
        "features": sae.features,
        "width": sae.width,
        "site": sae.site,
        "layer": sae.layer,
        "constants": list(sae.held),
    }


@router.get("/saes")
async def list_saes(request: Request) -> dict[str, Any]:
    """The sparse autoencoders. `constants`: the digests of its large matrices."""
    return {"saes": {name: _about(sae) for name, sae in server_of(request).saes.items()}}


@router.post("/saes/{name:path}")
@answering_errors
async def upload_sae(request: Request, name: str, replace: bool = False) -> Any:
    """Register a sparse autoencoder, which is the request's body as `midstream.SAE.written` writes it.

    A name that is taken is an error. With `replace`, it is one only if the SAE is another API key's.
    """
    server, saes = server_of(request), server_of(request).saes
    fields.name("name", name)
    data = await receive_body(request, MAX_FILE_BYTES, "The SAE has {}; its operator can load it: --midstream-sae.")
    sae = await asyncio.get_running_loop().run_in_executor(None, _read, server, data)
    if name in saes:
        if not replace:
            raise RequestRefused(
                409, f"The SAE {name!r} is there already: delete it first, or use another name.", "name"
            )
        if (refused := not_theirs(request, "saes", name, saes)) is not None:
            return refused
    owner = owner_of(request.headers)
    uploaded = {each: saes[each] for what, each in server.owners if what == "saes" and each in saes}
    before = {each: found for each, found in uploaded.items() if server.owners["saes", each] == owner}
    mine, together = {**before, name: sae}, {**uploaded, name: sae}
    check_quota("SAEs", len(mine), len(together), MAX_SAES, len(before))
    check_quota("bytes of SAEs", _bytes(mine), _bytes(together), MAX_SAE_BYTES, _bytes(before))
    saes[name], server.owners["saes", name] = sae, owner
    return {"saes": {name: _about(sae)}}


def _bytes(saes: Mapping[str, SAE]) -> int:
    return sum(sae.nbytes for sae in saes.values())


def loaded(server: Server, path: str) -> SAE:
    """The operator's SAE in a directory of SAELens's. Raises PlanError if it is none, or does not fit the model."""
    return _checked(server, SAE.load(path))


def _read(server: Server, data: bytes) -> SAE:
    return _checked(server, SAE.read(data))


def _checked(server: Server, sae: SAE) -> SAE:
    server.model.planner.check(Plan((sae.capture(0),)))
    sae.held  # noqa: B018  # the first time, it takes a while
    return sae


@router.get("/saes/{name:path}")
async def get_sae(request: Request, name: str) -> Any:
    """A sparse autoencoder as `midstream.SAE.read` reads it."""
    saes = server_of(request).saes
    if name not in saes:
        return not_theirs(request, "saes", name, saes)
    data = await asyncio.get_running_loop().run_in_executor(None, saes[name].written)
    return Response(data, media_type="application/octet-stream")


@router.delete("/saes/{name:path}")
async def delete_sae(request: Request, name: str) -> Any:
    """Forget a sparse autoencoder. Running requests go on. Only for the API key that has uploaded it, and for administrators."""
    server = server_of(request)
    if (refusal := not_theirs(request, "saes", name, server.saes)) is not None:
        return refusal
    del server.saes[name]
    server.owners.pop(("saes", name), None)
    return {"deleted": name}
