"""What a trace has left in the caller's objects, put back from data that may be hostile, partial or from several stages."""

from __future__ import annotations

from collections import defaultdict, deque
from types import ModuleType
from typing import Any

import pytest
import torch

from midstream.errors import ChannelError, UnsendableError
from midstream.ranks.merge import Absent, merged_outcomes
from midstream.trace.code import LEFT, Outcome
from midstream.trace.containers import Callers, _copied, _Writer, put_back
from midstream.transport.data import MessageReader, message_chunks, pack_data


class Box:
    """An object of the caller's."""

    last = None

    @property
    def watched(self) -> int:
        return 0

    @watched.setter
    def watched(self, value: Any) -> None:
        raise AssertionError("ran the caller's code")


class Key:
    """A key whose hash can be made to fail."""

    is_broken = False

    def __hash__(self) -> int:
        if self.is_broken:
            raise RuntimeError("no hash")
        return 1


LIST, DICT, BOX, CLASS, FUNCTION, DEFAULT, MODULE = range(7)


@pytest.fixture
def callers() -> Callers:
    """Objects of all kinds, numbered as above."""
    module = ModuleType("callers_module")
    vars(module).update(__file__="/callers/module.py", n=1)
    box: Any = Box()
    box.rows = 1
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec("n = 0\nlater = 0\ndef use():\n    return n, print\n", scope)
    found = Callers({})
    found.objects = [[1], {"a": 1}, box, Box, scope["use"], defaultdict(list), module]
    found.names = [str(i) for i in range(7)]
    return found


def entry(items: Any = None, attributes: Any = None, gone: Any = (), name: str = "", kind: Any = None) -> Any:
    return name, kind, items, attributes or {}, [*gone]


HOSTILE: dict[str, Any] = {
    "a builtin function": {BOX: entry(attributes={"postprocess": ("class", "eval")})},
    "a builtin factory": {DEFAULT: entry(attributes={"default_factory": ("class", "eval")})},
    "an exception as a factory": {DEFAULT: entry(attributes={"default_factory": ("class", "SystemExit")})},
    "a class where none is meant": {BOX: entry(attributes={"rows": ("class", "list")})},
    "a class among items": {LIST: entry([("class", "list")])},
    "a dunder": {BOX: entry(attributes={"__class__": 1})},
    "a dunder of a class": {CLASS: entry(attributes={"__init__": 1})},
    "a new attribute of a class": {CLASS: entry(attributes={"__call__x": 1})},
    "a method of a class": {CLASS: entry(attributes={"watched_": 1})},
    "a new attribute of a function": {FUNCTION: entry(attributes={"later": 1})},
    "a builtin that a function uses": {FUNCTION: entry(attributes={"print": 1})},
    "a new variable of a module": {MODULE: entry(attributes={"os": 1})},
    "an attribute of a list": {LIST: entry(attributes={"x": 1})},
    "a deleted attribute": {BOX: entry(gone=["last"])},
    "a deleted dunder": {BOX: entry(gone=["__dict__"])},
    "a number that is a text": {"0": entry([1])},
    "a number below zero": {-1: entry([1])},
    "a bool as a number": {True: entry({})},
    "a reference to nothing": {LIST: entry([("=", 99)])},
    "a reference below zero": {LIST: entry([("=", -1)])},
    "an unknown code": {LIST: entry([("?", 1)])},
    "an empty code": {LIST: entry([()])},
    "a tensor as a code": {LIST: entry([(torch.ones(2), 1)])},
    "items of another kind": {LIST: entry({"a": 1})},
    "items of an object": {BOX: entry([1])},
    "a list as a key": {DICT: entry({("=", LIST): 1})},
    "a list in a key": {DICT: entry({("()", None, (("=", LIST),)): 1})},
    "a list as an item of a frozenset": {LIST: entry([("{}", None, frozenset({("=", LIST)}))])},
    "a new object of no kind": {50: entry([])},
    "a new object of an unknown kind": {50: entry([], name="bytearray")},
    "an attribute of a new list": {50: entry([], {"x": 1}, name="list")},
    "a deque of no length": {50: entry([], {"maxlen": -1}, name="deque")},
    "a short entry": {LIST: ("", None)},
    "no entry": {LIST: None},
    "names that are no texts": {BOX: entry(attributes={1: 2})},
}


def received(value: Any) -> Any:
    """The value as a client gets it from a server."""
    (found,) = MessageReader().feed(b"".join(message_chunks(pack_data(value))))
    return found


@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_hostile_server_makes_up_is_refused_and_changes_nothing(callers, name):
    before = callers.states()
    heap = {**HOSTILE[name]}
    with pytest.raises(ChannelError, match="malformed"):
        put_back(received((heap, {})), callers)
    assert not callers.changed(before) and callers.objects[LIST] == [1]


@pytest.mark.parametrize("left", [None, 5, (), ({},), ({}, {}, {}), ([], {}), ({}, {1: 2}), ({}, {"a": ("=", 99)})])
def test_data_of_another_form_is_refused(callers, left):
    with pytest.raises(ChannelError, match="malformed"):
        put_back(left, callers)


def test_what_a_server_may_send_comes_back(callers):
    mine = callers.objects
    heap = {
        LIST: entry([("=", 50), ("=", BOX)]),
        DICT: entry({("()", None, (1, "b")): ("=", LIST)}),
        BOX: entry(attributes={"rows": ("=", 51), "new": 2, "watched": 7}),
        CLASS: entry(attributes={"last": 3}),
        FUNCTION: entry(attributes={"n": 4}),
        DEFAULT: entry({1: ("=", 52)}, {"default_factory": ("class", "set")}),
        MODULE: entry(attributes={"n": 5}),
        50: entry([1, 2, 3], {"maxlen": 2}, name="deque"),
        51: entry({}, {"default_factory": ("class", "int")}, name="defaultdict"),
        52: entry([5], name="list"),
    }
    assert put_back(received((heap, {"got": ("=", 50)})), callers) == {"got": deque([2, 3])}
    assert (
        mine[LIST][0] == deque([2, 3], maxlen=2) and mine[LIST][1] is mine[BOX] and mine[DICT] == {(1, "b"): mine[LIST]}
    )
    assert mine[BOX].rows == defaultdict(int) and mine[BOX].rows.default_factory is int and mine[BOX].new == 2
    assert vars(mine[BOX])["watched"] == 7 and Box.last == 3 and mine[FUNCTION].__globals__["n"] == 4
    assert mine[DEFAULT] == {1: [5]} and mine[DEFAULT].default_factory is set and mine[MODULE].n == 5
    Box.last = None


def test_a_class_that_a_server_does_not_send_costs_only_its_object(callers):
    """Seen failing with TypeError, so that no saved value came back."""
    error = UnsendableError("Point", "no classes")
    heap = {
        LIST: entry([("()", error, (5, 1)), 6, ("=", 50)]),
        50: entry([1], {"name": 2}, kind=error),
    }
    assert put_back(received((heap, {"got": ("=", LIST)})), callers)["got"] is callers.objects[LIST]
    first, second, third = callers.objects[LIST]
    assert second == 6 and isinstance(first, UnsendableError) and isinstance(third, UnsendableError)


@pytest.mark.parametrize("make", [dict, set])
def test_a_key_without_a_hash_leaves_the_container_full(make):
    key = Key()
    there = make([("a", 1)])
    before = make(there)
    found = Callers({})
    found.objects, found.names = [there, key], ["there", "key"]
    key.is_broken = True
    items = {("=", 1): 1} if make is dict else {("=", 1)}
    with pytest.raises(RuntimeError, match="no hash"):
        put_back(({0: entry(items)}, {}), found)
    assert there == before


# Pipeline stages.


def outcome(build: Any, steps: int) -> Outcome:
    """The outcome of a stage on which the caller's list and dict have this content."""
    own: list[Any] = [[], {}]
    build(*own)
    writer = _Writer({id(each): i for i, each in enumerate(own)}, 2)
    for i, each in enumerate(own):
        writer.write(i, each, {})
    writer.finish()
    return Outcome({LEFT: (writer.heap, {})}, steps=steps)


def test_new_objects_of_stages_that_are_a_step_apart_are_not_mixed_up():
    """Seen failing: the number of the dict's new object was that of the list's second one on the stage that was ahead."""

    def stage(steps: int, first: Any, last: Any) -> Any:
        def build(rows: Any, by_name: Any) -> None:
            rows += [{"h": first, "step": i} for i in range(steps)]
            by_name["end"] = {"logits": last, "inner": [{"deep": first}]}

        return outcome(build, steps)

    ahead, judge = stage(2, 1.5, Absent("logits")), stage(1, Absent("layers.0"), 2.5)
    (merged,) = merged_outcomes([[ahead], [judge]])
    rows, by_name = [], {}
    found = Callers({})
    found.objects, found.names = [rows, by_name], ["rows", "by_name"]
    put_back(merged.values[LEFT], found)
    assert rows == [{"h": 1.5, "step": 0}] and by_name == {"end": {"logits": 2.5, "inner": [{"deep": 1.5}]}}


# Changes of objects of Python's library.


def test_a_copy_of_a_state_stays_as_it_was():
    live = {"a": [1, (2, {3})]}
    copied = _copied(live)
    live["a"][1][1].add(4)
    assert copied != _copied(live) and copied == _copied({"a": [1, (2, {3})]})


def test_an_error_that_got_an_attribute_has_changed():
    error = ValueError("a")
    error.args = ("a", 1)
    error.code = 1  # type: ignore[attr-defined]
    found = Callers({"error": error})
    before = found.states()
    assert not found.changed(before)
    error.code = 2  # type: ignore[attr-defined]
    assert found.changed(before) == [0]
