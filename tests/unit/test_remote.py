"""Values of another pipeline stage, without an engine: what fetches them, and what does not (requirement C2)."""

from __future__ import annotations

import copy
import pickle
from collections import Counter, OrderedDict, defaultdict
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from midstream.errors import TraceError
from midstream.trace.parallel import Origin, StageValue, real
from midstream.tree import leaves, map_tensors


class Body:
    """Has the values that a stage would send, and counts how often it is asked."""

    def __init__(self, *values: Any) -> None:
        self.values, self.fetches = values, 0

    def fetch(self, place: Origin) -> Any:
        self.fetches += 1
        value = self.values[place.number]
        for step in place.ref:
            value = value[step]
        return copy.deepcopy(value)


def remote(value: Any, width: int | None = None) -> tuple[StageValue, Body]:
    body = Body(value)
    return StageValue(
        Origin("a", 0, 1, 0, ("model.layers.5", "output"), "model.layers.5.output", body.fetch, width)
    ), body


T = torch.arange(6.0).reshape(2, 3)

USES = {
    "add": (lambda x: x + 1, T + 1),
    "reflected": (lambda x: 1 - x, 1 - T),
    "tensor first": (lambda x: torch.ones(2, 3) * x, T),
    "tensor times": (lambda x: T @ x.T, T @ T.T),
    "power": (lambda x: x**2, T**2),
    "negative": (lambda x: -x, -T),
    "comparison": (lambda x: x > 2, T > 2),
    "equality": (lambda x: x == T, T == T),
    "index": (lambda x: x[0, 1], T[0, 1]),
    "slice": (lambda x: x[1:], T[1:]),
    "as an index": (lambda x: torch.arange(9)[real(x).long()], torch.arange(9)[T.long()]),
    "method": (lambda x: x.mean(0), T.mean(0)),
    "attribute": (lambda x: x.shape, T.shape),
    "function": (lambda x: torch.softmax(x, -1), torch.softmax(T, -1)),
    "in a list": (lambda x: torch.stack([x, T]), torch.stack([T, T])),
    "in place of a tensor": (lambda x: torch.where(T > 1, x, -x), torch.where(T > 1, T, -T)),
    "tolist": (lambda x: x.tolist(), T.tolist()),
    "iteration": (lambda x: [row.sum().item() for row in x], [3.0, 12.0]),
    "unpacking": (lambda x: (lambda a, b: b)(*x), T[1]),
    "tuple": (lambda x: tuple(x[1:]), (T[1],)),
    "length": (len, 2),
    "item": (lambda x: x[1, 2].item(), 5.0),
    "float": (lambda x: float(x[1, 2]), 5.0),
    "numpy": (lambda x: torch.from_numpy(__import__("numpy").asarray(x)), T),
}


@pytest.mark.parametrize("use", USES)
def test_real_use_fetches_once(use: str) -> None:
    value, body = remote(T.clone())
    function, expected = USES[use]
    found = function(value)
    assert body.fetches == 1
    function(value)
    assert body.fetches == 1
    assert torch.equal(found, expected) if isinstance(expected, torch.Tensor) else str(found) == str(expected)


def test_truth_and_numbers() -> None:
    value, _ = remote(torch.tensor(3))
    assert value and int(value) == 3 and [10, 11, 12, 13][value] == 13 and f"{value:d}" == "3" and list(range(value))
    assert not remote(torch.tensor(0))[0]


def test_passing_around_fetches_nothing() -> None:
    value, body = remote(T)
    held = {value: "by identity", "list": [value], "copy": copy.copy(value)}
    assert held[value] == "by identity" and hash(value) == id(value) and value is copy.copy(value)
    repr(value), str(value), isinstance(value, torch.Tensor), list(leaves([value]))
    assert map_tensors((value,), lambda _, t: t)[0] is value
    pickle.loads(pickle.dumps([value]))
    assert body.fetches == 0


def test_writing_fetches_nothing_and_is_seen_by_a_later_use() -> None:
    """The stage that has the value makes the same edits; here they are made when the value comes to be used."""
    value, body = remote(T.clone())
    before, vector = value, torch.ones(3)
    value += vector
    vector.zero_()  # what was added is what it was then
    value[0] = 7.0
    value.mul_(2)
    value *= 1
    assert value is before and body.fetches == 0
    expected = T + 1
    expected[0] = 7.0
    assert torch.equal(value + 0, expected * 2) and body.fetches == 1
    value -= 1
    assert torch.equal(value + 0, expected * 2 - 1)


def test_a_tuples_parts_stay_remote_until_they_are_used() -> None:
    value, body = remote((T, T * 2), width=2)
    assert not hasattr(value, "_fields") and not hasattr(value, "_make")  # it is no named tuple
    hidden, residual = value
    assert isinstance(value, tuple) and not isinstance(hidden, tuple)
    assert isinstance(value[1], StageValue) and len(value) == 2 and isinstance(value[-1], StageValue)
    assert body.fetches == 0
    assert torch.equal(hidden + residual, T * 3) and body.fetches == 2
    assert torch.equal(value[-1] + 0, T * 2)
    with pytest.raises(IndexError, match="tuple of 2"):
        value[2]


def test_a_tensors_method_on_a_tuple_says_what_to_do() -> None:
    value, _ = remote((T, T), width=2)
    with pytest.raises(TraceError, match=r"index first, as in `model.layers.5.output\[0\].mean`"):
        value.mean(0)


def test_real_looks_into_containers() -> None:
    value, _ = remote(T)
    found = real({"a": [value, 1], "b": (value,)})
    assert torch.equal(found["a"][0], T) and found["a"][1] == 1 and torch.equal(found["b"][0], T)


class Tagged(list):
    def __init__(self, items: Any = (), tag: str = "none") -> None:
        super().__init__(items)
        self.tag = tag

    def append(self, item: Any) -> None:
        raise AssertionError


class TaggedTuple(tuple):
    def __new__(cls, items: Any, tag: str = "none") -> Any:
        made = super().__new__(cls, items)
        made.tag = tag
        return made


class Slotted(list):
    __slots__ = ("tag",)


class Doubling(dict):
    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, [value, value])


class Pair(NamedTuple):
    a: Any
    b: int = 0


class Counting(Pair):
    def __new__(cls, a: Any, b: int = 0) -> Any:
        return super().__new__(cls, a, b + 1)


def test_mapping_tensors_keeps_containers_of_other_classes_as_they_are() -> None:
    """Seen failing: classes were called anew, so attributes were lost, and what their methods do was done twice."""
    slotted = Slotted([T])
    slotted.tag = "x"
    named = OrderedDict(b=T)
    named["a"] = 1
    given = [
        Tagged([T], tag="x"),
        TaggedTuple([T], tag="x"),
        slotted,
        Doubling(a=T),
        Counting(T, 5),
        defaultdict(list, a=T),
        named,
        T.max(0),
        torch.Size([1]),
        Pair(T),
    ]
    found = map_tensors(given, lambda _, t: t + 1)
    assert [type(each) for each in found] == [type(each) for each in given]
    tagged, in_tuple, in_slot, doubled, counted, factory, ordered, largest, size, pair = found
    assert tagged.tag == in_tuple.tag == in_slot.tag == "x" and counted.b == 6 and pair.b == 0 and size == (1,)
    assert factory["new"] == [] and list(ordered) == ["b", "a"] and torch.equal(largest.values, T.max(0).values + 1)
    each = [tagged[0], in_tuple[0], in_slot[0], doubled["a"], counted.a, factory["a"], ordered["b"], pair.a]
    assert all(torch.equal(one, T + 1) for one in each)
    with pytest.raises(TypeError, match="A mappingproxy cannot be made again"):
        map_tensors(MappingProxyType({"a": T}), lambda _, t: t)


def test_mapping_tensors_keeps_a_counter() -> None:
    found = map_tensors(Counter("aab"), lambda _, t: t)
    assert found == Counter("aab") and type(found) is Counter
