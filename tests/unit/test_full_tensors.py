"""Full tensors under tensor parallelism, without an engine (requirements C10, C12).

Layouts in closed form, the agreement of the ranks, random numbers. Row A9.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from midstream.arch.probe import Plant, ProbeForward, record
from midstream.errors import DivergedError, NeverReachedError
from midstream.ranks.tensor import Finder, Segment, ShardLayout, ShardLayouts, Shards, Summands, TensorParallel
from midstream.sites import Binding
from midstream.trace.batch_rows import Event, FlatRows
from midstream.trace.body import Randomness
from midstream.trace.forward import SourceHooks
from midstream.trace.visit import Journal, Visit
from midstream.tree import replaced

T, D = 3, 2  # tokens, and elements of a head


def named(*names: str) -> torch.Tensor:
    """`[T, D * len(names)]`: each name's elements are numbers of its own."""
    rows = [[1000.0 * t + 100.0 * ord(name) + d for name in names for d in range(D)] for t in range(T)]
    return torch.tensor(rows)


def heads(widths: tuple[tuple[int, int], ...], ranks: int) -> Shards:
    return Shards(tuple(Segment(width * D, replicas) for width, replicas in widths), ranks)


LAYOUTS: dict[str, tuple[Shards, list[str], str]] = {
    # what each rank has, and what a single rank would have
    "column": (heads(((2, 1),), 2), ["ab", "cd"], "abcd"),
    "gate and up": (heads(((1, 1), (1, 1)), 2), ["aA", "bB"], "abAB"),
    "queries, keys, values": (heads(((2, 1), (1, 1), (1, 1)), 2), ["abKV", "cdLW"], "abcdKLVW"),
    "one key head on both ranks": (heads(((2, 1), (1, 2), (1, 2)), 2), ["abKV", "cdKV"], "abcdKV"),
    "two key heads on four ranks": (
        heads(((1, 1), (1, 2), (1, 2)), 4),
        ["aKV", "bKV", "cLW", "dLW"],
        "abcdKLVW",
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("shape", ["flat", "by head", "with a batch axis", "no tokens"])
def test_a_full_value_is_laid_out_as_on_one_rank(name: str, shape: str) -> None:
    """C12: the parts join to the value of a single rank, which is cut into the parts again."""
    layout, parts, whole = LAYOUTS[name]
    lead = {"flat": 1, "by head": 1, "with a batch axis": 2, "no tokens": 0}[shape]

    def shaped(text: str) -> torch.Tensor:
        value = named(*text)
        if shape == "by head":
            return value.unflatten(-1, (-1, D))
        return {"flat": value, "with a batch axis": value[None], "no tokens": value[0]}[shape]

    each = torch.stack([shaped(text) for text in parts])
    assert torch.equal(layout.join(each, lead), shaped(whole))
    for rank, text in enumerate(parts):
        assert torch.equal(layout.cut(shaped(whole), rank, lead), shaped(text))
    assert layout.width == shaped(whole).numel() // (T if shape != "no tokens" else 1)


def test_summands_add_up_and_are_written_once() -> None:
    """C12: a partial sum is read as the sum. After a write the all-reduce gives the written value."""
    layout = Summands(2)
    parts = torch.stack([named("a"), named("b")])
    assert torch.equal(layout.join(parts, 1), named("a") + named("b"))
    assert torch.equal(sum(layout.cut(named("x"), rank, 1) for rank in range(2)), named("x"))


def test_columns_of_a_fused_projection_are_segments_or_nothing() -> None:
    """C12: queries are columns of the fused output. Half of the queries have no layout."""
    qkv = heads(((2, 1), (1, 2), (1, 2)), 2)
    assert qkv.columns(0, 2 * D) == heads(((2, 1),), 2)
    assert qkv.columns(2 * D, D) == heads(((1, 2),), 2)
    assert qkv.columns(2 * D, 2 * D) == heads(((1, 2), (1, 2)), 2)
    assert qkv.columns(D, D) is None
    assert qkv.columns(1, 2 * D) is None


# The classes of vLLM's layers, as far as they are asked: attributes under the same names, on two ranks.


class LinearBase(nn.Module):
    tp_size = 2

    def __init__(self, taken: int, given: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(given, taken))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x @ self.weight.T, None


class ColumnParallelLinear(LinearBase):
    gather_output = False

    def __init__(self, taken: int, *widths: int) -> None:
        super().__init__(taken, sum(widths))
        self.output_partition_sizes = list(widths)


class QKVParallelLinear(ColumnParallelLinear):
    num_kv_head_replicas = 2


class RowParallelLinear(LinearBase):
    input_is_parallel = True
    reduce_results = True

    def __init__(self, taken: int, given: int) -> None:
        super().__init__(taken, given)
        self.input_size_per_partition = taken


class Attention(nn.Module):
    num_heads, num_kv_heads, head_size = 2, 1, D

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(q)


class Rotary(nn.Module):
    def forward(self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return q + 1, k + 1


class HeadNorm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class GatedActivation(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.chunk(2, -1)[0] * x.chunk(2, -1)[1]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(8, 2 * D, D, D)
        self.q_norm, self.rotary, self.attn = HeadNorm(), Rotary(), Attention()
        self.o_proj = RowParallelLinear(2 * D, 8)
        self.gate_up = ColumnParallelLinear(8, 6, 6)
        self.act, self.down = GatedActivation(), RowParallelLinear(6, 8)
        self.down.reduce_results = False
        self.free = HeadNorm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv_proj(x)[0].split([2 * D, D, D], -1)
        q = self.q_norm(q.view(T, 2, D)).view(T, 2 * D)
        q, k = self.rotary(torch.arange(T), q, k)
        x = x + self.o_proj(self.attn(q, k, v))[0]
        gated = self.act(self.gate_up(x)[0])
        self.free(gated.cos())  # computed between modules: nothing tells what it is
        return self.down(gated)[0]


def layouts_in(
    block: nn.Module, exchange: Callable[[Any], list[Any]], width: int = 8, plant: Mapping[str, Plant] | None = None
) -> ShardLayouts:
    """The layouts found in a model that is this block. `plant`: values that `detect` plants besides those of the finder."""
    outer = nn.ModuleDict({"block": block})
    outer.forward = lambda x: block(x)  # type: ignore[method-assign]
    finder, modules = Finder(2, exchange), dict(outer.named_modules())
    watch, plants = finder.watch(modules), finder.plants(modules) | dict(plant or {})
    return finder.find(
        record(outer, lambda: outer(torch.randn(T, width)), watch=watch, plant=plants, probe=ProbeForward())
    )


@pytest.fixture(scope="module")
def found() -> ShardLayouts:
    torch.manual_seed(0)
    return layouts_in(Block(), lambda mine: [mine, mine])


Q, KV = heads(((2, 1),), 2), heads(((1, 2),), 2)
EXPECTED: dict[tuple[str, str], dict[Any, ShardLayout]] = {
    ("qkv_proj", "output"): {(0,): heads(((2, 1), (1, 2), (1, 2)), 2)},
    ("q_norm", "input"): {(0, 0): Q},
    ("q_norm", "output"): {(): Q},
    ("rotary", "input"): {(0, 1): Q, (0, 2): KV},
    ("rotary", "output"): {(0,): Q, (1,): KV},
    ("attn", "input"): {(0, 0): Q, (0, 1): KV, (0, 2): KV},
    ("attn", "output"): {(): Q},
    ("o_proj", "input"): {(0, 0): Q},
    ("gate_up", "output"): {(0,): Shards((Segment(6), Segment(6)), 2)},
    ("act", "input"): {(0, 0): Shards((Segment(6), Segment(6)), 2)},
    ("act", "output"): {(): Shards((Segment(6),), 2)},
    ("down", "input"): {(0, 0): Shards((Segment(6),), 2)},
    ("down", "output"): {(0,): Summands(2)},
}


def test_layouts_are_found_from_classes_memory_and_shapes(found: ShardLayouts) -> None:
    """C12: every sharded leaf of a block, and no full or unknown one."""
    inside = {(path.removeprefix("block."), kind): leaves for (path, kind), leaves in found.items()}
    assert {place: leaves for place, leaves in inside.items() if place[0] in {p for p, _ in EXPECTED}} == EXPECTED
    assert not {"free", "outer"} & {path for path, _ in inside}


class FusedMoE(nn.Linear):
    """Experts, whose output may be summed up already."""


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts, self.rows = FusedMoE(8, 8), RowParallelLinear(8, 8)
        self.rows.reduce_results = False
        self.handed_on, self.norm = nn.Identity(), HeadNorm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.handed_on(self.experts(self.rows(x)[0]))
        self.norm(out)
        return out


@pytest.mark.parametrize("reduced", [True, False])
def test_output_of_experts_is_a_summand_unless_it_is_equal_on_all_ranks(reduced: bool) -> None:
    """C12: so are copies of it, but not values computed from it. The unreduced output of a row-parallel layer always is one."""
    layouts = layouts_in(
        Mixture(), lambda mine: [mine, mine if reduced else (mine[0], dict.fromkeys(mine[1], b"another"))]
    )
    certain = {("block.rows", "input"), ("block.rows", "output"), ("block.experts", "input")}
    handed_on = {("block.experts", "output"), ("block.handed_on", "input"), ("block.handed_on", "output")}
    handed_on.add(("block.norm", "input"))
    assert set(layouts) == (certain if reduced else certain | handed_on | {("block", "output"), ("", "output")})


class Overwritten(nn.Module):
    """Attention that computes nothing, then a sum over ranks and a norm that overwrite their inputs, as on vLLM's CPU build."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.o_proj, self.norm = Attention(), RowParallelLinear(2 * D, 8), HeadNorm()
        self.o_proj.reduce_results = False
        self.inner, self.handed_on = nn.Sequential(self.attn), nn.Identity()
        self.inner.forward = lambda x: self.o_proj(self.attn(x, x, x))[0]  # type: ignore[method-assign]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.norm.forward = lambda out: out.mul_(3)  # type: ignore[method-assign]
        return self.norm(self.handed_on(self.inner(x)).mul_(2))


@pytest.mark.parametrize("planted", [False, True])
def test_values_written_over_summands_are_no_summands(planted: bool) -> None:
    """C12: a dummy run's attention returns zeros. Its summands still differ from later values in the same memory."""
    plant = {"block.inner": torch.ones_like} if planted else {}  # as a block's attention is, with the same on all ranks
    layouts = layouts_in(Overwritten(), lambda mine: [mine, mine], 2 * D, plant)
    summands = {place for place, leaves in layouts.items() if Summands(2) in leaves.values()}
    inside = {("block.o_proj", "output"), ("block.inner", "output")}
    assert summands == inside | {("block.handed_on", "input"), ("block.handed_on", "output")}


class TwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"down": nn.Linear(2, 2)})
        self.alias, self.scale = self.inner["down"], 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.alias(x).mul(self.scale)


def test_a_call_in_a_forward_is_that_of_the_module_under_any_of_its_names() -> None:
    """C12: its value has the layout of the module's output."""
    hooks = SourceHooks(dict(nn.ModuleDict({"block": TwoNames()}).named_modules()), lambda key, value: value)
    names = hooks.of("block").names
    points = [hooks.module_point(("block", "source", name, "output")) for name in names]
    assert dict(zip(names, points, strict=True)) == {
        "self_alias_0": ("block.inner.down", "output"),
        "mul_0": ("block", "source", "mul_0", "output"),
    }


def test_leaves_with_different_layouts_on_the_ranks_are_left_alone() -> None:
    """C12: all ranks gather, or none does."""
    assert layouts_in(Block(), lambda mine: [mine, ({}, {})]) == {}


# Two ranks as two threads.


class Board:
    """Does the work of `ranks.link.Link` between threads."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.values: dict[tuple[int, str, int], Any] = {}
        self.over: set[tuple[int, str]] = set()


class ThreadLink:
    def __init__(self, board: Board, rank: int, size: int) -> None:
        self.board, self.rank, self.size = board, rank, size

    def publish(self, body: str, number: int, value: Any) -> None:
        with self.board.changed:
            self.board.values[self.rank, body, number] = value
            self.board.changed.notify_all()

    def fetch(self, peer: int, body: str, number: int) -> Any:
        return _Wanted(self.board, peer, body, number)

    def end(self, body: str, reason: str) -> None:
        with self.board.changed:
            self.board.over.add((self.rank, body))
            self.board.changed.notify_all()

    def gauges(self) -> dict[str, int]:
        return {}

    def close(self) -> None: ...


class _Wanted:
    def __init__(self, board: Board, peer: int, body: str, number: int) -> None:
        self.board, self.key, self.over = board, (peer, body, number), (peer, body)

    def wait(self) -> Any:
        with self.board.changed:
            arrived = self.board.changed.wait_for(
                lambda: self.key in self.board.values or self.over in self.board.over, timeout=10
            )
            assert arrived, f"{self.key} never came"
            if self.key in self.board.values:
                return self.board.values[self.key]
            raise NeverReachedError("over")


def on_ranks(size: int, act: Callable[[int, TensorParallel], Any]) -> list[Any]:
    """For each rank, the value that `act` returned, or its error."""
    board, results = Board(), [None] * size

    def run(rank: int) -> None:
        link: Any = ThreadLink(board, rank, size)
        try:
            results[rank] = act(rank, TensorParallel({}, torch.clone, link))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "a rank hangs"
    return results


@pytest.mark.parametrize("size", [2, 3])
def test_bodies_that_do_the_same_gather(size: int) -> None:
    """C12: several bodies, several steps, notes between the gathers, and no errors."""

    def act(rank: int, tensor: TensorParallel) -> list[Any]:
        told = []
        for step in range(3):
            tensor.begin_step()
            for body in "ab":
                tensor.note(body, "x", step)
            tensor.show()
            for body in "ab":
                tensor.agree(body, "y", step)
                tensor.note(body, "z")
            tensor.show()
            told.append(tensor.end_step("ab"))
        return told

    assert on_ranks(size, act) == [[{}, {}, {}]] * size


@pytest.mark.parametrize("size", [2, 3])
def test_a_gather_that_a_peer_does_not_reach_is_an_error_on_all_ranks(size: int) -> None:
    """C12: the last rank's body waits elsewhere, its neighbour's gathers go on, and the step's end tells every rank."""

    def act(rank: int, tensor: TensorParallel) -> Any:
        tensor.begin_step()
        odd = rank == size - 1
        raised = False
        for body in "ab":
            tensor.note(body, "waits for layer", 9 if odd and body == "a" else 1)
        tensor.show()
        for body in "b" if odd else "ab":
            try:
                tensor.agree(body, "layer 1")
            except DivergedError:
                raised = True
        tensor.show()
        return raised, list(tensor.end_step("ab")), tensor.end_step is None

    results = on_ranks(size, act)
    assert [told for _, told, _ in results] == [["a"]] * size
    assert [raised for raised, _, _ in results] == [True] * (size - 1) + [False]


def test_the_end_of_a_peers_step_ends_the_wait_for_its_notes() -> None:
    """C12: a rank that waits for notes gets an error."""

    def act(rank: int, tensor: TensorParallel) -> Any:
        tensor.begin_step()
        if rank == 1:
            tensor.rest()
            return None
        with pytest.raises(DivergedError, match="rank 0 it came to layer 1"):
            tensor.agree("a", "layer 1")
        return "told"

    assert on_ranks(2, act) == ["told", None]


# Reads and writes through visits, the gathers answered by a list of all ranks' parts.

KEY = ("proj", "input")
QKV = LAYOUTS["two key heads on four ranks"]


class InAgreement(TensorParallel):
    """A rank whose peers always do the same."""

    def agree(self, body: str, *what: Any) -> None: ...


class Rank:
    """One of four ranks whose leaf `(0, 0)` is laid out like `QKV`; the others' parts are in closed form."""

    def __init__(self, rank: int) -> None:
        self.gathers = 0
        self.tree: Any = ((named(*QKV[1][rank]),), {})
        layouts: ShardLayouts = {("proj", "input"): {(0, 0): QKV[0]}}
        link: Any = ThreadLink(Board(), rank, 4)
        self.peers = InAgreement(layouts, self._gather, link)

    def _gather(self, part: torch.Tensor) -> torch.Tensor:
        self.gathers += 1
        return torch.stack([named(*text)[: len(part)] if len(part) == T else self._rows(text) for text in QKV[1]])

    def _rows(self, text: str) -> torch.Tensor:
        return named(*text)[1:]

    def event(self) -> Event:
        return Event(KEY, self.tree, peers=self.peers)


@pytest.mark.parametrize("rank", range(4))
def test_a_visit_reads_the_full_tensor_and_writes_its_part(rank: int) -> None:
    """C12: a request's rows are full. Edits in place and replacements reach this rank's part; the neighbours' rows stay."""
    here = Rank(rank)
    for replace in (False, True):
        event, journal = here.event(), Journal()
        rows = FlatRows(1, T, T)
        visit = Visit(event, rows, 0, journal, None, "a")
        (value,), _ = visit.raw()
        assert torch.equal(value, named(*QKV[2])[1:])
        if replace:
            visit.set_raw(((-value,), {}))
        else:
            value.neg_()
        visit.leave()
        event.write_back()
        expected = named(*QKV[1][rank])
        expected[1:] *= -1
        assert torch.equal(event.leaf((0, 0)), expected)

        again = here.event()  # after a preemption
        journal.replay(again, FlatRows(1, T, T))
        assert torch.equal(again.leaf((0, 0)), expected)


@pytest.mark.parametrize("rank", range(4))
def test_a_site_with_heads_is_full(rank: int) -> None:
    """C12: `[tokens, all heads, head_dim]`, gathered once for all bodies of the event."""
    here = Rank(rank)
    binding = Binding("proj", "input", (0, 0), heads=(8, D))
    event, span = here.event(), (0, T)
    visits = [Visit(event, FlatRows(t, t + 1, T), 0, Journal(), span, str(t)) for t in range(T)]
    for t, visit in enumerate(visits):
        assert torch.equal(visit.site(binding), named(*QKV[2])[t : t + 1].unflatten(-1, (8, D)))
    assert here.gathers == 1
    visits[0].set_site(binding, torch.ones(1, 8, D), "attn_z[0]")
    visits[1].site(binding)[:, 3] = 5.0
    for visit in visits:
        visit.leave()
    event.write_back()
    whole = named(*QKV[2])
    whole[0], whole[1, 3 * D : 4 * D] = 1.0, 5.0
    assert torch.equal(event.leaf((0, 0)), QKV[0].cut(whole, rank, 1))


@pytest.mark.parametrize("as_site", [True, False])
@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("rank", range(4))
def test_changes_of_what_was_assigned_are_written_and_kept(rank: int, inference: bool, as_site: bool) -> None:
    """C12: on every rank, and again after a preemption. Seen failing with a copy of the tensor."""
    here = Rank(rank)
    binding = Binding("proj", "input", (0, 0), heads=(8, D))
    event, journal, rows = here.event(), Journal(), FlatRows(1, T, T)
    visit = Visit(event, rows, 0, journal, None, "a")
    with torch.inference_mode(inference):
        value = -named(*QKV[2])[1:]
        if as_site:
            visit.set_site(binding, value.unflatten(-1, (8, D)), "attn_z[0]")
            read = visit.site(binding).flatten(-2)
        else:
            visit.set_raw(((value,), {}))
            ((read,), _) = visit.raw()
        assert read.data_ptr() == value.data_ptr()
        value.mul_(2)
        visit.leave()
        value.zero_()  # too late
    event.write_back()
    expected = named(*QKV[1][rank])
    expected[1:] *= -2
    assert torch.equal(event.leaf((0, 0)), expected)
    again = here.event()
    journal.replay(again, rows)
    assert torch.equal(again.leaf((0, 0)), expected)


def test_the_value_of_a_neighbouring_row_may_be_assigned() -> None:
    """It begins where the site's own value begins. Seen failing: it was taken for that value, and nothing was written."""
    tree = torch.arange(12.0).reshape(4, 3)
    event, binding = Event(("layer", "output"), tree), Binding("layer", "output", ())
    visit = Visit(event, FlatRows(1, 4, 4), 0, None, None, "a")
    visit.set_site(binding, visit.site(binding)[0], "resid_post[0]")
    visit.leave()
    event.write_back()
    assert torch.equal(event.leaf(()), torch.stack([tree[0], *[tree[1]] * 3]))


def test_bodies_share_a_gather_and_see_each_others_writes() -> None:
    """C12: raw values are joined once for the span; a second body of the same rows reads what the first one wrote."""
    here = Rank(0)
    event, span = here.event(), (0, T)
    first, second, other = (Visit(event, FlatRows(r, r + 1, T), 0, None, span, str(r)) for r in (0, 0, 2))
    first.set_raw(((torch.zeros(1, 8 * D),), {}))
    first.leave()
    assert second.raw()[0][0].eq(0).all()
    assert torch.equal(other.raw()[0][0], named(*QKV[2])[2:])
    assert here.gathers == 1


def test_shapes_are_checked_against_the_full_tensor() -> None:
    """C12: a value shaped like a rank's part is refused."""
    from midstream.errors import ShapeError

    here = Rank(0)
    visit = Visit(here.event(), FlatRows(0, T, T), 0, None, None, "a")
    with pytest.raises(ShapeError, match=r"\[3, 16\]"):
        visit.set_raw(replaced(here.tree, (0, 0), torch.zeros(T, 3 * D)))


# Random numbers.


def test_a_body_has_random_numbers_of_its_own() -> None:
    """C12: they are the same on every rank, whatever other bodies and the engine draw. The engine's own are not disturbed."""

    def drawn(extra: int) -> tuple[list[float], list[float]]:
        torch.manual_seed(extra)
        mine, engines = Randomness("request/0", torch.device("cpu")), []
        body = []
        for _ in range(3):
            with mine:
                body.append(float(torch.rand(())))
            engines.append(float(torch.rand(())))
        torch.manual_seed(extra)
        assert engines == [float(torch.rand(())) for _ in range(3)]
        return body, engines

    assert drawn(1)[0] == drawn(2)[0]
    with Randomness("request/1", torch.device("cpu")):
        assert float(torch.rand(())) != drawn(1)[0][0]
