"""A client that streams plain requests to a server, one after another, and measures how long it waits for each token.

It is a process of its own: threads that send large bodies would hold it up. `Neighbour` starts it, and is used in the process of the test.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import multiprocessing
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple


class Question(NamedTuple):
    """A prompt, and how many tokens of its answer are asked for."""

    prompt: str
    tokens: int


class Wait(NamedTuple):
    """One wait of the neighbour, for a first token or for a further one.

    Attributes:
        began, ended: on the clock of `time.monotonic`.
        worked: seconds of a processor that the engine's process took meanwhile.
    """

    is_first: bool
    began: float
    ended: float
    worked: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def processor_seconds(pid: int) -> Callable[[], float]:
    """Reads the seconds that a process, with all its threads, has had a processor."""
    clock = (~pid << 3) | 2  # as `clock_getcpuclockid` makes it
    return lambda: time.clock_gettime(clock)


def _stream(port: int, key: str, questions: Sequence[Question], engine: int, results: Any, is_over: Any) -> None:
    """The process. It puts the waits and the answer of each request into `results`."""
    worked = processor_seconds(engine)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    number = 0
    while not is_over.is_set():
        question = questions[number % len(questions)]
        number += 1
        body = {"model": "demo", "prompt": question.prompt, "max_tokens": question.tokens, "temperature": 0.0}
        given = json.dumps(body | {"ignore_eos": True, "stream": True})
        waits, text = list[Wait](), ""
        last, before = time.monotonic(), worked()
        try:
            connection.request("POST", "/v1/completions", given, headers)
            response = connection.getresponse()
            while line := response.readline():
                if not line.startswith(b"data: {"):
                    continue
                now, after = time.monotonic(), worked()
                found = json.loads(line[6:])
                if "choices" not in found:
                    text = f"an error: {found}"
                    break
                waits.append(Wait(not waits, last, now, after - before))
                text += found["choices"][0]["text"]
                last, before = now, after
            if response.status != 200:
                text = f"status {response.status}"
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            text = f"{type(error).__name__}: {error}"
            time.sleep(0.1)
        results.put((question, waits, text))


class Neighbour:
    """The neighbour of a server, as a context in which it asks.

    Attributes:
        answers: how often each text answered each question.
    """

    def __init__(self, port: int, key: str, questions: Sequence[Question], engine: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._results, self._is_over = context.Queue(), context.Event()
        given = (port, key, list(questions), engine, self._results, self._is_over)
        self._process = context.Process(target=_stream, args=given, daemon=True)
        self._waits: list[Wait] = []
        self.answers: Counter[tuple[Question, str]] = Counter()
        self._reader = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Neighbour:
        self._process.start()
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        with contextlib.suppress(ValueError):
            self._process.join(60)
        if self._process.is_alive():
            self._process.kill()
        self._results.put(None)
        self._reader.join(10)

    def _read(self) -> None:
        while (found := self._results.get()) is not None:
            question, waits, text = found
            self._waits += waits
            self.answers[question, text] += 1

    def waits(self, began: float, ended: float, timeout: float = 120.0) -> list[Wait]:
        """The waits that overlap a time. Waits until the neighbour has sent what it measured then."""
        deadline = time.monotonic() + timeout
        while not self._waits or self._waits[-1].ended < ended:
            if time.monotonic() > deadline or not self._process.is_alive():
                raise AssertionError(f"the neighbour has had no answer for {timeout:.0f} s: {self.answers}")
            time.sleep(0.02)
        return [wait for wait in self._waits if wait.ended > began and wait.began < ended]


def longest(waits: Iterable[Wait], is_first: bool, of: Callable[[Wait], float]) -> float:
    return max((of(wait) for wait in waits if wait.is_first == is_first), default=0.0)
