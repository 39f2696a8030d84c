"""One request of `PlainForward`: the hand-off between the forward and the body's thread, and the value at the point where they meet.

Shape suffixes: T tokens of this step, H hidden.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Point = tuple[int, int]  # the layer, or their number for what follows all; and the place in its order


class OutOfOrderError(Exception):
    """The body asked for a value that the forward has passed."""


class NeverReachedError(Exception):
    """The body asked for a value after the request had ended."""


class UnknownSiteError(LookupError):
    """The model has no such layer."""


class ShapeError(ValueError):
    """The body wrote a value that does not fit."""


class Stopped(BaseException):
    """Unwinds the body after `tracer.stop()`."""


@dataclass
class Ran:
    """What one run of a body gave.

    Attributes:
        value: what the body returned, copied at that moment; None if it raised or stopped the request.
        error: what it raised.
        tokens: the generated tokens.
        logits: `[vocab]` of each step, from which its token was chosen.
    """

    value: Any = None
    error: BaseException | None = None
    tokens: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)


class Visit:
    """The value at the point where the forward stands.

    Args:
        residual_TH: of a layer's output, the part that vLLM keeps apart.
    """

    def __init__(self, step: int, point: Point, value: torch.Tensor, residual_TH: torch.Tensor | None) -> None:
        self.step, self.point = step, point
        self._value = value
        self._first = value, value._version
        self._residual_TH = residual_TH
        self._pair: tuple[torch.Tensor, ...] | None = None
        self._noted: tuple[int, ...] = ()
        self._saved: list[tuple[torch.Tensor, torch.Tensor, int]] = []  # a copy, what it is of, its version

    def value(self) -> torch.Tensor:
        """The value with all changes so far."""
        for place, (saved, of, version) in enumerate(self._saved):
            if saved._version != version:
                of.copy_(saved)
                self._saved[place] = saved, of, saved._version
        if self._pair is not None and self._versions(self._pair) != self._noted:
            self._value = self._pair[0] + self._pair[1]
            self._noted = self._versions(self._pair)
        return self._value

    def pair(self) -> tuple[torch.Tensor, ...]:
        """`(hidden, residual)`, whose sum the value is."""
        value = self.value()
        if self._pair is None or not torch.equal(self._pair[0] + self._pair[1], value):
            has_changed = value is not self._first[0] or value._version != self._first[1]
            residual_TH = torch.zeros_like(value) if has_changed or self._residual_TH is None else self._residual_TH
            self._pair = (value - residual_TH, residual_TH.clone())
            self._noted = self._versions(self._pair)
        return self._pair

    @staticmethod
    def _versions(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
        return tuple(each._version for each in tensors)

    def replace(self, given: Any, broadcasts: bool = True) -> None:
        """Go on with another tensor. It is the value itself from then on, so that changes to it count, unless it had to be converted."""
        current = self.value()
        if given is current:
            return
        if not isinstance(given, torch.Tensor) or not (broadcasts or given.shape == current.shape):
            raise ShapeError(f"{list(current.shape)} cannot be replaced by {given!r}")
        if given.shape == current.shape and given.dtype == current.dtype:
            self._value = given
        else:
            try:
                self._value = given.to(current).expand_as(current).clone()
            except RuntimeError as error:
                raise ShapeError(str(error)) from None
        self._pair = None
        self._saved.clear()

    def replace_pair(self, given: Any) -> None:
        """Go on with the sum of two tensors, which count with the changes that follow."""
        if not isinstance(given, tuple) or any(part.shape != self._value.shape for part in given) or len(given) != 2:
            raise ShapeError(f"a pair of {list(self._value.shape)} cannot be replaced by {given!r}")
        self._saved.clear()
        self._value, self._pair, self._noted = given[0] + given[1], given, self._versions(given)

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy to keep. Changes to the copy of a value that is in the forward change that value, too."""
        saved = tensor.clone()
        if any(
            tensor.untyped_storage().data_ptr() == each.untyped_storage().data_ptr()
            for each in (self._value, *(self._pair or ()))
        ):
            self._saved.append((saved, tensor, saved._version))
        return saved


class Run:
    """One request: the forward's side (`start`, `reach`, `end`) and the body's (`visit_to`, `go_to_step`)."""

    def __init__(self, call: Callable[[Run], Any]) -> None:
        self.ran = Ran()
        self.now = self.step = 0  # the step of the forward, and of the body's next read
        self.passed: Point = (-1, -1)
        self.done = self.ended = self.stopped = False
        self.visit: Visit | None = None
        self._call = call
        self._waits_for: tuple[int, Point | None] | None = None  # a step's beginning is no point
        self._final: torch.Tensor | None = None
        self._bodys, self._forwards = threading.Semaphore(0), threading.Semaphore(0)
        self.thread = threading.Thread(target=self._main, daemon=True)

    def _main(self) -> None:
        with torch.no_grad():
            self._bodys.acquire()
            try:
                value = self._call(self)
                self._leave()
                self.ran.value = copy.deepcopy(value)
            except Stopped:
                self._leave()
            except BaseException as error:
                self._leave()
                self.ran.error = error
        self.done = True
        self._forwards.release()

    # The forward's side.

    def resume(self) -> None:
        """Let the body run until it waits again or ends."""
        self._waits_for = None
        self._bodys.release()
        self._forwards.acquire()

    def begin_step(self, step: int) -> None:
        self.now, self.passed = step, (-1, -1)
        if step == 0:
            self.thread.start()
            self.resume()
        elif self._waits_for == (step, None):
            self.resume()

    def reach(self, point: Point, value: torch.Tensor, residual_TH: torch.Tensor | None = None) -> torch.Tensor:
        """The value that the forward goes on with at `point`."""
        self.passed = point
        if self.done or self._waits_for != (self.now, point):
            return value
        self.visit = Visit(self.now, point, value.clone(), residual_TH)
        self.resume()
        assert self._final is not None
        return self._final

    def end(self) -> Ran:
        self.ended = True
        if not self.done:
            self.resume()
        assert self.done, "the body waits for something after the end"
        self.thread.join()
        return self.ran

    # The body's side.

    def _leave(self) -> None:
        if self.visit is not None:
            self._final = self.visit.value().clone()
            self.visit = None

    def _wait(self, point: Point | None) -> None:
        self._leave()
        self._waits_for = (self.step, point)
        self._forwards.release()
        self._bodys.acquire()

    def visit_to(self, point: Point) -> Visit:
        """Wait until the forward is at `point`."""
        if self.visit is not None and (self.visit.step, self.visit.point) == (self.step, point):
            return self.visit
        if not self.ended and (self.step < self.now or (self.step == self.now and point <= self.passed)):
            raise OutOfOrderError(f"{point} of step {self.step} after {self.passed} of step {self.now}")
        if not self.ended:
            self._wait(point)
        if self.visit is None:
            raise NeverReachedError(f"{point} of step {self.step}")
        return self.visit

    def go_to_step(self, step: int) -> bool:
        """Wait until the forward begins `step`. False if the request ends before it."""
        if step < self.now:
            raise OutOfOrderError(f"step {step} in step {self.now}")
        self.step = step
        if step > self.now and not self.ended:
            self._wait(None)
        return step <= self.now
