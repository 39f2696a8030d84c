"""The progress bar: where it is shown, when, and what it counts."""

from __future__ import annotations

import contextlib
import io
import re
import time

import pytest

from midstream import progress
from midstream.progress import Bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def written(bar: Bar, stream: io.StringIO, seconds: float = 0.3) -> str:
    """What a bar writes to stderr while something is done that takes so long."""
    with contextlib.redirect_stderr(stream), bar:
        for _ in range(3):
            time.sleep(seconds / 3)
            bar.update()
    return stream.getvalue()


def made(shown: bool | None, stream: io.StringIO, total: int = 3) -> Bar:
    with contextlib.redirect_stderr(stream):
        return Bar(shown, total)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work has lasted after a tenth of a second."""
    monkeypatch.setattr(progress, "_LONG_SECONDS", 0.1)


def test_work_that_lasts_has_a_bar_in_a_terminal(soon: None) -> None:
    stream = Terminal()
    text = written(made(None, stream), stream)
    assert "3/3" in text and "request/s" in text


def test_short_work_has_none() -> None:
    stream = Terminal()
    assert written(made(None, stream), stream) == ""


def test_nothing_is_written_where_nobody_watches(soon: None) -> None:
    stream = io.StringIO()
    assert written(made(None, stream), stream) == ""


def test_true_shows_it_at_once_and_everywhere() -> None:
    stream = io.StringIO()
    text = written(made(True, stream), stream)
    assert "0/3" in text and "3/3" in text


def test_false_shows_none(soon: None) -> None:
    stream = Terminal()
    assert written(made(False, stream), stream) == ""


@pytest.mark.parametrize("shown", [True, None])
def test_one_request_has_none(soon: None, shown: bool | None) -> None:
    stream = Terminal()
    assert written(made(shown, stream, total=1), stream) == ""


def test_amounts_are_shown_per_second_in_the_same_line() -> None:
    stream = io.StringIO()
    with contextlib.redirect_stderr(stream), made(True, stream, total=4) as bar:
        for _ in range(4):
            time.sleep(0.15)
            bar.update(1, {" rows/s": 600.0, "B/s": 3e6})
    last = stream.getvalue().split("\r")[-1]
    assert "4/4" in last and "request/s" in last
    rows, size = re.search(r"([\d.]+)k rows/s, ([\d.]+)MB/s", last).groups()  # type: ignore[union-attr]
    assert 1.5 < float(rows) < 4.1 and float(size) / float(rows) == pytest.approx(
        5, rel=0.02
    )  # 4 x 600 rows in 0.6 s or more


def test_a_bar_counts_nothing_outside_of_its_block() -> None:
    stream = io.StringIO()
    bar = made(True, stream)
    bar.update()
    assert "3/3" in written(bar, stream, seconds=0) and "4/3" not in stream.getvalue()
