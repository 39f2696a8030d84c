"""Which vLLM this is made for."""

from __future__ import annotations

import re

from midstream.errors import UnsupportedVersionError

OLDEST, NEWEST = (0, 26), (0, 33)


def check_vllm_version(version: str | None = None) -> None:
    """Raise UnsupportedVersionError unless vLLM (`version`, or the one installed) lies in the supported range."""
    if version is None:
        import vllm

        version = vllm.__version__
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not OLDEST <= (int(found[1]), int(found[2])) <= NEWEST:
        low, high = (".".join(map(str, v)) for v in (OLDEST, NEWEST))
        raise UnsupportedVersionError(
            f"midstream supports vLLM {low} to {high}; this is vLLM {version}. Install one of these, or a midstream made for it."
        )
