"""What long work shows of itself where a person watches: in a terminal or in a notebook."""

from __future__ import annotations

import sys
from typing import Any


def ipython_shell() -> Any:
    """The running IPython, or None."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    return hasattr(ipython_shell(), "kernel")


def is_watched() -> bool:
    """Whether a person sees stderr: it is a terminal's, or a notebook's."""
    return in_notebook() or (hasattr(sys.stderr, "isatty") and sys.stderr.isatty())
