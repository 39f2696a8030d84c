"""Batches of captured rows for training, mixed over requests.

    loader = open_captures("activations").loader("resid_post", 14, batch_size=4096)
    next(loader)                                     # tensor [4096, hidden]; endless
    for batch in store.loader("resid_post", 14, epochs=1): ...

An epoch goes through the requests in a random order. The rows of the next requests, as many as the buffer holds, are read, mixed, and cut
into batches. So a batch has rows of all requests in the buffer, and memory is bounded.

`model.activations` makes the same batches of prompts that the model runs meanwhile, without a disk. A thread fills the next buffer while
the batches of the one before are taken, and then waits. So a slow reader holds the model up, and two buffers are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, islice
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from midstream.capture.rows import cast_rows, plane_name
from midstream.errors import CaptureError, ParameterError, PromptError
from midstream.plan import fields
from midstream.plan.captures import PlaneKey
from midstream.plan.values import Plan
from midstream.plan.vectors import digest
from midstream.sites import LAYER_SITES, Point, point_of_hook

_BUFFERED_BATCHES = 16
_FIRST_PROMPTS = 32  # run to find out how many rows a prompt has
_MOST_PROMPTS = 4096  # run at a time


class Captures(Protocol):
    """The requests of a directory: a `capture.directory.Store`."""

    def __iter__(self) -> Iterator[str]: ...
    def __getitem__(self, name: str) -> Any: ...
    def fixed(self) -> Captures: ...
    def places(self, name: str) -> list[str]: ...
    def count(self, name: str, planes: Sequence[PlaneKey]) -> int: ...


class Batch(NamedTuple):
    """Rows, with the token, the position and the request of each.

    Attributes:
        rows: `[batch, width]`; with several sites or layers, a dict of these by (site, layer).
        token_ids: int64 `[batch]`, the token of each row; -1 for a generated token, which a directory does not have.
        positions: int64 `[batch]`, its position in its request.
        requests: int64 `[batch]`, the number of its request: see `requests` of the loader.
    """

    rows: Any
    token_ids: torch.Tensor
    positions: torch.Tensor
    requests: torch.Tensor


@dataclass
class Pool:
    """Rows that were mixed with each other.

    Attributes:
        rows: (site, layer, when) -> `[rows, width]`.
        context: int64 `[rows]` each: token ids, positions and numbers of requests; empty if no one asked for them.
    """

    rows: dict[PlaneKey, torch.Tensor]
    context: tuple[torch.Tensor, ...] = ()

    def __len__(self) -> int:
        return len(next(iter(self.rows.values())))

    def part(self, start: int, stop: int) -> Pool:
        """Some of its rows, as views."""
        return Pool(
            {key: rows[start:stop] for key, rows in self.rows.items()}, tuple(each[start:stop] for each in self.context)
        )

    def mixed(self, order: torch.Tensor) -> Pool:
        """The rows in this order."""
        return Pool({key: rows[order] for key, rows in self.rows.items()}, tuple(each[order] for each in self.context))

    @classmethod
    def joined(cls, pools: Sequence[Pool]) -> Pool:
        if len(pools) == 1:
            return pools[0]
        rows = {key: torch.cat([pool.rows[key] for pool in pools]) for key in pools[0].rows}
        return cls(rows, tuple(map(torch.cat, zip(*(pool.context for pool in pools), strict=True))))


@dataclass(frozen=True)
class Asked:
    """What batches contain: the arguments that loaders of directories and of running models have in common.

    Attributes:
        planes: the planes whose rows a batch has.
        is_one: whether a batch has one tensor of rows, not a dict of them.
    """

    planes: tuple[PlaneKey, ...]
    is_one: bool
    batch_size: int
    buffer_rows: int
    shuffle: bool
    seed: int
    with_context: bool

    @classmethod
    def of(
        cls,
        site: str | Sequence[str],
        layer: int | Sequence[int] | None,
        when: str,
        batch_size: int,
        buffer_rows: int | None,
        shuffle: bool,
        seed: int,
        with_context: bool,
    ) -> Asked:
        """The checked arguments. Raises PlanError for a value that is not allowed."""
        if layer is None and isinstance(site, str) and (point := point_of_hook(site)) is not None:
            site, layer = point
        sites = (site,) if isinstance(site, str) else tuple(site)
        layers = fields.integers("layer", layer, "a layer or several", 0)
        for name in sites:
            fields.one_of("site", name, LAYER_SITES)
        planes = tuple(
            (name, number, fields.one_of("when", when, ("before", "after"))) for name in sites for number in layers
        )
        if not planes or len(set(planes)) < len(planes):
            raise fields.refuse("site", fields.shown(site), "a site, or several, each once")
        size = fields.integer("batch_size", batch_size, 1)
        rows = _BUFFERED_BATCHES * size if buffer_rows is None else fields.integer("buffer_rows", buffer_rows, 1)
        is_one = isinstance(site, str) and not (isinstance(layer, (Sequence, range)) or getattr(layer, "ndim", 0) > 0)
        return cls(planes, is_one, size, rows, shuffle, fields.integer("seed", seed, 0), with_context)

    def order(self, count: int, what: int, *which: int) -> torch.Tensor | None:
        """A random order of `count` items. Equal seeds and equal arguments give the same order. None without shuffling.

        Args:
            what: 0 to order requests or prompts, 1 to order rows. It keeps both apart: NumPy takes [1] and [1, 0] for the same seed.
        """
        if not self.shuffle:
            return None
        return torch.from_numpy(np.random.default_rng([self.seed, what, *which]).permutation(count))

    def batch(self, pool: Pool) -> Any:
        """The rows as the user gets them."""
        rows: Any = (
            next(iter(pool.rows.values())) if self.is_one else {key[:2]: each for key, each in pool.rows.items()}
        )
        return Batch(rows, *pool.context) if self.with_context else rows


def cut(pools: Iterable[Pool], size: int) -> Iterator[Pool]:
    """Batches of `size` rows from consecutive pools. The last one may have fewer."""
    rest: list[Pool] = []
    missing = size
    for pool in pools:
        at = 0
        while len(pool) - at >= missing:
            yield Pool.joined([*rest, pool.part(at, at + missing)])
            at, rest, missing = at + missing, [], size
        if at < len(pool):
            rest.append(pool.part(at, len(pool)))
            missing -= len(pool) - at
    if rest:
        yield Pool.joined(rest)


class _Epoch(NamedTuple):
    """One pass over the rows of a share.

    Attributes:
        number: of the epoch, from 0.
        requests: int64, the numbers of its requests in their order.
        ends: int64, for each request the number of rows up to its end.
    """

    number: int
    requests: np.ndarray
    ends: np.ndarray

    @property
    def rows(self) -> int:
        return int(self.ends[-1]) if self.ends.size else 0

    def pools(self, size: int) -> Iterator[tuple[int, int, int]]:
        """Groups of requests whose rows are mixed: `(first, stop, rows before them)`. A group has as few requests as make `size` rows."""
        first = before = 0
        while first < self.ends.size:
            stop = min(int(np.searchsorted(self.ends, before + size)) + 1, self.ends.size)
            yield first, stop, before
            first, before = stop, int(self.ends[stop - 1])


class Loader(IterableDataset):  # type: ignore[misc]
    """Batches of a directory's rows. Made by `Store.loader`.

    An iterator: `next(loader)` gives a batch. After a `break`, the next loop goes on where the first one stopped. With `epochs`, it ends
    after that many passes, and another loop begins the next ones. It is also a `torch.utils.data.IterableDataset`: with
    `DataLoader(loader, batch_size=None, num_workers=4)` each worker gives other rows. Without `persistent_workers=True`, each loop over
    the DataLoader has the same order.

    Attributes:
        rows: how many rows an epoch has, those of all ranks together.
        width: of a row; with several sites or layers, by (site, layer).
        requests: the names of the requests, as `Batch.requests` numbers them.
    """

    def __init__(
        self,
        store: Captures,
        asked: Asked,
        epochs: int | None,
        workers: int,
        dtype: torch.dtype | None,
        share: tuple[int, int],
    ) -> None:
        self._store = store = store.fixed()
        self._asked, self._epochs, self._workers = asked, epochs, workers
        self._dtype = dtype
        self._share = self._rank = share  # in a worker of a DataLoader, a part of the rank's share
        names = sorted(store) if asked.shuffle else list(store)  # so that the order does not depend on who wrote first
        counts = np.array([store.count(name, asked.planes) for name in names], np.int64)
        self.requests = [name for name, count in zip(names, counts, strict=True) if count]
        self._counts = counts[counts > 0]
        places = (part for name in self.requests for part in (name, *store.places(name)))
        self._rows_of = digest("\0".join(places).encode() + self._counts.tobytes())
        if not self.requests:
            raise CaptureError(f"{store!r} has no rows of {', '.join(map(plane_name, asked.planes))}.")
        first = {key: store[self.requests[0]][key] for key in asked.planes}
        self._forms = {key: (rows.flatten(1).shape[1], dtype or rows.dtype) for key, rows in first.items()}
        for _, kept in self._forms.values():
            if kept.itemsize == 1 and kept.is_floating_point:  # PyTorch cannot mix them
                raise CaptureError(
                    f"Rows of {kept} cannot be loaded as they are. Give the loader a dtype, such as torch.bfloat16."
                )
        widths = {key[:2]: width for key, (width, _) in self._forms.items()}
        self.width: int | dict[Point, int] = next(iter(widths.values())) if asked.is_one else widths
        self.rows = int(self._counts.sum())
        self._row, self._end, self._worker = 0, epochs, -1
        self._epoch = self._make_epoch(0)
        self._batches: Iterator[Pool] | None = None

    def __iter__(self) -> Self:
        if (worker := get_worker_info()) is not None and self._worker != worker.id:
            if self._row or self._epoch.number:
                raise CaptureError(
                    "A loader that has given batches, or was resumed, cannot be shared by a DataLoader's workers. Give the DataLoader a "
                    "new one, or use workers= and no DataLoader."
                )
            self._worker, self._batches = worker.id, None
            rank, size = self._rank
            self._share = rank * worker.num_workers + worker.id, size * worker.num_workers
            self._epoch = self._make_epoch(self._epoch.number)
        if self._end is not None and self._epoch.number >= self._end:
            self._batches, self._end = None, self._epoch.number + (self._epochs or 0)
        return self

    def __next__(self) -> Any:
        if not self._epoch.rows:  # the share has no rows, since the directory is small
            raise StopIteration
        if self._batches is None:
            self._batches = self._run()
        try:
            batch = next(self._batches)
        except StopIteration:
            raise
        except BaseException:  # the next call goes on after the last batch that was given
            self._batches = None
            raise
        self._row += len(batch)
        while self._row >= self._epoch.rows:  # a batch may begin in one epoch and end in a later one
            self._row -= self._epoch.rows
            self._epoch = self._make_epoch(self._epoch.number + 1)
        return self._asked.batch(batch)

    def state_dict(self) -> dict[str, Any]:
        """The loader's place, for `load_state_dict` of a loader with the same arguments and rows."""
        return {"epoch": self._epoch.number, "row": self._row, "of": self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at the place that `state_dict` returned. Raises CaptureError if the rows or their order differ."""
        mine, its = self._identity(), state["of"]
        if mine != its:
            differ = [f"{name} {its.get(name)!r}, here {mine[name]!r}" for name in mine if mine[name] != its.get(name)]
            raise CaptureError(f"The state is of another loader: {'; '.join(differ)}.")
        self._epoch, self._row, self._batches = self._make_epoch(state["epoch"]), state["row"], None
        if self._epochs is not None:
            self._end = (state["epoch"] // self._epochs + 1) * self._epochs

    def _identity(self) -> dict[str, Any]:
        asked = self._asked
        order = [asked.seed, asked.buffer_rows] if asked.shuffle else None
        return {
            "planes": [list(key) for key in asked.planes],
            "requests": f"{len(self.requests)}, {self._rows_of}",
            "seed and buffer_rows": order,
            "share": [*self._share],
        }

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_batches": None}

    def _make_epoch(self, number: int) -> _Epoch:
        order = self._asked.order(len(self.requests), 0, number)
        rank, size = self._share
        requests = (np.arange(len(self.requests)) if order is None else order.numpy())[rank::size]
        return _Epoch(number, requests, np.cumsum(self._counts[requests]))

    def _run(self) -> Iterator[Pool]:
        """The batches from here on."""
        if not self._workers:
            return cut_epochs(self._pools(self._load), self._asked.batch_size, self._end is not None)
        return self._run_ahead()

    def _run_ahead(self) -> Iterator[Pool]:
        """The batches from here on, with threads that read ahead."""
        with ThreadPoolExecutor(self._workers, "midstream-load") as reading, ThreadPoolExecutor(1) as ahead:
            load = partial(self._load, run=reading.map)
            pools = read_ahead(self._pools(load), ahead)
            yield from cut_epochs(pools, self._asked.batch_size, self._end is not None)

    def _pools(self, load: Callable[[_Epoch, int, int, int], Pool]) -> Iterator[Pool | None]:
        """The pools from here on, and None after each epoch."""
        epoch, skipped = self._epoch, self._row
        while self._end is None or epoch.number < self._end:
            for first, stop, before in epoch.pools(self._asked.buffer_rows):
                rows = int(epoch.ends[stop - 1]) - before
                if before + rows > skipped:
                    pool = load(epoch, first, stop, before)
                    yield pool.part(max(skipped - before, 0), rows)
            yield None
            epoch, skipped = self._make_epoch(epoch.number + 1), 0

    def _load(self, epoch: _Epoch, first: int, stop: int, before: int, run: Callable[..., Iterable[Any]] = map) -> Pool:
        """Read the rows of the epoch's requests from `first` to `stop`, mixed. `run`: reads several requests at once."""
        count = int(epoch.ends[stop - 1]) - before
        order = self._asked.order(count, 1, epoch.number, first)
        into = torch.arange(count) if order is None else order
        rows = {key: torch.empty(count, width, dtype=dtype) for key, (width, dtype) in self._forms.items()}
        context = tuple(torch.empty(count, dtype=torch.int64) for _ in range(3 * self._asked.with_context))
        pool = Pool(rows, context)

        def read(i: int) -> None:
            number, end = int(epoch.requests[i]), int(epoch.ends[i]) - before
            self._read(number, into[end - int(self._counts[number]) : end], pool)

        for _ in run(read, range(first, stop)):
            pass
        return pool

    def _read(self, number: int, places: torch.Tensor, pool: Pool) -> None:
        """Copy a request's rows to these places."""
        capture = self._store[self.requests[number]]
        for key, into in pool.rows.items():
            rows = capture[key].flatten(1)
            if rows.shape != (len(places), into.shape[1]):
                raise CaptureError(
                    f"{capture!r} has rows of shape {list(rows.shape)} of {plane_name(key)}; other requests have {into.shape[1]} numbers "
                    "in a row. Load the requests of one model."
                )
            if rows.dtype != into.dtype and self._dtype is None:
                raise CaptureError(
                    f"{capture!r} has rows of {rows.dtype}, others have {into.dtype}. Give the loader a dtype."
                )
            into.index_copy_(0, places, cast_rows(rows, str(into.dtype).removeprefix("torch."), repr(capture)))
        if pool.context:
            key = next(iter(pool.rows))
            positions = torch.tensor(capture.positions[key])
            ids = torch.tensor([*capture.prompt_token_ids, -1])  # prompts of embeddings have no ids
            tokens, at, requests = pool.context
            tokens[places] = ids[positions.clamp(max=len(ids) - 1)]
            at[places], requests[places] = positions, number


def cut_epochs(pools: Iterable[Pool | None], size: int, apart: bool) -> Iterator[Pool]:
    """Batches of the pools, which have None after each epoch. `apart`: no batch has rows of two epochs."""
    if not apart:
        yield from cut((pool for pool in pools if pool is not None), size)
        return
    pools = iter(pools)
    for pool in pools:
        if pool is not None:
            yield from cut(chain([pool], iter(partial(next, pools), None)), size)


def read_ahead(pools: Iterator[Any], thread: ThreadPoolExecutor) -> Iterator[Any]:
    """The same pools. A thread makes the next one while one is in use."""
    end = object()
    following = thread.submit(next, pools, end)
    while (pool := following.result()) is not end:
        following = thread.submit(next, pools, end)
        yield pool


class Activations:
    """Batches of rows of prompts that a model runs: `next(activations)`, or a loop. Made by `TraceModel.activations`.

    An iterator: after a `break`, the next loop goes on where the first one stopped. `close()`, or the end of a with-block, ends it.

    Attributes:
        bad: with `on_bad`, the number of each prompt that was left out or cut so far, and why.
    """

    def __init__(
        self,
        generate: Callable[..., Any],
        prompts: Iterable[Any],
        asked: Asked,
        captures: Plan,
        epochs: int | None,
        params: dict[str, Any],
        check: Any,
    ) -> None:
        if epochs is not None:
            fields.integer("epochs", epochs, 1)
        if epochs != 1 and not isinstance(prompts, Sequence):
            raise ParameterError(
                "epochs needs prompts that can be run again, such as a list: an iterator has one epoch."
            )
        self._generate, self._prompts, self._asked, self._plan = generate, prompts, asked, captures
        self._epochs, self._params, self._check = epochs, params, check
        self.bad: Mapping[int, str] = check.bad
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
        """Pools of mixed rows. For each, the model runs as many prompts as fill the buffer."""
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
                self._check.tell()
                return

    def _in_order(self) -> Iterator[tuple[int, Any]]:
        """The prompts that the model can take, with their numbers, epoch by epoch. A sequence of prompts is shuffled in each epoch."""
        if not isinstance(self._prompts, Sequence):
            yield from self._checked(enumerate(self._prompts))
            return
        for epoch in count() if self._epochs is None else range(self._epochs):
            order = self._asked.order(len(self._prompts), 0, epoch)
            numbers = range(len(self._prompts)) if order is None else order.tolist()
            found = self._checked((number, self._prompts[number]) for number in numbers)
            if (first := next(found, None)) is None:
                return  # the model can take none of them
            yield from chain([first], found)

    def _checked(self, prompts: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        """The prompts that the model can take. With on_bad="raise", `generate` raises the errors of the others."""
        if self._check.on_bad == "raise":
            yield from prompts
            return
        for number, prompt in prompts:
            if (ids := self._check.ids(number, prompt)) is not None:
                yield number, ids if number in self._check.bad else prompt

    def _rows_of(self, part: Sequence[tuple[int, Any]]) -> Iterator[Pool]:
        """Run prompts, each with its number."""
        try:
            outputs = self._generate([prompt for _, prompt in part], plan=self._plan, progress=False, **self._params)
        except PromptError as error:  # its number is that in `part`
            error.number = part[error.number or 0][0]
            raise
        for (number, _), output in zip(part, outputs, strict=True):
            rows = {key: output.captures[key] for key in self._asked.planes}
            context: tuple[torch.Tensor, ...] = ()
            if self._asked.with_context:
                positions = torch.tensor(output.captures.positions[self._asked.planes[0]], dtype=torch.int64)
                ids = torch.tensor([*output.prompt_token_ids, *output.outputs[0].token_ids])
                context = ids[positions], positions, torch.full_like(positions, number)
            yield Pool(rows, context)
