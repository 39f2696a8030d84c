"""Rows F8, L1 and L6, without an engine: what is taken out of a trace's code, what it becomes in the worker and in copies for this process,
and what the workers are told to hold."""

from __future__ import annotations

import asyncio
import enum
import functools
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from midstream.errors import TraceError
from midstream.requests.vectors_and_runs import HeldWeights
from midstream.trace.code import FunctionProgram
from midstream.trace.containers import Callers
from midstream.trace.shipping import ShippedCode, copies, ship, unship
from midstream.trace.weights import LEAST_BYTES, Weight, on_device

LARGE = LEAST_BYTES // 4  # float32 elements of the smallest tensor that travels apart


def shipped(value: Any, elsewhere: bool = False) -> ShippedCode:
    return ship([[FunctionProgram(lambda model: value)]], elsewhere)


def stored(code: ShippedCode) -> dict[str, torch.Tensor]:
    """What a worker holds for it."""
    return {digest: on_device(weight.data, None) for digest, weight in code.weights.items()}


def loaded(code: ShippedCode, held: Mapping[str, torch.Tensor] | None = None) -> Any:
    """The value as a body gets it."""
    ((program,),) = unship(code.programs, lambda reference: reference, None, stored(code) if held is None else held)
    assert isinstance(program, FunctionProgram)
    return program.fn(None)


def sent(code: ShippedCode) -> int:
    return sum(len(weight.data) for weight in code.weights.values())


def random_bits(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(
    "make",
    [
        lambda: random_bits(LARGE),
        lambda: nn.Parameter(random_bits(300, 301)),
        lambda: random_bits(300, 301).T,
        lambda: random_bits(300, 301)[7:, 3:290],
        lambda: random_bits(300, 301)[:, 5],
        lambda: random_bits(300, 301)[11],
        lambda: random_bits(300, 301)[11, 4],
        lambda: random_bits(1, LARGE).expand(7, LARGE),
        lambda: random_bits(200_001, dtype=torch.bfloat16)[1:],
        lambda: random_bits(900, 301, dtype=torch.int8),
        lambda: random_bits(300, 301, dtype=torch.complex64).conj(),
        lambda: random_bits(100, 301, dtype=torch.complex128)[3:].imag,
        lambda: random_bits(900, 301) > 0,
        lambda: random_bits(300, 301)[:0],
        lambda: random_bits(LARGE - 1),
    ],
)
def test_tensors_of_all_kinds_arrive_as_they_are(make: Callable[[], torch.Tensor]) -> None:
    with torch.no_grad():
        tensor = make()
    for elsewhere in (False, True):
        code = shipped({"first": tensor, "again": tensor}, elsewhere)
        there = loaded(code)
        assert torch.equal(there["first"], tensor) and there["first"].dtype == tensor.dtype
        assert there["again"] is there["first"]
        assert not (elsewhere and code.weights)  # a server gets tensors with the code
        assert not there["first"].is_inference()


def test_a_small_part_of_a_large_storage_does_not_take_the_rest_along() -> None:
    large = random_bits(1000, 1000)
    for part, most in ((large[3], 4_000), (large[:, :3], 12_000), (large[::100, ::100], 400)):
        code = shipped(part)
        assert sent(code) == 0 and len(code.programs) < most + 2_000
        assert torch.equal(loaded(code), part)
    code = shipped((large[0], large[999]))
    assert sent(code) == 0 and len(code.programs) < 10_000


def test_tensors_of_one_storage_share_it_in_the_worker() -> None:
    """Seen failing with each tensor in a part of its own."""
    both = random_bits(512, 256)
    code = shipped({"encoder": both[:256], "decoder": both.T, "row": both[3], "bits": both.view(torch.int32)})
    assert sent(code) == both.nbytes
    there = loaded(code)
    there["row"].fill_(7.0)
    assert (there["encoder"][3] == 7.0).all() and (there["decoder"][:, 3] == 7.0).all()
    assert torch.equal(there["bits"].view(torch.float32), there["decoder"].T)
    assert there["decoder"].stride() == both.T.stride()


def test_what_a_body_writes_no_other_body_sees() -> None:
    """Seen failing with the held weight itself in place of `_private` copies."""
    tensor = random_bits(300, 301)
    code = shipped((tensor, tensor[3:]))
    held = stored(code)
    (first, part), (second, _) = loaded(code, held), loaded(code, held)
    part += 1
    first.data.mul_(2)
    first.numpy()[0] = 5
    torch.from_dlpack(first).add_(1)
    first.untyped_storage()[8] = 3
    assert not torch.equal(first, tensor)
    assert torch.equal(second, tensor) and torch.equal(loaded(code, held)[0], tensor)
    second.zero_()
    del held
    assert torch.equal(loaded(code)[0], tensor)


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.data.mul_(2),  # leaves the tensor's version as it was
        lambda weight: weight.detach().numpy().__setitem__((3, 4), 9.0),
        lambda weight: weight.detach().add_(1),
        lambda weight: setattr(weight, "data", torch.ones(300, 301)),
        lambda weight: weight.untyped_storage().__setitem__(12_345, weight.untyped_storage()[12_345] ^ 1),
    ],
)
def test_a_change_on_the_client_is_seen(change: Callable[[nn.Parameter], Any]) -> None:
    """Seen failing with `_version` in place of the comparison, and without any."""
    weight = nn.Parameter(random_bits(300, 301))
    before, was = shipped(weight), weight.detach().clone()
    assert shipped(weight).weights == before.weights
    change(weight)
    after = shipped(weight)
    assert after.weights.keys() != before.weights.keys()
    assert torch.equal(loaded(after), weight) and torch.equal(loaded(before), was)


def test_equal_content_is_one_weight() -> None:
    tensor = random_bits(300, 301)
    first, second = shipped(tensor), shipped([tensor.clone(), tensor])
    assert [*first.weights.values()] == [*second.weights.values()]


def test_tensors_are_on_the_models_device_wherever_the_worker_holds_them() -> None:
    code = shipped(random_bits(300, 301))
    ((program,),) = unship(code.programs, id, torch.device("meta"), stored(code))
    assert isinstance(program, FunctionProgram) and program.fn(None).is_meta


def test_a_weight_that_is_missing_is_an_error() -> None:
    with pytest.raises(TraceError, match="Run the trace again"):
        loaded(shipped(random_bits(LARGE)), {})


# What shares memory.


def copied(value: Any) -> Any:
    """The value as a function of `LanguageModel.run` gets it."""
    (program,) = copies([FunctionProgram(lambda model: value)], lambda _: False)
    assert isinstance(program, FunctionProgram)
    return program.fn(None)


def ways(value: Any) -> Iterator[Any]:
    """The value for a worker, for a server, and for this process."""
    yield from (loaded(shipped(value)), loaded(shipped(value, elsewhere=True)), copied(value))


def of_tensor(n: int) -> Any:
    W = torch.arange(n * n, dtype=torch.float32).reshape(n, n)
    return W, W.numpy(), W[3], W.T[2:4], torch.from_numpy(W.numpy()[2:]), W.view(torch.int32)[:, 1]


def of_array(n: int) -> Any:
    a = np.arange(n * n, dtype=np.float64).reshape(n, n)
    return a, a[1:4, ::-1], a.view(np.int16)[:, 5], torch.from_numpy(a)[2]


def of_parts(n: int) -> Any:
    """Their base is not there."""
    W = torch.arange(n * n, dtype=torch.float32).reshape(n, n)
    return W[1:4], W[2:5], W[3, 2:9], W[3:, 4].numpy()


def of_columns(n: int) -> Any:
    """Most of the memory between them is nobody's."""
    W = torch.arange(4.0 * n * n).reshape(n, 4 * n)
    return W[:, 0], W[:, :2], W[:, 7], W.numpy()[:, 7:9]


def of_complex(n: int) -> Any:
    z = torch.complex(torch.arange(float(n)), torch.ones(n))
    return z, z.conj(), z.conj().imag, torch.view_as_real(z)


def of_records(n: int) -> Any:
    records = np.zeros(n, dtype=[("small", "i1"), ("large", "f8")])
    return records, records["large"], records["small"][2:]


def of_bytes(n: int) -> Any:
    """None begins where an element of another would."""
    data = np.arange(16 * n, dtype=np.uint8)
    return data[3:], data[5:13].view(np.float64), torch.from_numpy(data[4:12].view(np.float32)), data[1:]


MEMORIES = [of_tensor, of_array, of_parts, of_columns, of_complex, of_records, of_bytes]


def write(value: Any) -> None:
    if isinstance(value, torch.Tensor):
        value.fill_(7)
    else:
        value[...] = np.ones((), value.dtype)


def as_array(value: Any) -> np.ndarray:
    return value.resolve_conj().resolve_neg().numpy() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("n", [10, 600])
@pytest.mark.parametrize("make", MEMORIES)
def test_what_overlaps_in_memory_overlaps_in_the_copy(make: Callable[[int], Any], n: int) -> None:
    """A write through each of them is seen in the others as it is in the caller's own, and in these nothing changes."""
    given = make(n)
    for place in range(len(given)):
        expected = make(n)
        write(expected[place])
        for there in ways(given):
            for value, own in zip(there, given, strict=True):
                assert type(value) is type(own) and value.dtype == own.dtype and value.shape == own.shape
                steps = (each.stride() if isinstance(each, torch.Tensor) else each.strides for each in (value, own))
                assert len({*steps}) == 1
                np.testing.assert_array_equal(as_array(value), as_array(own))
            write(there[place])
            for value, want in zip(there, expected, strict=True):
                np.testing.assert_array_equal(as_array(value), as_array(want))
    for value, untouched in zip(given, make(n), strict=True):
        np.testing.assert_array_equal(as_array(value), as_array(untouched))


def test_columns_that_share_nothing_do_not_take_the_others_along() -> None:
    large = random_bits(1000, 1000)
    for columns in ([large[:, 0], large[:, 5]], [large.numpy()[:, 0], large.numpy()[:, 5]]):
        code = shipped(columns)
        assert sent(code) == 0 and len(code.programs) < 10_000
        assert all(np.array_equal(*each) for each in zip(loaded(code), columns, strict=True))


def test_arrays_of_all_kinds_arrive_as_they_are() -> None:
    fixed = np.arange(12.0).reshape(3, 4)
    fixed.flags.writeable = False
    arrays = [
        fixed,
        np.asfortranarray(np.arange(12).reshape(3, 4)),
        np.array(3.5),
        np.zeros((0, 3)),
        np.array(["one", "three"]),
        np.array(["2026-11-26"], dtype="M8[D]"),
        np.array([1, None, "text"], dtype=object),
        np.broadcast_to(np.arange(3), (5, 3)),
        np.ma.masked_array([1, 2], [True, False]),
    ]
    for there in ways(arrays):
        for value, own in zip(there, arrays, strict=True):
            assert (
                type(value) is type(own) and value.dtype == own.dtype and value.flags.writeable == own.flags.writeable
            )
            assert value.flags.f_contiguous == own.flags.f_contiguous
            np.testing.assert_array_equal(value, own)
        there[1].resize(20, refcheck=False)  # it has memory of its own, as the caller's has
    base = np.arange(12.0)
    part = base[3:]
    part.flags.writeable = False
    for one, other in ways((base, part)):
        one[3] = 9
        assert other[0] == 9 and not other.flags.writeable


def test_a_write_to_an_array_changes_no_weight() -> None:
    W = random_bits(300, 301)
    code = shipped((W, W.numpy()))
    held = stored(code)
    assert sent(code) == W.nbytes
    (tensor, array), (other, _) = loaded(code, held), loaded(code, held)
    array[:] = 0
    assert not tensor.any() and torch.equal(other, W) and torch.equal(loaded(code, held)[0], W)


def test_a_tensor_on_a_device_shares_no_memory_with_an_array() -> None:
    """It would say so in silence, by other values. Seen failing: the array stayed as it was when the tensor changed."""
    W = torch.randn(3, 4)
    ARRAY = W.numpy()
    code = ship([[FunctionProgram(lambda model: (W, ARRAY))]])
    with pytest.raises(
        TraceError, match=r"W \(a tensor \[3, 4\]\) and ARRAY \(a numpy array \[3, 4\]\) share memory.*array\.copy\(\)"
    ):
        unship(code.programs, id, torch.device("meta"), stored(code))
    apart = shipped((W.clone(), ARRAY))
    ((program,),) = unship(apart.programs, id, torch.device("meta"), stored(apart))
    assert isinstance(program, FunctionProgram)
    tensor, array = program.fn(None)
    assert tensor.is_meta and np.array_equal(array, ARRAY)


# Functions and classes.


@functools.lru_cache(maxsize=7)
def fibonacci(n: int) -> int:
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


@functools.singledispatch
def kind_of(value: Any) -> Any:
    return "other"


@kind_of.register
def _(value: int) -> Any:
    return "int"


@kind_of.register
def _(value: list) -> Any:
    return [kind_of(each) for each in value]


class Color(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    one: Any
    other: Any


@dataclass(frozen=True, slots=True)
class Slotted:
    value: Any


class Counter:
    total = 0
    seen: list[int] = []

    @functools.cached_property
    def first(self) -> int:
        Counter.total += 1
        return self.add(3)

    @functools.lru_cache  # noqa: B019
    def twice(self, n: int) -> int:
        return 2 * n

    def add(self, n: int) -> int:
        Counter.seen.append(n)
        return n

    @functools.singledispatchmethod
    def kind(self, value: Any) -> str:
        return "other"

    @kind.register
    def _(self, value: int) -> str:
        return "int"


def everything(model: Any) -> Any:
    counter = Counter()
    called = fibonacci(20), kind_of([1, [2.5]]), counter.first, counter.first, counter.twice(4), Counter.total
    return called, [counter, Pair(1, Slotted(Color.RED))], fibonacci.cache_parameters()["maxsize"], counter.kind(2)


def in_this_process() -> list[Callable[[Any], Any]]:
    """Copies of `everything` from code for a server, whose functions and classes go by value, and from `copies`."""
    code = ship([[FunctionProgram(everything)]], elsewhere=True)
    programs = [unship(code.programs, id)[0][0], *copies([FunctionProgram(everything)], lambda _: False)]
    return [program.fn for program in programs if isinstance(program, FunctionProgram)]


def test_attributes_and_gradients_of_tensors_are_sent() -> None:
    """Seen failing: `getattr(vector, "scale", 1.0)` was 1.0 in a trace."""
    vector, matrix = random_bits(8), nn.Parameter(random_bits(LARGE))
    vars(vector).update(scale=3.0)
    vars(matrix).update(layer=[5], vector=vector)
    vector.grad = torch.ones(8)
    one, other = loaded(shipped([vector, matrix]))
    assert (one.scale, other.layer) == (3.0, [5]) and other.vector is one and torch.equal(one.grad, vector.grad)


def test_a_changed_attribute_of_a_tensor_is_a_change() -> None:
    """Seen failing: it was lost without a warning."""
    vector = random_bits(8)
    callers = Callers({"vector": vector, "other": random_bits(8)})
    for change in ({"scale": 3.0}, {"scale": 4.0}):
        before = callers.states()
        assert callers.changed(before) == []
        vars(vector).update(change)
        assert callers.changed(before) == [0]


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_views_of_a_dict_show_its_later_changes(kind: type) -> None:
    """Seen failing: they were copies of what the dict had."""
    given = kind(a=1.0)
    found, views = loaded(shipped([given, [given.keys(), given.values(), given.items(), MappingProxyType(given)]]))
    found["b"] = 2.0
    assert [list(view) for view in views] == [["a", "b"], [1.0, 2.0], [("a", 1.0), ("b", 2.0)], ["a", "b"]]


SCALE = 4.0


def test_globals_that_code_looks_up_by_name_are_sent() -> None:
    """Seen failing: `globals().get("SCALE", 1.0)` was 1.0 in a trace."""

    def body(model: Any) -> Any:
        def inner() -> Any:
            return globals()["SCALE"]

        return globals().get("SCALE", 1.0), "SCALE" in globals(), "nothing" in globals(), inner()

    code = ship([[FunctionProgram(body)]], elsewhere=True)
    program = unship(code.programs, id)[0][0]
    assert isinstance(program, FunctionProgram) and program.fn(None) == (4.0, True, False, 4.0)


def test_functions_with_caches_and_of_several_types_are_sent() -> None:
    """Seen failing: neither could be pickled."""
    fibonacci.cache_clear()
    for fn in in_this_process():
        called, _, size, kind = fn(None)
        assert called == (6765, ["int", ["other"]], 3, 3, 8, 1) and size == 7 and kind == "int"
    assert fibonacci.cache_info().currsize == 0


def test_code_that_is_loaded_where_it_was_made_changes_no_class_of_the_callers() -> None:
    """Seen failing: cloudpickle put the copied methods and attributes into the caller's class."""
    methods, seen = dict(vars(Counter)), Counter.seen
    for fn in in_this_process():
        called, (counter, pair), *_ = fn(None)
        assert called[-1] == 1 and type(counter).seen == [3]
        assert pair.other.value is Color.RED and not hasattr(pair.other, "__dict__")
    assert dict(vars(Counter)) == methods and Counter.seen is seen and not seen and Counter.total == 0


# What workers hold.


class Workers:
    """They do as they are told, after a while or never."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.fails = self.waits = False

    async def tell(self, kept: Sequence[str], new: Mapping[str, bytes]) -> None:
        if self.fails:
            raise RuntimeError
        assert not new.keys() & self.held.keys(), "sent again"
        self.held = {digest: self.held[digest] for digest in kept} | dict(new)
        if self.waits:
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    @property
    def size(self) -> int:
        return sum(map(len, self.held.values()))


def weight(name: str, size: int) -> dict[str, Weight]:
    return {name: Weight(bytes(size), name)}


def test_the_least_recently_used_weights_are_dropped() -> None:
    async def main() -> None:
        workers = Workers()
        weights = HeldWeights(10, workers.tell)
        for name, held in (("a", "a"), ("b", "ab"), ("a", "ab"), ("c", "ac"), ("b", "bc"), ("b", "bc")):
            async with weights.used(weight(name, 5)):
                assert name in workers.held
            assert set(workers.held) == set(held)
        assert weights.sent_bytes == 20
        async with weights.used(weight("large", 25)):
            assert [*workers.held] == ["large"]
        assert workers.held == {}
        async with weights.used(weight("a", 6)), weights.used(weight("b", 6)):  # neither can go
            assert [*workers.held] == ["a", "b"]
        assert len(workers.held) == 1 and weights.in_use == 0

    asyncio.run(main())


def test_forgotten_weights_go_within_the_budget_once_no_request_uses_them() -> None:
    async def main() -> None:
        workers = Workers()
        weights = HeldWeights(100, workers.tell)
        for name in "abc":
            async with weights.used(weight(name, 5)):
                pass
        await weights.forget(["a", "never held"])
        assert [*workers.held] == ["b", "c"]
        async with weights.used(weight("b", 5)):
            await weights.forget(["b"])
            assert [*workers.held] == ["b", "c"]
        assert [*workers.held] == ["c"]
        async with weights.used(weight("c", 5)):
            await weights.forget(["c"])
            async with weights.used(weight("c", 5)):  # somebody wants it again
                pass
        assert [*workers.held] == ["c"] and not weights._unwanted

    asyncio.run(main())


def test_no_weight_in_use_is_dropped_whoever_uses_others() -> None:
    """Seen failing without the counts of uses, and without the lock around a change."""

    async def user(weights: HeldWeights, workers: Workers, rng: random.Random) -> None:
        for _ in range(40):
            own = {k: v for name in rng.sample("abcdef", rng.randint(1, 3)) for k, v in weight(name, 4).items()}
            async with weights.used(own):
                for _ in range(rng.randint(0, 4)):
                    assert own.keys() <= workers.held.keys()
                    await asyncio.sleep(0)
                assert own.keys() <= workers.held.keys()

    async def main() -> None:
        workers, rng = Workers(), random.Random(0)
        workers.waits = True
        weights = HeldWeights(10, workers.tell)
        await asyncio.gather(*(user(weights, workers, rng) for _ in range(5)))
        assert weights.in_use == 0 and workers.size <= 10

    asyncio.run(main())


def test_an_interrupted_change_is_made_good_by_the_next() -> None:
    """Seen failing with a weight noted as held before the workers have answered."""

    async def use(weights: HeldWeights, name: str) -> None:
        async with weights.used(weight(name, 5)):
            pass

    async def main() -> None:
        workers = Workers()
        weights = HeldWeights(10, workers.tell)
        await use(weights, "a")
        workers.waits = True
        task = asyncio.create_task(use(weights, "b"))
        await asyncio.sleep(0)
        task.cancel()  # the workers have "b"
        with pytest.raises(asyncio.CancelledError):
            await task
        workers.waits, workers.fails = False, True
        with pytest.raises(RuntimeError):
            await use(weights, "c")
        workers.fails = False
        await use(weights, "d")
        assert set(workers.held) <= {"a", "d"} and "d" in workers.held
        assert weights.in_use == 0

    asyncio.run(main())
