"""Merges the results of a trace from the pipeline stages into the results that a single GPU would give.

    merged_outcomes([outcomes_of_stage_0, outcomes_of_stage_1])

Every stage runs the same code, so its saves have the same structure on each; a value of another stage is `Absent`.
Some stages may get further than others. A stage may begin a step before the last stage knows that the request is over, and when the code
fails on one stage, the others run on for a while. One stage, the judge, decides how far the trace got. If the code failed on a stage, that
stage is the judge; if it failed on several, the one with the earliest step. Otherwise the judge is the last stage, which samples the
tokens. All values that other stages have beyond the judge's are dropped: entries of lists, keys, attributes, names, and errors of waiting
for values that never came.

Limitation: a stage that got further than the judge may have replaced a value under a name or key that the judge has too. Values do not
carry the time at which they were saved, so this is not detected.
"""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from midstream.errors import NeverReachedError, StageMismatchWarning
from midstream.trace.code import LEFT, Outcome
from midstream.trace.parallel import Absent

# Two stages may sum in different orders. Their results may differ by this much, relative to the largest entry. A float32 tensor or a
# Python number was often computed in bfloat16.
_NOISE = {torch.float64: 1e-9, torch.float32: 1e-2, torch.float16: 1e-2, torch.bfloat16: 2e-2}
_COARSE = 0.2  # dtypes of 8 bits and less
_NUMBER = 1e-2


def merged_outcomes(each: Sequence[list[Outcome]]) -> list[Outcome]:
    """The outcomes of one request: a list for each of several stages, in stage order."""
    names = dict.fromkeys(outcome.name for outcomes in each for outcome in outcomes)
    stages = [{outcome.name: outcome for outcome in outcomes} for outcomes in each]
    return [_merged_outcome({s: own[name] for s, own in enumerate(stages) if name in own}) for name in names]


def _merged_outcome(by_stage: dict[int, Outcome]) -> Outcome:
    last = by_stage[max(by_stage)]
    failed = {s: o for s, o in by_stage.items() if o.failure and not _waits_past_end(o, last)}
    own = {s: o for s, o in failed.items() if o.failure and not o.failure.secondary}
    judge = min(own, key=lambda s: (own[s].steps, -s)) if own else max(failed, default=max(by_stage))
    steps = by_stage[judge].steps
    past = [s for s in by_stage if s != judge and (judge in own or by_stage[s].steps > steps)]
    merging = _Merging(judge, past, steps)
    return replace(by_stage[judge], values=merging.names({s: o.values for s, o in by_stage.items()}), order=last.order)


def _waits_past_end(outcome: Outcome, last: Outcome) -> bool:
    """Whether the only failure is a wait for a value of a step that the last stage never ran."""
    error = outcome.failure.error if outcome.failure is not None else None
    return isinstance(error, NeverReachedError) and last.failure is None and outcome.steps > last.steps


class _Merging:
    """Merges saved values given by stage.

    Real values beat `Absent`; a value that is absent on all stages is left out. Lists and tuples are merged by position, and dicts by key.
    Where real values differ by more than rounding, the judge's value is taken, with a StageMismatchWarning.

    Args:
        judge: the stage whose values are taken where they differ.
        past: the stages that got further than the judge. Their entries beyond the judge's are dropped.
        steps: how many steps the judge ran.
    """

    def __init__(self, judge: int, past: Collection[int], steps: int) -> None:
        self._judge, self._past, self._steps = judge, frozenset(past), steps
        self._differing: set[int] = set()
        self._taken = judge
        # By identity of the values, which are kept alive.
        self._done: dict[tuple[tuple[int, int], ...], tuple[dict[int, Any], Any]] = {}

    def names(self, each: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for name in self._places(each):
            self._differing = set()
            value = self._merge(self._at(each, name))
            if not isinstance(value, Absent):
                merged[name] = value
            if self._differing:
                self._warn(name)
        return merged

    def _warn(self, name: str) -> None:
        stages = ", ".join(map(str, sorted(self._differing)))
        what = "What the trace left in its variables" if name == LEFT else repr(name)
        warnings.warn(
            f"{what} differs between pipeline stages {stages}; the value of stage {self._taken} is used. The trace's code runs on "
            "every stage and has to compute the same on each: give random numbers a seed, and keep clocks and global state out.",
            StageMismatchWarning,
            stacklevel=2,
        )

    def _merge(self, parts: Mapping[int, Any]) -> Any:
        real = {stage: value for stage, value in parts.items() if not isinstance(value, Absent)}
        if not real:
            return next(iter(parts.values()))
        if len(real) == 1:
            return next(iter(real.values()))
        key = tuple((stage, id(value)) for stage, value in real.items())
        if key not in self._done:

            def note(merged: Any) -> None:
                self._done[key] = real, merged

            note(None)
            note(self._together(real, note))
        return self._done[key][1]

    def _together(self, real: dict[int, Any], note: Callable[[Any], None]) -> Any:
        """One value from several real ones. Calls `note` with a container before it is filled, because it may contain itself."""
        leading = self._leading(real)
        value = real[leading]
        alike = {stage: other for stage, other in real.items() if _kind(other) == _kind(value)}
        if len(alike) < len(real):
            self._differ(leading, real.keys() - alike.keys())
        if isinstance(value, (list, tuple, deque)):
            return self._sequence(alike, value, note)
        if isinstance(value, dict):
            return self._dict(alike, note)
        if isinstance(value, (set, frozenset)):
            return type(value)(x for other in alike.values() for x in other if not isinstance(x, Absent))
        differing = {stage for stage, other in alike.items() if not _same(other, value)}
        if not differing:
            return value
        if _has_parts(value):
            return self._object(alike, value, note)
        self._differ(leading, differing)
        return value

    def _differ(self, leading: int, others: Collection[int]) -> None:
        self._differing |= {leading, *others}
        self._taken = leading

    def _leading(self, real: Mapping[int, Any]) -> int:
        return self._judge if self._judge in real else max(real)

    def _sequence(self, each: dict[int, Any], value: Any, note: Callable[[Any], None]) -> Any:
        note(filled := copy.copy(value) if not isinstance(value, tuple) else [])
        numbered = {stage: dict(enumerate(items)) for stage, items in each.items()}
        items = [self._merge(self._at(numbered, i)) for i in sorted(self._places(numbered))]
        if isinstance(value, tuple):
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        filled.clear()
        filled.extend(items)
        return filled

    def _dict(self, each: dict[int, Any], note: Callable[[Any], None]) -> Any:
        places: Iterable[Any] = self._places(each)
        if (until := getattr(type(each[self._leading(each)]), "__midstream_until__", None)) is not None:
            each = {stage: until(own, self._steps) if stage in self._past else own for stage, own in each.items()}
            places = dict.fromkeys(key for own in each.values() for key in own)
        note(merged := copy.copy(each[self._leading(each)]))
        merged.clear()
        for key in places:
            merged[key] = self._merge(self._at(each, key))
        return merged

    def _object(self, each: dict[int, Any], value: Any, note: Callable[[Any], None]) -> Any:
        note(merged := copy.copy(value))
        attributes = {stage: vars(own) for stage, own in each.items()}
        vars(merged).update({name: self._merge(self._at(attributes, name)) for name in self._places(attributes)})
        return merged

    def _places(self, each: Mapping[int, Mapping[Any, Any]]) -> list[Any]:
        """The keys of all stages, without the keys that only stages past the judge have."""
        bounded = self._past if self._judge in each else frozenset()
        return list(dict.fromkeys(key for stage, own in each.items() if stage not in bounded for key in own))

    @staticmethod
    def _at(each: Mapping[int, Mapping[Any, Any]], key: Any) -> dict[int, Any]:
        return {stage: own[key] for stage, own in each.items() if key in own}


def _kind(value: Any) -> Any:
    """Values of equal kinds can be merged. Classes are compared by name: a class that the trace defines is a new object on every stage."""
    return torch.Tensor if isinstance(value, torch.Tensor) else (type(value).__module__, type(value).__qualname__)


def _has_parts(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(
        value, (type, FunctionType, ModuleType, torch.Tensor, np.ndarray)
    )


def _same(a: Any, b: Any) -> bool:
    """Whether two values of one kind are equal up to rounding."""
    if a is b:
        return True
    if isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.layout != b.layout:
            return False
        a, b = _strided(a.detach()), _strided(b.detach())
        return a.shape == b.shape and (a.is_meta or _close(a, b))
    if isinstance(a, (float, complex, np.inexact)):
        return _close(torch.tensor(a).to(torch.complex128), torch.tensor(b).to(torch.complex128), _NUMBER)
    if isinstance(a, np.ndarray):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if a.dtype.kind not in "fc":
            return bool(np.array_equal(a, b))
        return _close(torch.from_numpy(np.ascontiguousarray(a)), torch.from_numpy(np.ascontiguousarray(b)))
    if isinstance(a, (type, FunctionType)):
        return a.__qualname__ == b.__qualname__
    try:
        return bool(a == b)
    except Exception:  # `==` gave something without a truth value, such as a tensor
        return False


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values in a strided tensor that `allclose` accepts, whatever its layout is."""
    if tensor.is_nested:
        return tensor.to_padded_tensor(0.0)
    if tensor.is_quantized:
        return tensor.dequantize()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _close(a: torch.Tensor, b: torch.Tensor, noise: float | None = None) -> bool:
    """Whether two tensors of one shape and dtype differ by no more than rounding."""
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    if noise is None:
        noise = _NOISE.get(a.real.dtype if a.is_complex() else a.dtype, _COARSE)
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    finite = torch.cat([x.abs()[x.isfinite()] for x in (a, b)])
    largest = finite.max().item() if finite.numel() else 0.0
    return torch.allclose(a, b, rtol=0.0, atol=noise * largest, equal_nan=True)
