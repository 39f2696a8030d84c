"""The studio: a page for sweeps and steering, at /midstream/studio.

It is plain HTML, CSS and JavaScript in the folder `studio`, and uses vLLM's and midstream's routes under /v1. The page itself is not
under /v1: vLLM requires the API key there, and a browser's address bar cannot send one.
"""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter, Response

from midstream.settings import NAME

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_FILES = {each.name: each.read_bytes() for each in files(__package__).joinpath("studio").iterdir()}
_HEADERS = {
    # The page takes nothing from elsewhere, runs no inline script, and no other page may frame it.
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
router = APIRouter(prefix=f"/{NAME}", include_in_schema=False)


@router.get("/studio")
async def page() -> Response:
    """The page. Its addresses are relative, so it also works behind a proxy that adds a path."""
    return await file("index.html")


@router.get("/studio/{name}")
async def file(name: str) -> Response:
    """A file of the page."""
    kind = _TYPES.get(name.rpartition(".")[2])
    if kind is None or name not in _FILES:
        return Response("There is no such file.", 404, media_type="text/plain")
    return Response(_FILES[name], headers=_HEADERS, media_type=kind)
