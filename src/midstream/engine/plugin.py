"""vLLM calls `register` in each of its processes (entry point group `vllm.general_plugins`)."""

from __future__ import annotations


def register() -> None:
    """Check vLLM's version and prepare its front end. Engines that midstream did not start work as before.

    Raises:
        UnsupportedVersionError: this vLLM is not supported.
    """
    from midstream.engine.replacements import apply
    from midstream.engine.seams import Role

    apply(Role.FRONT_END)
