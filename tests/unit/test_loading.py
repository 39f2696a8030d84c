"""Batches from a directory (row O1): every row once an epoch, mixed over requests, whatever reads them.

Each row of the synthetic directories tells which request and position it is of, so that rows can be counted.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from limits import assert_flat
from torch.utils.data import DataLoader

from midstream.capture.consumers import CaptureInfo, Collected
from midstream.capture.directory import DirectorySink, Store, open_captures
from midstream.capture.listing import Listing
from midstream.errors import CaptureError, PlanError

WIDTH = 8
REQUESTS = 40


def lengths(requests: int = REQUESTS) -> list[int]:
    return [1 + 7 * i % 23 for i in range(requests)]


def row(request: int, position: int, layer: int = 3) -> torch.Tensor:
    """Its first numbers are the request, the position and the layer."""
    return torch.tensor([request, position, layer, *[0.5] * (WIDTH - 3)])


def write(directory: Path, counts: list[int], shard_bytes: int = 2000, generated: int = 0) -> Store:
    """Requests with so many rows at two layers, each in pieces, some in files of their own. Their tokens are 1000 + position."""
    sink = DirectorySink(directory, shard_bytes=shard_bytes)
    for i, count in enumerate(counts):
        name = f"r{i}"
        sink.begin(CaptureInfo(name, tuple(range(1000, 1000 + count - generated))))
        for layer in (3, 5):
            for first in range(0, count, 5):
                positions = list(range(first, min(first + 5, count)))
                sink.rows(
                    name, "resid_post", layer, positions, torch.stack([row(i, p, layer) for p in positions]).half()
                )
        sink.end(name, None)
        if i % 7 == 0:
            sink.flush()
    sink.close()
    return open_captures(directory)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write(tmp_path_factory.mktemp("store"), lengths())


EVERY = Counter((i, p) for i, count in enumerate(lengths()) for p in range(count))


def seen(batches) -> Counter:
    return Counter((int(r), int(p)) for batch in batches for r, p in batch[:, :2].tolist())


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("buffer_rows", [None, 1, 50])
def test_every_row_comes_once_an_epoch(store: Store, shuffle: bool, workers: int, buffer_rows: int | None) -> None:
    options = {"shuffle": shuffle, "workers": workers, "buffer_rows": buffer_rows}
    loader = store.loader("resid_post", 3, batch_size=16, epochs=1, **options)
    assert loader.rows == sum(lengths()) and loader.width == WIDTH
    first = list(loader)
    assert [len(batch) for batch in first[:-1]] == [16] * (len(first) - 1) and first[0].dtype == torch.float16
    assert seen(first) == EVERY
    second = list(loader)  # another pass
    assert seen(second) == EVERY
    assert torch.equal(torch.cat(first), torch.cat(second)) == (not shuffle)
    again = list(store.loader("resid_post", 3, batch_size=16, epochs=2, **(options | {"workers": 2})))
    assert torch.equal(torch.cat(again), torch.cat(first + second))  # the same for the same seed, whatever the workers
    assert seen(store.loader("resid_post", 3, batch_size=16, epochs=3, seed=1, **options)) == EVERY + EVERY + EVERY


def test_without_shuffling_rows_come_in_the_directorys_order(store: Store) -> None:
    rows = torch.cat(list(store.loader("resid_post", 5, batch_size=100, epochs=1, shuffle=False, dtype=torch.float32)))
    assert torch.equal(
        rows,
        torch.stack([row(int(name[1:]), p, 5) for name in store for p in range(len(store[name]["resid_post", 5]))]),
    )


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(("workers", "context"), [(1, "fork"), (3, "fork"), (50, "fork"), (2, "spawn")])
def test_the_workers_of_a_data_loader_share_the_rows(store: Store, workers: int, context: str) -> None:
    """50 workers are more than there are requests. Seen failing (every row once for each worker) without the shares."""
    loader = store.loader("resid_post", 3, batch_size=16, epochs=1)
    batches = list(DataLoader(loader, batch_size=None, num_workers=workers, multiprocessing_context=context))
    assert seen(batches) == EVERY
    kept = DataLoader(loader, batch_size=None, num_workers=2, persistent_workers=True)
    for _ in range(3):
        assert seen(kept) == EVERY


def test_ranks_share_the_rows(store: Store) -> None:
    each = [store.loader("resid_post", 3, epochs=1, rank=rank, world_size=3) for rank in range(3)]
    found = [seen(loader) for loader in each]
    assert sum(found, Counter()) == EVERY and all(found)
    one = [store.loader("resid_post", 3, epochs=1, rank=rank, world_size=50) for rank in range(50)]
    assert sum(map(seen, one), Counter()) == EVERY
    assert not list(store.loader("resid_post", 3, rank=49, world_size=50))  # endless, without rows


def test_rows_are_mixed_over_requests(tmp_path: Path) -> None:
    """100 requests of 100 rows, 20 of them in the buffer. A batch has rows of almost all 20, as evenly as chance."""
    store = write(tmp_path, [100] * 100, shard_bytes=1 << 16)
    loader = store.loader("resid_post", 3, batch_size=200, buffer_rows=2000, epochs=1)
    batches = list(loader)
    requests = [Counter(batch[:, 0].int().tolist()) for batch in batches]
    assert all(len(each) >= 18 for each in requests)
    assert max(max(each.values()) for each in requests) <= 25  # 10 expected
    order = torch.cat(batches)[:, 0]
    assert abs(float(np.corrcoef(order[:-1], order[1:])[0, 1])) < 0.15  # neighbours have nothing to do with each other
    firsts = [set(each) for each in requests[::10]]
    assert all(not one & other for i, one in enumerate(firsts) for other in firsts[:i])


def test_endless_batches_are_full_and_have_each_row_once_an_epoch(store: Store) -> None:
    loader = store.loader("resid_post", 3, batch_size=32)
    count = sum(lengths())
    batches = [next(loader) for _ in range(4 * count // 32 + 1)]
    assert {len(batch) for batch in batches} == {32}
    rows = torch.cat(batches)
    for epoch in range(4):
        assert seen([rows[epoch * count : (epoch + 1) * count]]) == EVERY


@pytest.mark.parametrize("options", [{}, {"epochs": 2}, {"shuffle": False}, {"workers": 2}, {"buffer_rows": 40}])
@pytest.mark.parametrize("given", [0, 1, 13, 27])
def test_a_state_resumes_a_loader(store: Store, options: dict, given: int) -> None:
    loader = store.loader("resid_post", 3, batch_size=32, **options)
    for _ in range(given):
        next(loader)
    state = loader.state_dict()
    rest = [next(loader) for _ in range(3)]
    other = store.loader("resid_post", 3, batch_size=32, **options)
    next(other)
    other.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(rest, [next(other) for _ in range(3)], strict=True))
    assert other.state_dict() == loader.state_dict()
    with pytest.raises(CaptureError, match="seed and buffer_rows"):
        store.loader("resid_post", 3, batch_size=32, seed=9).load_state_dict(state)


def test_a_loop_that_was_left_goes_on(store: Store) -> None:
    loader = store.loader("resid_post", 3, batch_size=32, epochs=1)
    first = []
    for batch in loader:
        first.append(batch)
        if len(first) == 3:
            break
    assert seen([*first, *loader]) == EVERY


def test_context_says_which_token_a_row_is_of(tmp_path: Path) -> None:
    store = write(tmp_path, lengths(), generated=1)
    for batch in store.loader("resid_post", [3, 5], batch_size=64, epochs=1, with_context=True, workers=2):
        rows = batch.rows["resid_post", 3]
        assert set(batch.rows) == {("resid_post", 3), ("resid_post", 5)}
        assert (
            torch.equal(batch.rows["resid_post", 5][:, :2], rows[:, :2])
            and (batch.rows["resid_post", 5][:, 2] == 5).all()
        )
        assert batch.positions.tolist() == rows[:, 1].int().tolist()
        names = [f"r{int(number)}" for number in rows[:, 0]]
        loader = store.loader("resid_post", 3)
        assert [loader.requests[number] for number in batch.requests] == names
        last = torch.tensor([lengths()[int(name[1:])] - 1 for name in names])
        assert torch.equal(batch.token_ids, torch.where(batch.positions == last, -1, 1000 + batch.positions))


def test_memory_is_the_buffers(tmp_path: Path) -> None:
    """Of 64 MB, the loader has 1 MB in its buffer; the rest is mapped from files."""
    sink = DirectorySink(tmp_path)
    for i in range(64):
        sink.begin(CaptureInfo(str(i), tuple(range(512))))
        sink.rows(str(i), "resid_post", 0, list(range(512)), torch.full((512, 512), float(i)))
        sink.end(str(i), None)
    sink.close()
    loader = open_captures(tmp_path).loader("resid_post", 0, batch_size=64, buffer_rows=512, workers=2)
    batches = iter(loader)

    def use() -> list[dict[str, int]]:
        for _ in range(1000):
            next(batches)
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return [{"memory": int(status["RssAnon"].split()[0]) >> 10, "threads": int(status["Threads"])}]

    before = use()[0]["memory"]
    assert_flat(use, 1)
    assert use()[0]["memory"] - before < 16


def test_what_a_directory_cannot_give_is_an_error(store: Store, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="no rows of mlp_out"):
        store.loader("mlp_out", 3)
    for options, message in (
        ({"site": "nothing"}, "site is 'nothing'"),
        ({"layer": []}, "layer is empty"),
        ({"site": ["resid_post", "resid_post"]}, "each once"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"epochs": 0}, "epochs is 0"),
        ({"workers": -1}, "workers is -1"),
        ({"rank": 2, "world_size": 2}, "rank is 2"),
        ({"when": "during"}, "when is 'during'"),
    ):
        with pytest.raises(PlanError, match=message):
            store.loader(**({"site": "resid_post", "layer": 3} | options))
    sink = DirectorySink(tmp_path)
    for i, width in enumerate((4, 6)):
        sink.begin(CaptureInfo(str(i), (1,)))
        sink.rows(str(i), "resid_post", 3, [0], torch.zeros(1, width))
        if i:
            sink.rows(str(i), "resid_post", 5, [0, 1], torch.zeros(2, width))
        sink.end(str(i), None)
    sink.close()
    with pytest.raises(CaptureError, match="Load the requests of one model"):
        list(open_captures(tmp_path).loader("resid_post", 3, epochs=1))
    with pytest.raises(CaptureError, match="other positions"):
        open_captures(tmp_path).loader("resid_post", [3, 5])


# What an attacker found.


def test_requests_of_one_row_are_shuffled(tmp_path: Path) -> None:
    """Seen failing (the directory's own order, with every seed) where the order of requests and that of rows have one seed."""
    store = write(tmp_path, [1] * 500)
    for seed in (0, 7):
        rows = torch.cat(list(store.loader("resid_post", 3, batch_size=100, seed=seed, epochs=2)))[:, 0]
        for epoch in rows.reshape(2, 500):
            assert abs(float(np.corrcoef(epoch.float().numpy(), np.arange(500))[0, 1])) < 0.2
        assert not torch.equal(rows[:500], rows[500:])


def test_a_loader_that_was_advanced_is_not_shared(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen failing: rows came twice, were missing, or the worker waited for ever for a thread of its parent."""
    # After an error, a DataLoader waits so many seconds for each of its workers before it ends it.
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)
    for workers in (0, 2):
        loader = store.loader("resid_post", 3, batch_size=16, epochs=1, workers=workers)
        next(loader)
        with pytest.raises(CaptureError, match="has given batches"):
            list(DataLoader(loader, batch_size=None, num_workers=2, timeout=60))
        gc.collect()  # the DataLoader's iterator
        assert sum(map(len, loader)) == sum(lengths()) - 16


def test_a_state_is_of_the_same_rows(store: Store, tmp_path: Path) -> None:
    """The order does not depend on how the store lists the requests. Another layer or other requests are refused."""
    fresh = Store(store._directory, sorted(store, reverse=True))
    loader = store.loader("resid_post", 3, batch_size=32)
    next(loader)
    other = fresh.loader("resid_post", 3, batch_size=32)
    other.load_state_dict(loader.state_dict())
    assert torch.equal(next(loader), next(other))
    with pytest.raises(CaptureError, match="planes"):
        store.loader("resid_post", 5, batch_size=32).load_state_dict(loader.state_dict())
    with pytest.raises(CaptureError, match="requests"):
        write(tmp_path, lengths()[::-1]).loader("resid_post", 3, batch_size=32).load_state_dict(loader.state_dict())


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_ends_no_loader(tmp_path: Path, workers: int) -> None:
    """Seen failing: the loop after the error gave nothing, without an error."""
    store = write(tmp_path, [3] * 200, shard_bytes=500)
    loader = store.loader("resid_post", 3, batch_size=15, epochs=1, buffer_rows=15, workers=workers)
    got = [next(loader)]
    shard = sorted(tmp_path.glob("*.safetensors"))[30]
    shard.rename(tmp_path / "away")
    with pytest.raises(CaptureError):
        for batch in loader:
            got.append(batch)
    (tmp_path / "away").rename(shard)
    assert seen([*got, *loader]) == Counter((i, p) for i in range(200) for p in range(3))


def test_a_store_is_refreshed_by_several_threads(tmp_path: Path) -> None:
    """Seen failing without the lock: requests were listed two and three times."""
    sink = DirectorySink(tmp_path)

    def add(names: range) -> None:
        for i in names:
            sink.begin(CaptureInfo(f"r{i}", (1,)))
            sink.rows(f"r{i}", "resid_post", 3, [0], row(i, 0)[None])
            sink.end(f"r{i}", None)
        sink.flush()

    add(range(10))
    store = open_captures(tmp_path)
    add(range(10, 1000))
    sink.close()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=lambda: store["r300"]) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert len(store) == 1000 == store.loader("resid_post", 3).rows


def test_numbers_are_not_lost_in_another_dtype(tmp_path: Path) -> None:
    sink = DirectorySink(tmp_path)
    for name, rows in (("a", torch.ones(2, 4).half()), ("b", torch.full((2, 4), 1e5))):
        sink.begin(CaptureInfo(name, (1, 2)))
        sink.rows(name, "resid_post", 3, [0, 1], rows)
        sink.end(name, None)
    sink.close()
    store = open_captures(tmp_path)
    with pytest.raises(CaptureError, match="Give the loader a dtype"):
        list(store.loader("resid_post", 3, epochs=1))
    with pytest.raises(CaptureError, match="too large for float16"):
        list(store.loader("resid_post", 3, epochs=1, dtype=torch.float16))
    assert torch.cat(list(store.loader("resid_post", 3, epochs=1, dtype=torch.float32))).unique().tolist() == [1.0, 1e5]
    with pytest.raises(CaptureError, match="another dtype"):
        store.to_arrow(tmp_path / "arrow", "resid_post", 3, context_size=2)


def test_layers_may_be_a_tensor(store: Store) -> None:
    batch = next(store.loader("resid_post", torch.tensor([3, 5]), batch_size=4))
    assert set(batch) == {("resid_post", 3), ("resid_post", 5)}


def collected(directory: Path, name: str, value: float, rows: int = 20) -> None:
    """A writer of its own writes a prompt's rows, as `collect` does."""
    sink = DirectorySink(directory)
    of_prompt = Collected(name, "model", "plan")
    sink.begin(CaptureInfo("0", tuple(range(rows)), collected=of_prompt))
    sink.rows("0", "resid_post", 3, list(range(rows)), torch.full((rows, WIDTH), value))
    sink.end("0", None)
    sink.close()


@pytest.mark.parametrize("rows", [20, 24])
def test_a_loader_keeps_its_rows_while_prompts_are_run_again(tmp_path: Path, rows: int) -> None:
    """It gives what the directory held when it was made. Its state is not that of a loader of the new rows."""
    collected(tmp_path, "a", 1.0)
    collected(tmp_path, "b", 2.0)
    store = open_captures(tmp_path)
    options = {"batch_size": 8, "epochs": 1, "buffer_rows": 8}
    loader = store.loader("resid_post", 3, **options)
    found, state = [next(loader)], loader.state_dict()
    for name in ("a", "b"):
        collected(tmp_path, name, 3.0, rows)
    collected(tmp_path, "c", 4.0)
    store.refresh()
    assert set(store) == {"a", "b", "c"} and store["a"]["resid_post", 3].unique().tolist() == [3.0]
    found += loader
    values, counts = torch.cat(found).unique(return_counts=True)
    assert values.tolist() == [1.0, 2.0] and counts.tolist() == [20 * WIDTH, 20 * WIDTH]
    later = store.loader("resid_post", 3, **options)
    assert torch.cat(list(later)).unique().tolist() == [3.0, 4.0]
    with pytest.raises(CaptureError, match="requests"):
        Store(tmp_path, ["a", "b"]).loader("resid_post", 3, **options).load_state_dict(state)


def test_a_store_of_some_prompts_reads_their_lines_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store that `collect` returns has the same captures as one that reads the whole index, and sees later lines."""
    for name in "abcd":
        collected(tmp_path, name, float(ord(name)))
    listing = Listing(tmp_path)
    listing.refresh()
    added = []
    monkeypatch.setattr(
        Store, "_add", lambda self, path, line, add=Store._add: added.append(line) or add(self, path, line)
    )
    some = Store(tmp_path, ["c", "a", "missing"], listing)
    assert list(some) == ["c", "a"] and len(added) == 2
    assert some["c"]["resid_post", 3].unique().tolist() == [float(ord("c"))]
    collected(tmp_path, "a", 1.0)
    collected(tmp_path, "e", 5.0)
    some.refresh()
    assert list(some) == ["c", "a"] and some["a"]["resid_post", 3].unique().tolist() == [1.0]
