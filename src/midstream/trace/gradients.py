"""`with loss.backward():` in a trace: reads of `.grad` in the block give the gradient of the loss at any tensor of the trace."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from midstream.errors import TraceError


class backward:
    """`with backward(loss) as grad: g = grad(h)`, what `with loss.backward(): g = h.grad` is compiled to.

    `h` may be any tensor of the trace that the loss depends on. On leaving, `loss.backward(...)` itself is run, so leaves and
    parameters have their `.grad` as usual.

    Raises:
        TraceError: if gradients are not recorded (engines compute in inference mode), or the loss does not depend on `h`.
    """

    def __init__(
        self, loss: torch.Tensor, gradient: torch.Tensor | None = None, retain_graph: bool = False, **rest: Any
    ) -> None:
        if not loss.requires_grad:
            raise TraceError(
                "backward() needs gradients: trace on LanguageModel (vLLM computes without them), outside torch.no_grad()."
            )
        self._loss = loss
        self._gradient = gradient
        self._rest = {"retain_graph": retain_graph, **rest}

    def __enter__(self) -> backward:
        return self

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        if not value.requires_grad:
            raise TraceError(f"The tensor {list(value.shape)} has no gradient: it was computed without recording.")
        (grad,) = torch.autograd.grad(self._loss, value, self._gradient, retain_graph=True, allow_unused=True)
        if grad is None:
            raise TraceError(
                f"The loss does not depend on the tensor {list(value.shape)}. Read it before the values that the loss is computed from."
            )
        return grad

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self._loss.backward(self._gradient, **self._rest)
