"""Which part of a batch belongs to one request, and how to take it out and put it back.

Legend of shape suffixes here and in the files beside: T tokens of the whole batch, t tokens of this request, B batch, S padded
sequence, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class Rows(Protocol):
    """One request's part of the batch of this step."""

    @property
    def aliases(self) -> bool:
        """Whether what `take` returns shares memory with the batch, so that edits in place land by themselves."""
        ...

    @property
    def count(self) -> int:
        """Tokens of this request in this step."""
        ...

    def take(self, full: torch.Tensor) -> torch.Tensor:
        """This request's part of what a module takes or returns, for the trace to hold."""
        ...

    def put(self, full: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """`full` with this request's part replaced."""
        ...

    def take_tokens(self, full: torch.Tensor) -> torch.Tensor:
        """This request's tokens of a site's leaf, `[t, ...]`, as a view."""
        ...

    def put_tokens(self, full: torch.Tensor, value: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class FlatRows:
    """Rows `[start, stop)` of an engine's flat batch `[T, ...]`, or `[1, T, ...]` on vLLM's Transformers backend.

    What `take` returns is a copy in a normal tensor: the engine's own buffers are reused and changed in place by later
    kernels, and an inference-mode tensor has no version counter that would tell an edit.
    """

    start: int
    stop: int
    total: int
    first_position: int = 0
    aliases = False

    @property
    def count(self) -> int:
        return self.stop - self.start

    def axis(self, full: torch.Tensor) -> int | None:
        """The token axis of `full`, or None if it has none."""
        if full.ndim >= 1 and full.shape[0] == self.total:
            return 0
        return 1 if full.ndim >= 2 and full.shape[0] == 1 and full.shape[1] == self.total else None

    def slice(self, full: torch.Tensor) -> torch.Tensor | None:
        """This request's part of `full` as a view, or None if `full` has no token axis."""
        axis = self.axis(full)
        return None if axis is None else full.narrow(axis, self.start, self.count)

    def take(self, full: torch.Tensor) -> torch.Tensor:
        part = self.slice(full)
        return private(full if part is None else part)

    def put(self, full: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        part = self.slice(full)
        (full if part is None else part).copy_(value)
        return full

    def take_tokens(self, full: torch.Tensor) -> torch.Tensor:
        return (full[0] if full.ndim == 3 else full)[self.start : self.stop]

    def put_tokens(self, full: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        (full[0] if full.ndim == 3 else full)[self.start : self.stop].copy_(value)
        return full


@dataclass(frozen=True)
class BatchRows:
    """Row `index` of a left-padded batch `[B, S, ...]` of transformers, without its `pad` first columns.

    `take` returns views that stay in the autograd graph.
    """

    index: int
    pad: int
    batch: int
    length: int  # S of this step
    aliases = True

    @property
    def count(self) -> int:
        return self.length - self.pad

    def take(self, full: torch.Tensor) -> torch.Tensor:
        if full.ndim == 0 or full.shape[0] != self.batch:
            return full
        part = full[self.index : self.index + 1] if self.batch > 1 else full
        if self.pad and part.ndim >= 2 and part.shape[1] == self.length:
            part = part[:, self.pad :]
        return part

    def put(self, full: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if self.batch == 1 and not self.pad:
            return value.to(full.dtype)
        full = full.clone()
        self.take(full).copy_(value)
        return full

    def _grid(self, full: torch.Tensor) -> torch.Tensor:
        """`full` as `[B, S, ...]`; some modules see their tokens flat."""
        return full if full.ndim >= 3 else full.unflatten(0, (self.batch, self.length))

    def take_tokens(self, full: torch.Tensor) -> torch.Tensor:
        return self._grid(full)[self.index, self.pad :]

    def put_tokens(self, full: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if self.batch == 1 and not self.pad:
            return value.to(full.dtype).reshape(full.shape)
        full = full.clone()
        self._grid(full)[self.index, self.pad :] = value.to(full.dtype)
        return full


def private(part: torch.Tensor) -> torch.Tensor:
    """A copy of `part` that is not an inference-mode tensor, so that edits in place move its version counter."""
    with torch.inference_mode(False):
        return part.clone()
