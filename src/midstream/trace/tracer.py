"""What a trace's body sees as `tracer`: steps, early stop, cache and barriers."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from midstream.errors import TraceError, UnknownModuleError
from midstream.trace.body import StopTrace, current_body, steps
from midstream.trace.tree import Opaque, map_tensors
from midstream.trace.unsaved import refuse
from midstream.trace.visit import Visit

_numbers = itertools.count()


def save(value: Any) -> Any:
    """Mark a value to be brought back from a trace.

    A tensor comes back as it is at this moment, on the CPU if an engine computed it; a container comes back as it is when the
    trace ends. Works on any object. In a with-block `x.save()` means the same.

    Returns:
        The value to keep: for an engine's tensor a copy that later kernels do not touch.
    """
    refuse(value)
    return current_body().save(value)


@dataclass(frozen=True)
class Barrier:
    """`barrier = tracer.barrier(2)` above the invokes, `barrier()` in each of them: all wait there for each other."""

    parties: int
    name: str = field(default_factory=lambda: f"{os.getpid()}-{next(_numbers)}")

    def __call__(self) -> None:
        current_body().wait_at_barrier(self)


@dataclass(frozen=True)
class Result:
    """Stands for the request's final output inside the body, where it does not exist yet."""


class Loop(Iterator[int]):
    """The steps that a body goes through. In a with-block of a trace `with` goes through them, too: it is compiled to `for`."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self._numbers = numbers

    def __next__(self) -> int:
        return next(self._numbers)

    def __enter__(self) -> NoReturn:
        raise TraceError(
            "A function goes through steps with `for step in tracer.iter[:]:`; `with` is for a trace's block."
        )

    def __exit__(self, *_: object) -> None:
        """Not come to."""


def steps_of(given: Any) -> Loop:
    """What `with tracer.iter[:]:` goes through, if it is that."""
    if not isinstance(given, Loop):
        raise TraceError(
            "In a trace `with x.all():` and `with x.iter[...]:` go through the tracer's steps. For a context manager of your own write "
            "`manager = x.all()` and `with manager:`."
        )
    return given


class Steps:
    """`tracer.iter`: `for step in tracer.iter[:]`, `tracer.iter[2:5]`, `tracer.iter[0]`, `tracer.iter[[0, 3]]`."""

    def __getitem__(self, wanted: slice | int | list[int]) -> Loop:
        return Loop(steps(current_body(), wanted))


@dataclass
class CacheEntry:
    """What a cache holds of one module: its outputs and inputs, a list of them if the request ran several steps."""

    output: Any = None
    inputs: Any = None
    _steps: dict[str, list[int]] = field(default_factory=dict, repr=False, compare=False)  # of the values of each field

    def add(self, field_name: str, value: Any, step: int) -> None:
        self._steps.setdefault(field_name, []).append(step)
        before = getattr(self, field_name)
        if before is None:
            setattr(self, field_name, value)
        elif isinstance(before, _Steps):
            before.append(value)
        else:
            setattr(self, field_name, _Steps([before, value]))

    def until(self, step: int) -> CacheEntry:
        """What there was before `step` began."""
        entry = CacheEntry()
        for field_name, numbers in self._steps.items():
            values = getattr(self, field_name)
            for number, value in zip(numbers, values if isinstance(values, _Steps) else [values], strict=True):
                if number < step:
                    entry.add(field_name, value, number)
        return entry


class _Steps(list[Any]):
    """Values of several steps, told from a module's own list."""


class Cache(dict[str, CacheEntry], Opaque):
    """Activations by module path: `cache["model.layers.3"].output`, or `cache.model.layers[3].output`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _CachePath(self, name)

    def __midstream_until__(self, step: int) -> Cache:
        """What there was before `step` began."""
        entries = {path: entry.until(step) for path, entry in self.items()}
        return Cache({path: entry for path, entry in entries.items() if entry._steps})


class _CachePath:
    def __init__(self, cache: Cache, path: str) -> None:
        self._cache = cache
        self._path = path

    def __getattr__(self, name: str) -> Any:
        if name in ("output", "inputs"):
            if self._path not in self._cache:
                raise UnknownModuleError(
                    f"the cache holds nothing of {self._path}; it has {', '.join(list(self._cache)[:8])} ..."
                )
            return getattr(self._cache[self._path], name)
        return _CachePath(self._cache, f"{self._path}.{name}")

    def __getitem__(self, index: int) -> Any:
        return _CachePath(self._cache, f"{self._path}.{index}")


class BodyTracer:
    """The tracer inside a trace's body."""

    iter = Steps()
    result = Result()

    def all(self) -> Loop:
        """Every step of the generation, as `iter[:]`."""
        return self.iter[:]

    def next(self, count: int = 1) -> int:
        """Go on to the next step; reads that follow are about that one."""
        body = current_body()
        for step in steps(body, [body.step + count]):
            return step
        raise AssertionError("an asked-for step is yielded or raises")

    def stop(self) -> None:
        """End the request with this step. What was saved before is kept; the code that follows does not run."""
        current_body().stopped = True
        raise StopTrace

    def barrier(self, parties: int) -> Barrier:
        raise TraceError(
            "Make the barrier above the invokes that meet at it: `barrier = tracer.barrier(2)` outside of them."
        )

    def invoke(self, *_: Any, **__: Any) -> None:
        raise TraceError(
            "An invoke cannot lie inside another one, nor inside a trace that has a prompt: give model.trace() no prompt."
        )

    def cache(
        self,
        modules: Iterable[Any] | None = None,
        include_output: bool = True,
        include_inputs: bool = False,
        device: torch.device | str | None = "cpu",
        dtype: torch.dtype | None = None,
    ) -> Cache:
        """Keep what modules return in the rest of this trace, after all edits.

        Args:
            modules: modules or paths; None for every module of the tree.
            include_output, include_inputs: what to keep of each.
            device, dtype: what the kept tensors are converted to; None leaves them.

        Returns:
            A saved cache, filled as the forward goes on.
        """
        body = current_body()
        torch.empty(0).to(device, dtype)  # what cannot be done is said here, and not when the forward has the values
        interleaver = body.interleaver
        tree = interleaver.modules if interleaver.stages is None else interleaver.stages.modules
        paths = [p for p in tree if p] if modules is None else [getattr(m, "_path", m) for m in modules]
        cache = Cache()

        def keep(path: str, field_name: str) -> Any:
            def watch(visit: Visit) -> None:
                value = map_tensors(visit.raw(), lambda _, t: t.detach().to(device, dtype, copy=True))
                cache.setdefault(path, CacheEntry()).add(field_name, value, visit.step)

            return watch

        for path in paths:
            if path not in tree:
                raise UnknownModuleError(f"cache: the model has no module {path!r}; print(model) shows the tree.")
            if include_output and interleaver.has((path, "output")):
                interleaver.watch(body, (path, "output"), keep(path, "output"))
            if include_inputs and interleaver.has((path, "input")):
                interleaver.watch(body, (path, "input"), keep(path, "inputs"))
        return save(cache)
