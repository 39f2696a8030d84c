"""Values as data (`transport.data`): what comes out is what went in, no code runs, and nothing but messages is taken."""

from __future__ import annotations

import struct
import time
from collections import OrderedDict, defaultdict, deque
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import examples

from midstream import errors
from midstream.errors import ChannelError, MidstreamError, UnsendableError
from midstream.transport.data import MessageReader, message_chunks, pack_data
from midstream.transport.messages import SentTensors

numbers = (
    st.none() | st.booleans() | st.integers(-(1 << 80), 1 << 80) | st.floats(allow_nan=False) | st.text(max_size=9)
)
leaves = numbers | st.binary(max_size=9) | st.complex_numbers(allow_nan=False)
values = st.recursive(
    leaves,
    lambda each: (
        st.lists(each, max_size=4)
        | st.lists(each, max_size=4).map(tuple)
        | st.lists(each, max_size=4).map(deque)
        | st.dictionaries(numbers, each, max_size=4)
        | st.frozensets(numbers, max_size=4)
        | st.sets(numbers, max_size=4)
    ),
    max_leaves=20,
)


def written(value: Any, stream: SentTensors) -> bytes:
    return b"".join(message_chunks(pack_data(value, stream)))


def through(*sent: Any, size: int = 1 << 20) -> list[Any]:
    stream, reader = SentTensors(), MessageReader()
    data = b"".join(written(value, stream) for value in sent)
    return [value for i in range(0, len(data), size) for value in reader.feed(data[i : i + size])]


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(values, min_size=1, max_size=3), st.integers(1, 50))
def test_any_structure_in_pieces_of_any_size(sent: list[Any], size: int) -> None:
    found = through(*sent, size=size)
    assert found == sent and [type(each) for each in found] == [type(each) for each in sent]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 5, 7)])
def test_tensors_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 9).to(dtype)
    for each in (tensor, tensor.mT if len(shape) > 1 else tensor):
        (found,) = through({"a": [each, each]}, size=13)
        assert found["a"][0] is found["a"][1]
        assert found["a"][0].dtype is dtype and torch.equal(found["a"][0], each)


def test_a_tensor_travels_once_unless_it_has_changed() -> None:
    large, stream, reader = torch.zeros(100_000), SentTensors(), MessageReader()
    sizes = []
    for i in range(3):
        data = written([large, i], stream)
        sizes.append(len(data))
        ((found, number),) = reader.feed(data)
        assert torch.equal(found, large) and number == i
        if i == 1:
            large += 1
    assert sizes[0] > 400_000 and sizes[1] < 200 and sizes[2] > 400_000


def test_many_messages_in_one_piece_are_read_in_one_pass() -> None:
    """Before, each copied the rest of the piece: 4 s for these."""
    sent = [["x" * 90, number] for number in range(30_000)]
    begin = time.process_time()
    assert through(*sent) == sent
    assert time.process_time() - begin < 2


def test_other_data() -> None:
    top = torch.randn(5).topk(2)
    kinds = [
        top,
        torch.float16,
        torch.device("cpu"),
        torch.Size([2, 3]),
        range(3),
        slice(1, None),
        np.arange(4.0),
        np.float64(2.5),
    ]
    found = through([*kinds, defaultdict(list, a=[1]), OrderedDict(b=2), ...])[0]
    assert torch.equal(found[0].values, top.values) and type(found[0]) is type(top)
    assert found[1:6] == kinds[1:6] and np.array_equal(found[6], kinds[6]) and found[7] == 2.5
    assert found[8]["new"] == [] and found[8]["a"] == [1] and found[9] == {"b": 2} and found[10] is ...


def test_values_at_the_edges() -> None:
    """Numbers of thousands of digits, texts that UTF-8 does not have, and `...`, which is the user's own."""
    sent = [10**5000, -(10**5000), "\ud800 half", {"\ud800": ...}]
    assert through(sent) == [sent]
    (error,) = through(MidstreamError("\ud800"))
    assert str(error) == "\\ud800"
    (records,) = through(np.zeros(2, [("a", "i4"), ("b", "f8")]))  # not bytes without their fields
    assert isinstance(records, UnsendableError)


def test_what_is_no_data_is_an_error_in_its_place() -> None:
    nested: list[Any] = []
    for _ in range(200):
        nested = [nested]
    cycle: list[Any] = []
    cycle.append(cycle)
    for value in (object(), print, torch.ones(2, 2).to_sparse(), np.array([print]), nested, cycle):
        (found,) = through({"good": 1, "bad": value})
        while isinstance(found, (dict, list)):
            assert not isinstance(found, dict) or found["good"] == 1
            found = found["bad"] if isinstance(found, dict) else found[0]
        assert isinstance(found, UnsendableError)


def test_errors_come_back_in_their_class() -> None:
    mixed: Any = type("InterventionKeyError", (errors.InterventionError, KeyError), {})
    for sent in (errors.PlanError("p", field="Steer.layers"), errors.OutOfOrderError("o"), mixed("k")):
        sent.add_note("where")
        (found,) = through(sent)
        assert isinstance(found, MidstreamError) and found.__notes__ == ["where"]
        assert found.field == sent.field
        assert isinstance(found, type(sent)) or (
            isinstance(found, KeyError) and type(found).__name__ == type(sent).__name__
        )


def message(tree: Any, table: Any = (), size: int = 0) -> bytes:
    body = msgspec.msgpack.encode(tree)
    return headed([[[[], list(table), len(body), size]], None]) + body + bytes(max(size, 0))


def headed(head: Any) -> bytes:
    data = msgspec.msgpack.encode(head)
    return struct.pack("<I", len(data)) + data


def test_nothing_but_messages_is_read() -> None:
    """Names in a message stand for midstream's errors, torch's dtypes and the like, and for nothing else."""
    for data in (
        b"HTTP/1.1 500",
        b"\xff" * 99,
        message(["eval", "1"]),
        struct.pack("<I", 1) + b"\x80",
        message(["tensor", 5]),
        message(["tensor", 0], [[7]]),
        message([["list"], 1]),
        message([]),
        message(1, size=-5),
        headed([[], None]),
        headed([[], "stream"]),
        struct.pack("<I", 9002) + b"\x96" + b"\x91" * 9000 + b"\x01",
        headed([[[[], [], 9001, 0]], None]) + b"\x91" * 9000 + b"\x01",
    ):
        with pytest.raises(ChannelError):
            list(MessageReader().feed(data))
    (found,) = MessageReader().feed(message(["error", "os", "exec", "text", None, ["list"]]))
    assert type(found) is MidstreamError
    for tree in (
        ["dtype", "load"],
        ["device", "nowhere"],
        ["named", "x y", ["list", "a"], 1],
        ["named", "x", ["list", "a b"], 1],
        ["ellipsis", 1],
    ):
        with pytest.raises(ChannelError):
            list(MessageReader().feed(message(tree)))
