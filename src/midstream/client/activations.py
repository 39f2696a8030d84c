"""`model.activations`: batches of rows for training, from prompts that the model runs meanwhile, without a disk.

A thread fills the next buffer while the batches of the one before are taken, and then waits. So a slow reader holds the model up, and two
buffers are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice
from typing import Any, Self

import torch

from midstream.capture.loading import Asked, Pool, cut, read_ahead
from midstream.errors import CaptureError, ParameterError
from midstream.plan import fields
from midstream.plan.values import Plan
from midstream.requests.arguments import Prompt

_FIRST_PROMPTS = 32  # run to find out how many rows a prompt has
_MOST_PROMPTS = 4096  # run at a time


class Activations:
    """Batches of rows of prompts that a model runs: `next(activations)`, or a loop. Made by `TraceModel.activations`.

    An iterator: a loop that was left goes on where it stopped. `close()`, or the end of a with-block, ends it.
    """

    def __init__(
        self,
        generate: Callable[..., Any],
        prompts: Iterable[Prompt],
        asked: Asked,
        captures: Plan,
        epochs: int | None,
        params: dict[str, Any],
    ) -> None:
        if epochs is not None:
            fields.integer("epochs", epochs, 1)
        if epochs != 1 and not isinstance(prompts, Sequence):
            raise ParameterError(
                "epochs needs prompts that can be run again, such as a list: an iterator has one epoch."
            )
        self._generate, self._prompts, self._asked, self._plan = generate, prompts, asked, captures
        self._epochs, self._params = epochs, params
        self._is_closed = False
        self._error: BaseException | None = None
        self._batches = self._run()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self._error is not None:
            raise CaptureError(
                f"The activations have ended before, with {self._error!r}. Make new ones."
            ) from self._error
        try:
            return self._asked.batch(next(self._batches))
        except StopIteration:
            raise
        except BaseException as error:  # which prompts have run is not known any more
            self._error = error
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End it, once the prompts that are running have ended. Another call does nothing."""
        self._is_closed = True
        self._batches.close()

    def _run(self) -> Any:
        with ThreadPoolExecutor(1, "midstream-activations") as thread:
            yield from cut(read_ahead(self._pools(), thread), self._asked.batch_size)

    def _pools(self) -> Iterator[Pool]:
        """The rows of as many prompts as fill the buffer, mixed, again and again."""
        asked, prompts = self._asked, self._in_order()
        rows_each, buffered, numbers = 0.0, list[Pool](), count()
        ran = made = 0
        while not self._is_closed:
            missing = asked.buffer_rows - sum(map(len, buffered))
            size = _FIRST_PROMPTS if not rows_each else max(1, min(round(missing / rows_each), _MOST_PROMPTS))
            part = list(islice(prompts, size))
            if part:
                new = [pool for pool in self._rows_of(part) if len(pool)]
                rows_each = max(sum(map(len, new)) / len(part), 0.01)
                buffered += new
                ran += len(part)
            is_over = not part or (isinstance(self._prompts, Sequence) and ran >= len(self._prompts))
            if is_over and not (buffered or made):
                raise CaptureError("The prompts have no rows at these positions.")
            if buffered and (not part or sum(map(len, buffered)) >= asked.buffer_rows):
                pool, made = Pool.joined(buffered), made + 1
                order = asked.order(len(pool), 1, next(numbers))
                yield pool if order is None else pool.mixed(order)
                buffered = []
            if not part:
                return

    def _in_order(self) -> Iterator[tuple[int, Prompt]]:
        """The prompts of all epochs, with their numbers. Those that can be run again are shuffled in each."""
        if not isinstance(self._prompts, Sequence):
            yield from enumerate(self._prompts)
            return
        for epoch in count() if self._epochs is None else range(self._epochs):
            order = self._asked.order(len(self._prompts), 0, epoch)
            for number in range(len(self._prompts)) if order is None else order.tolist():
                yield number, self._prompts[number]

    def _rows_of(self, part: Sequence[tuple[int, Prompt]]) -> Iterator[Pool]:
        """Run prompts, each with its number."""
        outputs = self._generate([prompt for _, prompt in part], plan=self._plan, progress=False, **self._params)
        for (number, _), output in zip(part, outputs, strict=True):
            rows = {key: output.captures[key] for key in self._asked.planes}
            context: tuple[torch.Tensor, ...] = ()
            if self._asked.with_context:
                positions = torch.tensor(output.captures.positions[self._asked.planes[0]], dtype=torch.int64)
                ids = torch.tensor([*output.prompt_token_ids, *output.outputs[0].token_ids])
                context = ids[positions], positions, torch.full_like(positions, number)
            yield Pool(rows, context)
