"""Bodies in turns with the forward of a toy model, without an engine: who is resumed when, and in what order. Rows C4, C14, D7, F1."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch_settings import default_dtype

from midstream.errors import OutOfOrderError
from midstream.trace.batch_rows import FlatRows
from midstream.trace.body import Body, Modes, Randomness
from midstream.trace.code import FunctionProgram
from midstream.trace.envoy import Envoy
from midstream.trace.interleaver import Interleaver
from midstream.trace.tracer import Barrier


class Toy(nn.Module):
    """Three layers; a batch of `[rows, 4]`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Steps:
    """The toy's forward passes, each with two rows of some bodies."""

    def __init__(self) -> None:
        self.model = Toy()
        order = {
            (f"layers.{i}", kind): (2 * i + end,) * 2 for i in range(3) for end, kind in enumerate(("input", "output"))
        }
        self.interleaver = Interleaver(self.model, {("", "input"): (-1, -1), **order, ("", "output"): (9, 9)})

    def add(self, name: str, fn: Callable[..., Any]) -> Body:
        envoy = Envoy(self.model, "", self.interleaver)
        body = Body(name, functools.partial(FunctionProgram(fn).run, envoy, {}), in_engine=True)
        self.interleaver.add(body)
        return body

    @torch.inference_mode()
    def step(self, *names: str) -> None:
        total = 2 * len(names)
        self.interleaver.begin_step({name: FlatRows(2 * i, 2 * i + 2, total) for i, name in enumerate(names)})
        self.model(torch.ones(total, 4))
        self.interleaver.end_step()


@pytest.fixture
def steps() -> Steps:
    return Steps()


def test_a_barrier_that_opens_while_a_party_is_preempted_opens_for_it_when_it_is_back(steps: Steps) -> None:
    barrier = Barrier(2)

    def first(model: Any, tracer: Any) -> Any:
        model.layers[0].output
        barrier()
        tracer.next()
        return model.layers[2].output

    def second(model: Any, tracer: Any) -> Any:
        tracer.next()
        barrier()
        return model.layers[2].output

    one, two = steps.add("one", first), steps.add("two", second)
    steps.step("one", "two")
    steps.step("two")  # the other one is preempted, and its rows are not in the batch
    assert two.done and not one.done
    steps.step("one")
    for body in (one, two):
        assert body.done and body.failure is None and body.result.values["return"].shape == (2, 4)


@pytest.mark.parametrize("preempted", [False, True])
def test_what_a_barrier_frees_too_late_is_out_of_order(steps: Steps, preempted: bool) -> None:
    barrier = Barrier(2)

    def first(model: Any) -> Any:
        barrier()
        return model.layers[2].output  # of its first step, which is over when the other one comes

    def second(model: Any, tracer: Any) -> None:
        tracer.next()
        barrier()

    one, _ = steps.add("one", first), steps.add("two", second)
    steps.step("one", "two")
    steps.step(*(["two"] if preempted else ["one", "two"]))
    steps.step("one")
    assert isinstance(one.failure, OutOfOrderError)


def test_a_step_that_is_broken_off_leaves_no_skip_behind(steps: Steps) -> None:
    steps.add("one", lambda model: model.layers[1].skip(torch.zeros(2, 4)))
    steps.model.layers[1].forward = lambda x: 1 / 0  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        steps.step("one")
    del steps.model.layers[1].forward
    steps.interleaver.discard("one")
    other = steps.add("one", lambda model: model.layers[1].output)
    steps.step("one")
    assert other.result.values["return"].abs().sum() > 0


@pytest.mark.parametrize("end", ["it runs on", "it is dropped"])
def test_what_a_body_seeds_and_puts_back_is_its_own(steps: Steps, end: str) -> None:
    """Seen failing where a body was dropped: what it put back as it unwound was what the engine's sampler went on with."""

    def seeds(model: Any, tracer: Any) -> Any:
        torch.manual_seed(1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            tracer.next()
            return model.layers[2].output

    body = steps.add("one", seeds)
    body.random = Randomness("one", torch.device("cpu"))
    torch.manual_seed(5)
    expected = torch.rand(3, generator=torch.Generator().manual_seed(5))
    for _ in range(2 if end == "it runs on" else 1):
        steps.step("one")
    assert body.done == (end == "it runs on")
    steps.interleaver.discard("one")
    assert torch.equal(torch.rand(3), expected)


def test_a_default_dtype_that_a_body_sets_is_its_own(steps: Steps) -> None:
    """Seen failing: the traces of all users that came later had float64, too."""
    forward = []

    def sets(model: Any, tracer: Any) -> Any:
        torch.set_default_dtype(torch.float64)
        first = torch.zeros(1)
        tracer.next()
        return first, torch.zeros(1)

    def other(model: Any) -> Any:
        return model.layers[1].output, torch.zeros(1)

    layer = steps.model.layers[0]
    layer.register_forward_hook(lambda *_: forward.append(torch.get_default_dtype()))
    one, two = steps.add("one", sets), steps.add("two", other)
    steps.step("one", "two")
    steps.step("one")
    assert [each.dtype for each in one.result.values["return"]] == [torch.float64] * 2
    assert two.result.values["return"][1].dtype == torch.float32
    assert {*forward, torch.get_default_dtype()} == {torch.float32}


def test_a_tensor_with_gradients_that_the_body_made_comes_back(steps: Steps) -> None:
    """Seen failing in an engine's forward: inference tensors have no version."""

    def makes(model: Any) -> Any:
        model.layers[1].output
        return torch.nn.Parameter(torch.ones(2))

    body = steps.add("one", makes)
    steps.step("one")
    assert body.failure is None and torch.equal(body.result.values["return"], torch.ones(2))


@pytest.mark.parametrize(
    "mode",
    [
        contextlib.nullcontext,
        torch.enable_grad,
        functools.partial(torch.inference_mode, False),
        functools.partial(torch.autocast, "cpu", torch.bfloat16),
        functools.partial(torch.device, "meta"),
        functools.partial(default_dtype, torch.float64),
    ],
)
@pytest.mark.parametrize("end", ["dropped", "failed", "gone on with"])
def test_a_body_that_is_ended_outside_of_the_forward_leaves_the_modes_there(
    steps: Steps, mode: Callable[[], Any], end: str
) -> None:
    """Seen failing: gradients were off for whatever its thread did next."""

    def parks(model: Any, tracer: Any) -> None:
        with mode():
            tracer.next()

    body = steps.add("one", parks)
    steps.step("one")
    before = Modes.now()
    if end == "dropped":
        steps.interleaver.discard("one")
    elif end == "failed":
        body.fail(RuntimeError("its request has failed"))
    else:
        body.resume(True)
    assert body.done and Modes.now() == before


def test_autocast_of_one_part_of_the_forward_stays_there(steps: Steps) -> None:
    """A body that takes it off where it is on, and goes on where it is not. Seen failing: it was on for the rest of the forward."""
    inside, forward = [], steps.model.layers[0].forward

    def cast(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = steps.model.layers[1](forward(x))
            inside.append(torch.is_autocast_enabled("cpu"))
        return x.float()

    steps.model.layers[0].forward = cast  # type: ignore[assignment]

    def body(model: Any) -> Any:
        model.layers[1].output
        with torch.autocast("cpu", enabled=False):
            model.layers[2].input
        return model.layers[2].output.dtype

    one = steps.add("one", body)
    before = Modes.now()
    steps.interleaver.begin_step({"one": FlatRows(0, 2, 2)})
    steps.model(torch.ones(2, 4))
    steps.interleaver.end_step()
    assert one.done and one.result.values["return"] == torch.float32 and inside == [True] and Modes.now() == before


def test_requests_that_end_together_end_in_one_order_on_all_ranks() -> None:
    """Their bodies' last words may be collective, and two processes need not list a set of strings alike."""
    pytest.importorskip("vllm")
    from midstream.runtime.sending import Reports
    from midstream.runtime.trace_host import TraceHost

    names = [f"request-{number}" for number in range(12)]
    host = TraceHost.__new__(TraceHost)
    host._requests, host._graph_keys = {name: SimpleNamespace(is_done=True, seen=0) for name in names}, {}
    host.traced_steps = host.forward_traced_steps = host.uncompiled_steps = 0
    ended: list[str] = []
    host._end = lambda name: ended.append(name)  # type: ignore[method-assign,assignment]
    host.reports = Reports()
    host._end_what_is_over = lambda scheduled: None  # type: ignore[method-assign]
    host.schedule({}, (), set(names))
    assert ended == names
