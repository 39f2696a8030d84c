"""Progress bars for long calls in terminals and notebooks."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Self

_LONG_SECONDS = 2.0


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def is_watched() -> bool:
    """Whether stderr goes to a terminal or a notebook."""
    return in_notebook() or (hasattr(sys.stderr, "isatty") and sys.stderr.isatty())


class NotebookLine:
    """A line of text in a notebook. Each write replaces it, so that the notebook is stored with the last text alone. A file for tqdm."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self._shown: Any = None

    def write(self, text: str) -> None:
        """Show `text`. Blank text changes nothing."""
        if not (text := text.strip()):
            return
        data = {"text/plain": text}
        if self._shown is None:
            from IPython.display import display

            self._shown = display(data, raw=True, display_id=True)
        else:
            self._shown.update(data, raw=True)

    def flush(self) -> None:
        """Does nothing: `write` has shown the text."""


class Bar:
    """A progress bar on stderr, in the block of a with-statement.

    Args:
        progress: True shows it from the start, False never. None shows it in terminals and notebooks after two seconds.
        total: the number of units; a single unit has no bar.
        unit: what the bar counts.
    """

    def __init__(self, progress: bool | None, total: int, unit: str = "request") -> None:
        self._is_shown = total > 1 and (is_watched() if progress is None else progress)
        self._delay = _LONG_SECONDS if progress is None else 0.0
        self._total, self._unit = total, unit
        self._bar: Any = None
        self._amounts = Counter[str]()

    def __enter__(self) -> Self:
        if self._is_shown:
            from tqdm import tqdm

            file = NotebookLine() if in_notebook() else None
            self._bar = tqdm(total=self._total, unit=self._unit, delay=self._delay, file=file)
        return self

    def update(self, count: int = 1, amounts: Mapping[str, float] = MappingProxyType({})) -> None:
        """Count units that are done. Does nothing outside of the block.

        Args:
            amounts: what these units contained, such as `{" rows/s": 12, "B/s": 6144}`. The bar shows the amounts per second.
        """
        if self._bar is None:
            return
        self._amounts.update(amounts)  # type: ignore[arg-type]
        seconds = max(self._bar.format_dict["elapsed"], 1e-3)
        rates = [f"{self._bar.format_sizeof(total / seconds)}{unit}" for unit, total in self._amounts.items()]
        self._bar.set_postfix_str(", ".join(rates), refresh=False)
        self._bar.update(count)

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
