"""A worker extension that makes vLLM's norms write as they do on a GPU, and programs fail.

On a GPU the fused add and norm leaves its results in the tensors that it was given, so what a module returned holds a later
value as soon as the next norm has run. The CPU build's norm returns new tensors, and would hide a save that aliases one.
"""

from __future__ import annotations

from typing import Any


class InPlaceNorms:
    """Mixed into the worker by vLLM (`worker_extension_cls`); called through `collective_rpc`."""

    model_runner: Any

    def norms_in_place(self, on: bool) -> int:
        """Have the fused norms write in place, or as they did before. Returns how many there are."""
        norms = [m for m in self.model_runner.get_model().modules() if type(m).__name__ == "RMSNorm"]
        for norm in norms:
            plain = getattr(norm, "plain_forward_method", norm._forward_method)
            norm.plain_forward_method = plain
            norm._forward_method = in_place(plain) if on else plain
        return len(norms)

    def sines_raise(self, rows: int) -> None:
        """Have programs raise at a sine of more than so many rows."""
        from midstream.plan import running
        from midstream.plan.rowwise import overload

        def sine(x: Any) -> Any:
            if len(x) > rows:
                raise ValueError("too many sines")
            return x.sin()

        running.overload = lambda name: sine if name == "sin.default" else overload(name)


def in_place(forward: Any) -> Any:
    """`forward(x)`, or `forward(x, residual)` with both results left in its arguments."""

    def fused(x: Any, residual: Any = None, *rest: Any) -> Any:
        if residual is None:
            return forward(x, residual, *rest)
        normed, total = forward(x, residual, *rest)
        return x.copy_(normed), residual.copy_(total)

    return fused
