"""The routes of a server for sparse autoencoders: plans name them, `{"kind": "sae", "sae": NAME, "do": "capture", "top_k": 32}`."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import Request, Response

from midstream.plan import fields
from midstream.plan.values import Plan
from midstream.sae import SAE
from midstream.serve.requests import (
    Server,
    add_owned,
    check_free,
    check_there,
    delete_owned,
    new_router,
    received,
    server_of,
)

MAX_FILE_BYTES = 128 << 20  # of one SAE
MAX_SAE_BYTES = 1 << 30  # of all that API keys have uploaded
MAX_SAES = 64
router = new_router()


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
async def upload_sae(request: Request, name: str, replace: bool = False) -> Any:
    """Register a sparse autoencoder, which is the request's body as `midstream.SAE.written` writes it.

    A name that is taken is an error; with `replace`, only if the SAE is another API key's.
    """
    server, saes = server_of(request), server_of(request).saes
    fields.name("name", name)
    too_large = "The SAE has {}; the server's operator can load it: --midstream-sae."
    async with received(request, MAX_FILE_BYTES, too_large) as data:
        sae = await asyncio.to_thread(lambda: checked(server, SAE.read(data)))
    check_free(request, "saes", name, saes, replace, "name")
    older = saes.get(name)
    add_owned(request, "saes", saes, {name: sae}, lambda each: each.nbytes, MAX_SAES, MAX_SAE_BYTES)
    await _forget(server, older)
    return {"saes": {name: _about(sae)}}


def checked(server: Server, sae: SAE) -> SAE:
    """The SAE, ready to use. Raises PlanError if it does not fit the model."""
    server.model.planner.check(Plan((sae.capture(0),)))
    sae.held  # noqa: B018  # the first time, it takes a while
    return sae


@router.get("/saes/{name:path}")
async def get_sae(request: Request, name: str) -> Any:
    """A sparse autoencoder as `midstream.SAE.read` reads it."""
    saes = server_of(request).saes
    check_there("saes", name, saes)
    return Response(await asyncio.to_thread(saes[name].written), media_type="application/octet-stream")


@router.delete("/saes/{name:path}")
async def delete_sae(request: Request, name: str) -> Any:
    """Forget a sparse autoencoder. Running requests go on. Only for the API key that has uploaded it, and for administrators."""
    server = server_of(request)
    gone = server.saes.get(name)
    deleted = delete_owned(request, "saes", name, server.saes)
    await _forget(server, gone)
    return deleted


async def _forget(server: Server, gone: SAE | None) -> None:
    """Have the workers drop the matrices of an SAE that the server no longer has, except those that another SAE shares."""
    if gone is not None:
        kept = {digest for sae in server.saes.values() for digest in sae.held}
        await server.model.connection.weights.forget(gone.held.keys() - kept)
