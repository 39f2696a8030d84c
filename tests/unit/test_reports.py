"""The results of the traces that end in one step go to the client together, unless one could harm another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from midstream.errors import UnsendableError
from midstream.runtime.request import TraceRequest
from midstream.runtime.sending import _SMALL_BYTES, _TOGETHER_BYTES, Reports
from midstream.trace.code import Failure, Outcome
from midstream.transport.receiver import Mailbox, Receiver
from midstream.transport.sender import Sender

WAIT = 60


class Channel:
    """Reports with a real channel to a client."""

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self.reports = Reports()
        self.reports.sender = self.sender = Sender(receiver.address)
        self._boxes: list[Mailbox] = []

    def send(self, outcome: Outcome, **changed: Any) -> None:
        trace = replace(TraceRequest("trace", len(self._boxes), 100, 1, False, None), **changed)
        self._boxes.append(self.receiver.expect((trace.trace, trace.index)))
        self.reports.send(f"request {trace.index}", trace, [outcome])

    @property
    def messages(self) -> int:
        return int(self.sender.stats["messages"])

    def received(self) -> list[tuple[str, Any]]:
        """The request and the saved value of each."""
        found = [box.get(WAIT) for box in self._boxes]
        return [(header.request, value if isinstance(value, UnsendableError) else value[0]) for header, value in found]


@pytest.fixture
def channel() -> Iterator[Channel]:
    with Receiver() as receiver:
        channel = Channel(receiver)
        yield channel
        channel.sender.close()


def saved(value: Any) -> Outcome:
    return Outcome({"value": value})


def rebuilt_badly() -> Any:
    raise RuntimeError("this value cannot be rebuilt")


class Breaks:
    """As a value of a class that the client does not have."""

    def __reduce__(self) -> Any:
        return rebuilt_badly, ()


def cycle() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


def shared_often() -> list[Any]:
    """A list with 100 million places, of a few hundred entries."""
    found: list[Any] = [0] * 100
    for _ in range(3):
        found = [found] * 100
    return found


def test_small_results_of_a_step_are_one_message(channel: Channel) -> None:
    """Each message costs both processes about what a small model's step takes. Seen failing with a message for each."""
    values = [torch.full((3, 4), float(i)) for i in range(64)]
    for value in values:
        channel.send(saved([value, {"step": 1}, "text", None]))
    assert channel.messages == 0
    channel.reports.flush()
    assert channel.messages == 1
    for i, (name, outcome) in enumerate(channel.received()):
        tensor, *others = outcome.values["value"]
        assert name == f"request {i}" and torch.equal(tensor, values[i]) and others == [{"step": 1}, "text", None]


@pytest.mark.parametrize(
    ("outcome", "messages"),
    [
        (saved(Breaks()), 1),
        (saved([{"deep": (Breaks(),)}]), 1),
        (saved({Breaks(): 1}), 1),
        (saved(cycle()), 1),
        (saved(torch.nn.Parameter(torch.ones(2))), 1),
        (saved(torch.ones(2).to_sparse()), 1),
        (saved([shared_often()]), 1),
        (saved(torch.zeros(2, 3).T), 1),
        (saved(torch.zeros(_SMALL_BYTES, dtype=torch.uint8)), 2),
        (saved([float(number) for number in range(1_000_000)]), 2),
        (saved(10**3_000_000), 2),
        (Outcome(failure=Failure.of(ValueError("mine"))), 2),
    ],
    ids=[
        "class",
        "class within",
        "class as key",
        "cycle",
        "parameter",
        "sparse",
        "shared",
        "transposed",
        "large",
        "floats",
        "number",
        "failure",
    ],
)
def test_a_result_harms_no_other(channel: Channel, outcome: Outcome, messages: int) -> None:
    """A value that the client cannot rebuild takes no neighbour's result with it. A large one goes alone: others would keep its memory."""
    channel.send(saved(torch.ones(2)))
    channel.send(outcome)
    channel.send(saved(torch.ones(3)))
    channel.reports.flush()
    (_, first), (name, _), (_, last) = channel.received()
    assert channel.messages == messages and name == "request 1"
    assert torch.equal(first.values["value"], torch.ones(2)) and torch.equal(last.values["value"], torch.ones(3))


@pytest.mark.parametrize("changed", [{"stream": True}, {"together": True}])
def test_results_whose_order_matters_are_sent_at_once(channel: Channel, changed: dict[str, bool]) -> None:
    """A stream's come after its earlier ones; invokes that share variables may change them before the step is over."""
    channel.send(saved(1), **changed)
    assert channel.messages == 1


def test_a_result_that_waits_stays_as_it_was(channel: Channel) -> None:
    """Invokes of a trace may share a list, and the code of the second may run after the first has ended. Seen failing without a copy."""
    found: list[Any] = [1]
    channel.send(saved(found))
    found.append(Breaks())
    channel.send(saved(torch.ones(2)))
    channel.reports.flush()
    (_, first), (_, second) = channel.received()
    assert first.values["value"] == [1] and torch.equal(second.values["value"], torch.ones(2))


def test_requests_that_save_the_same_tensor_get_a_tensor_each(channel: Channel) -> None:
    """Seen failing without the check: a change of one result changed the other."""
    shared = torch.zeros(2)
    channel.send(saved(shared))
    channel.send(saved(shared))
    channel.reports.flush()
    (_, first), (_, second) = channel.received()
    first.values["value"] += 1
    assert second.values["value"].tolist() == [0, 0]


def test_results_that_wait_together_have_a_bound(channel: Channel) -> None:
    """Whoever keeps one of them keeps the memory of all."""
    most = _TOGETHER_BYTES // (_SMALL_BYTES // 2)
    for number in range(most + 1):
        assert channel.messages == 0, number
        channel.send(saved(torch.zeros(_SMALL_BYTES // 2, dtype=torch.uint8)))
        if channel.messages:
            break
    assert channel.messages == 1 and number >= most - 1
