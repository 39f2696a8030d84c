"""Row F8, without an engine: what is taken out of a trace's code, what it becomes in the worker, and what the workers are told to hold."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from midstream.client.vectors_and_runs import HeldWeights
from midstream.errors import TraceError
from midstream.trace.program import FunctionProgram, ShippedCode, ship, unship
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
def test_f8_tensors_of_all_kinds_arrive_as_they_are(make: Callable[[], torch.Tensor]) -> None:
    with torch.no_grad():
        tensor = make()
    for elsewhere in (False, True):
        code = shipped({"first": tensor, "again": tensor}, elsewhere)
        there = loaded(code)
        assert torch.equal(there["first"], tensor) and there["first"].dtype == tensor.dtype
        assert there["again"] is there["first"]
        assert not (elsewhere and code.weights)  # a server gets tensors with the code
        assert not there["first"].is_inference()


def test_f8_a_small_part_of_a_large_storage_does_not_take_the_rest_along() -> None:
    large = random_bits(1000, 1000)
    for part, most in ((large[3], 4_000), (large[:, :3], 12_000), (large[::100, ::100], 400)):
        code = shipped(part)
        assert sent(code) == 0 and len(code.programs) < most + 2_000
        assert torch.equal(loaded(code), part)
    code = shipped((large[0], large[999]))
    assert sent(code) == 0 and len(code.programs) < 10_000


def test_f8_tensors_of_one_storage_share_it_in_the_worker() -> None:
    """Seen failing with each tensor in a part of its own."""
    both = random_bits(512, 256)
    code = shipped({"encoder": both[:256], "decoder": both.T, "row": both[3], "bits": both.view(torch.int32)})
    assert sent(code) == both.nbytes
    there = loaded(code)
    there["row"].fill_(7.0)
    assert (there["encoder"][3] == 7.0).all() and (there["decoder"][:, 3] == 7.0).all()
    assert torch.equal(there["bits"].view(torch.float32), there["decoder"].T)
    assert there["decoder"].stride() == both.T.stride()


def test_f8_what_a_body_writes_no_other_body_sees() -> None:
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
def test_f8_a_change_on_the_client_is_seen(change: Callable[[nn.Parameter], Any]) -> None:
    """Seen failing with `_version` in place of the comparison, and without any."""
    weight = nn.Parameter(random_bits(300, 301))
    before, was = shipped(weight), weight.detach().clone()
    assert shipped(weight).weights == before.weights
    change(weight)
    after = shipped(weight)
    assert after.weights.keys() != before.weights.keys()
    assert torch.equal(loaded(after), weight) and torch.equal(loaded(before), was)


def test_f8_equal_content_is_one_weight() -> None:
    tensor = random_bits(300, 301)
    first, second = shipped(tensor), shipped([tensor.clone(), tensor])
    assert [*first.weights.values()] == [*second.weights.values()]


def test_f8_tensors_are_on_the_models_device_wherever_the_worker_holds_them() -> None:
    code = shipped(random_bits(300, 301))
    ((program,),) = unship(code.programs, id, torch.device("meta"), stored(code))
    assert isinstance(program, FunctionProgram) and program.fn(None).is_meta


def test_f8_a_weight_that_is_missing_is_an_error() -> None:
    with pytest.raises(TraceError, match="Run the trace again"):
        loaded(shipped(random_bits(LARGE)), {})


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


def test_f8_the_least_recently_used_weights_are_dropped() -> None:
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


def test_f8_no_weight_in_use_is_dropped_whoever_uses_others() -> None:
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


def test_f8_an_interrupted_change_is_made_good_by_the_next() -> None:
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
