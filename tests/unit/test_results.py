"""The results channel: the client gets the values that a worker process sends, and nothing stays behind.

Most rows run against a real second process. Expected values are closed forms that both processes compute.
"""

import asyncio
import gc
import io
import json
import multiprocessing
import os
import re
import signal
import socket
import struct
import threading
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from limits import examples, least

from midstream.errors import ChannelClosedError, ChannelError, UnsendableError
from midstream.transport import messages
from midstream.transport import receiver as receiving
from midstream.transport.messages import SLOT_BYTES, SLOTS
from midstream.transport.receiver import Receiver, SlotReader
from midstream.transport.sender import Sender, SenderSlots

KEY = ("request", 0)
WAIT = 60  # seconds; a shared machine may be slow
DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
DTYPES = [d for d in DTYPES if not re.fullmatch(r"torch\.(q|bits).*", str(d))]
COPYABLE = [d for d in DTYPES if not re.fullmatch(r"torch\.u?int[1-7]", str(d))]  # torch has no kernels for the others


class ResultHeader(msgspec.Struct, array_like=True, frozen=True):
    key: str | tuple[str, int]
    note: Any = None


# ------------------------------------------------------------------------------------------------ the other process


class Worker:
    """A process that runs the functions it is given, each with a dict of its own to keep things in."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def start(self, function, *args, **kwargs):
        self._pipe.send((function, args, kwargs))

    def result(self):
        assert self._pipe.poll(WAIT), "the worker does not answer"
        value, error = self._pipe.recv()
        if error:
            raise error
        return value

    def call(self, function, *args, **kwargs):
        self.start(function, *args, **kwargs)
        return self.result()

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(WAIT)
        self._pipe.close()


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    kept: dict = {}
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((function(kept, *args, **kwargs), None))
        except Exception as error:
            pipe.send((None, error))


def connect(kept, address, name="worker", **options):
    kept["sender"] = Sender(address, name, **options)


def disconnect(kept):
    kept.pop("sender").close()


def send(kept, make, *args, key=KEY):
    """Send what `make(*args)` gives, here in the worker."""
    kept["sender"].send(ResultHeader(key, "worker"), make(*args))


def stats(kept):
    return kept["sender"].stats


def open_files(kept):
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(scope="module")
def worker_process():
    worker = Worker()
    yield worker
    worker.kill()


@pytest.fixture
def receiver():
    with Receiver(host="127.0.0.1", headers=ResultHeader) as receiver:
        yield receiver


def route(address: dict, path: str) -> dict:
    """The address as a worker sees it that is on this host, or on another one."""
    return address if path == "unix" else {**address, "host": "another machine"}


@pytest.fixture(params=["unix", "tcp"])
def worker(request, receiver, worker_process):
    """A connected worker, once by each path."""
    worker_process.call(connect, route(receiver.address, request.param))
    yield worker_process
    worker_process.call(disconnect)


# --------------------------------------------------------------------------------------------------------- samples


def filled(dtype: torch.dtype, shape: tuple[int, ...], salt: int = 1) -> torch.Tensor:
    """Bytes of a fixed pattern, seen as `dtype`: NaNs, infinities and denormals included."""
    count = torch.Size(shape).numel() * dtype.itemsize
    period = ((torch.arange(251) * 73 + salt * 29) % 251).to(torch.uint8)
    pattern = period.repeat(count // 251 + 1)[:count].clone()
    return (pattern % 2 if dtype is torch.bool else pattern).view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert type(got) is torch.Tensor
    assert (got.dtype, got.shape, got.device.type) == (want.dtype, want.shape, "cpu")
    assert got.is_contiguous() and not got.requires_grad
    assert bits(got) == bits(want)


def one_of_each_dtype(rows):
    return {str(dtype): filled(dtype, (rows, 64)) for dtype in DTYPES}


SHAPES = {
    "zero_dim": lambda: torch.tensor(2.5),
    "one": lambda: torch.tensor([7], dtype=torch.int32),
    "empty": lambda: torch.empty(0),
    "empty_with_shape": lambda: torch.empty(3, 0, 2, dtype=torch.bfloat16),
    "transposed": lambda: filled(torch.float16, (40, 30)).T,
    "strided": lambda: filled(torch.int64, (100, 7))[::3, 1::2],
    "expanded": lambda: filled(torch.float32, (1, 9)).expand(6, 9),
    "row_of_a_large_one": lambda: filled(torch.float32, (300, 1000))[17],
    "channels_last": lambda: filled(torch.float32, (2, 3, 4, 5)).to(memory_format=torch.channels_last),
    "conjugated": lambda: filled(torch.complex64, (5, 4)).conj(),
    "negated_view": lambda: filled(torch.complex64, (5, 4)).conj().imag,
    "with_grad": lambda: torch.arange(6.0, requires_grad=True).reshape(2, 3),
    "parameter": lambda: torch.nn.Parameter(torch.arange(6.0)),
    "made_in_inference_mode": lambda: in_inference_mode(),
    "one_of_a_row": lambda: filled(torch.float32, (1, 12))[:, 7],
    "one_with_odd_strides": lambda: filled(torch.bfloat16, (40,)).as_strided((1, 1, 1), (3, 7, 5)),
    "one_conjugated": lambda: filled(torch.complex128, (1, 12)).conj()[:, 7],
    "a_column": lambda: filled(torch.complex64, (1, 50, 3))[..., 1],
    "bits_transposed": lambda: filled(torch.bits16, (40, 30)).T,
    "float8_strided": lambda: filled(torch.float8_e4m3fn, (1, 40))[:, ::3],
    "large_transposed": lambda: filled(torch.float32, (2000, 1500)).T,
    "large": lambda: filled(torch.uint8, (2 * SLOT_BYTES + 12345,)),
}


def in_inference_mode():
    with torch.inference_mode():
        return torch.arange(12.0).reshape(3, 4) * 2


def one_shape(name):
    return SHAPES[name]()


def one_of_each_shape():
    return {name: make() for name, make in SHAPES.items()}


Point = namedtuple("Point", "x y")


@dataclass(frozen=True)
class Run:
    name: str
    values: list


class Plain:
    def __init__(self, h):
        self.h = h


def nested():
    h = filled(torch.bfloat16, (4, 8))
    return {
        "list": [h, (torch.tensor(1), [torch.tensor(2.0)])],
        ("tuple", "key"): Point(filled(torch.int32, (3,)), None),
        "dataclass": Run("r", [filled(torch.float64, (2,)), {"deep": {1: [filled(torch.bool, (5,))]}}]),
        "object": Plain(filled(torch.float16, (2, 2))),
        "function": lambda: 41 + 1,
        "plain": [1, 2.5, "text", b"bytes", None, {1, 2}, 10**30],
    }


def twice_the_same():
    h, rows = filled(torch.float32, (100, 100)), [1]
    return {"a": h, "b": [h, h], "view": h[0], "rows": rows, "again": rows}


def with_unpicklables():
    h = filled(torch.float32, (3,))
    return {
        "h": h,
        "generator": (i for i in range(3)),
        "pair": Point(h, threading.Lock()),
        "run": Run("r", [h, threading.Event()]),
    }


def only_a_generator():
    return (i for i in range(3))


def cycle_with_a_lock():
    loop = [threading.Lock()]
    loop.append(loop)
    return loop


def never_pickled():
    class Odd(dict):
        def __reduce_ex__(self, _):
            raise ValueError("never")

    return Odd(a=1)


class Boom:
    def __reduce__(self):
        return int, ("not a number",)


# ------------------------------------------------------------------------------------------------ values round trip


@pytest.mark.parametrize("rows", [1, 64], ids=["inline", "slots"])
def test_every_dtype_arrives_bit_for_bit(receiver, worker, rows):
    with receiver.expect(KEY) as box:
        worker.call(send, one_of_each_dtype, rows)
        header, got = box.get(WAIT)
    assert header == ResultHeader(KEY, "worker")
    assert list(got) == [str(dtype) for dtype in DTYPES]
    for dtype in DTYPES:
        assert_same(got[str(dtype)], filled(dtype, (rows, 64)))


def test_every_shape_and_layout(receiver, worker):
    with receiver.expect(KEY) as box:
        worker.call(send, one_of_each_shape)
        _, got = box.get(WAIT)
    for name, make in SHAPES.items():
        want = make().detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        assert_same(got[name], want)


@pytest.mark.parametrize("name", SHAPES)
def test_a_bare_tensor(receiver, worker, name):
    with receiver.expect(KEY) as box:
        worker.call(send, one_shape, name)
        _, got = box.get(WAIT)
    want = SHAPES[name]().detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    assert_same(got, want)


BY_PICKLE = {
    "coo": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "quantized": lambda: torch.quantize_per_tensor(torch.arange(6.0).reshape(2, 3), 0.1, 3, torch.quint8),
    "quantized_by_channel": lambda: torch.quantize_per_channel(
        torch.arange(6.0).reshape(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([0, 3]), 0, torch.qint8
    ),
    "nested": lambda: torch.nested.nested_tensor([torch.arange(2.0), torch.arange(3.0)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.arange(2.0), torch.arange(3.0)], layout=torch.jagged),
    "mkldnn": lambda: torch.arange(6.0).reshape(2, 3).to_mkldnn(),
}


def one_of_each_by_pickle():
    return {name: make() for name, make in BY_PICKLE.items()}


def numbers(tensor):
    """Its values, as lists."""
    if tensor.is_nested:
        return [each.tolist() for each in tensor.unbind()]
    if tensor.is_quantized:
        return tensor.int_repr().tolist(), tensor.qscheme(), tensor.dequantize().tolist()
    return tensor.to_dense().tolist()


def test_sparse_quantized_and_nested_tensors_arrive(receiver, worker):
    with receiver.expect(KEY) as box:
        worker.call(send, one_of_each_by_pickle)
        _, got = box.get(WAIT)
    for name, make in BY_PICKLE.items():
        want = make()
        assert got[name].dtype == want.dtype and numbers(got[name]) == numbers(want), name
        assert name == "mkldnn" or got[name].layout == want.layout, name


def test_nested_containers_and_objects(receiver, worker):
    with receiver.expect(KEY) as box:
        worker.call(send, nested)
        _, got = box.get(WAIT)
    want = nested()
    assert list(got) == list(want)
    assert_same(got["list"][0], want["list"][0])
    assert_same(got["list"][1][1][0], torch.tensor(2.0))
    assert type(got["tuple", "key"]) is Point and got["tuple", "key"].y is None
    assert type(got["dataclass"]) is Run
    assert_same(got["dataclass"].values[1]["deep"][1][0], filled(torch.bool, (5,)))
    assert_same(got["object"].h, want["object"].h)
    assert got["function"]() == 42
    assert got["plain"] == want["plain"]


def test_one_tensor_in_two_places_is_sent_once_and_stays_one(receiver, worker):
    before = worker.call(stats)["bytes"]
    with receiver.expect(KEY) as box:
        worker.call(send, twice_the_same)
        _, got = box.get(WAIT)
    assert got["a"] is got["b"][0] is got["b"][1]
    assert got["rows"] is got["again"]
    assert torch.equal(got["view"], got["a"][0])
    assert worker.call(stats)["bytes"] - before < 40_000 + 400 + 2_000  # h, one row of it, the skeleton


def test_saving_a_tensor_does_not_write_its_whole_message(receiver, worker):
    with receiver.expect(KEY) as box:
        worker.call(send, one_of_each_dtype, 64)
        _, got = box.get(WAIT)
    file = io.BytesIO()
    torch.save(got["torch.float32"], file)
    assert got["torch.float32"].untyped_storage().nbytes() == 64 * 64 * 4
    assert file.tell() < 64 * 64 * 4 + 4_000


def test_received_tensors_can_be_written_to(receiver, worker):
    with receiver.expect(KEY) as box:
        worker.call(send, one_of_each_dtype, 64)
        _, got = box.get(WAIT)
    got["torch.int32"].zero_()
    assert got["torch.int32"].count_nonzero() == 0
    assert_same(got["torch.int64"], filled(torch.int64, (64, 64)))


# --------------------------------------------------------------------------------------------- what cannot be sent


def test_an_unpicklable_leaf_becomes_an_error_in_its_place(receiver, worker):
    with receiver.expect(KEY) as box:
        worker.call(send, with_unpicklables)
        _, got = box.get(WAIT)
    h = filled(torch.float32, (3,))
    assert_same(got["h"], h)
    assert_same(got["pair"].x, h)
    assert got["pair"].x is got["h"]
    assert_same(got["run"].values[0], h)
    for error, name in [
        (got["generator"], "generator"),
        (got["pair"].y, "lock"),
        (got["run"].values[1], "Event"),
    ]:
        assert isinstance(error, UnsendableError) and isinstance(error, ChannelError)
        assert name == error.type_name and name in str(error)


@pytest.mark.parametrize(
    ("make", "name"), [(only_a_generator, "generator"), (never_pickled, "never_pickled.<locals>.Odd")]
)
def test_an_unpicklable_value_becomes_one_error(receiver, worker, make, name):
    with receiver.expect(KEY) as box:
        worker.call(send, make)
        _, got = box.get(WAIT)
        assert isinstance(got, UnsendableError) and got.type_name == name
        worker.call(send, twice_the_same)  # and the channel goes on
        assert "a" in box.get(WAIT)[1]


def test_a_lock_in_a_cycle_becomes_an_error_in_its_place(receiver, worker):
    with receiver.expect(KEY) as box:
        worker.call(send, cycle_with_a_lock)
        _, got = box.get(WAIT)
    assert isinstance(got[0], UnsendableError) and got[0].type_name == "lock" and got[1] is got


def test_a_value_that_the_client_cannot_rebuild_is_an_error_value(receiver, worker):
    with receiver.expect(KEY) as box:
        worker.call(send, Boom)
        _, got = box.get(WAIT)
    assert isinstance(got, UnsendableError) and "ValueError" in str(got)


class FailedCopy:
    def synchronize(self):
        raise ZeroDivisionError

    numel = synchronize


@pytest.mark.parametrize("end", [False, True], ids=["begin", "end"])
@pytest.mark.parametrize("path", ["unix", "tcp"])
def test_a_copy_that_fails_is_an_error_value_and_the_channel_goes_on(receiver, monkeypatch, path, end):
    fill = SenderSlots._fill

    def failing(self, slot, place, device, pieces):
        if place < 2 * SLOT_BYTES:
            return fill(self, slot, place, device, pieces)
        if end:
            return fill(self, slot, place, device, pieces)._replace(copied=FailedCopy())
        return fill(self, slot, place, device, [(0, FailedCopy())])

    with receiver.expect(KEY) as box, linked(receiver, path) as sender:
        monkeypatch.setattr(SenderSlots, "_fill", failing)
        for _ in range(SLOTS):  # the slots of a lost payload are used again
            sender.send(ResultHeader(KEY), torch.ones(3 * SLOT_BYTES, dtype=torch.uint8))
            assert "ZeroDivisionError" in str(box.get(WAIT)[1])
        sender.send(ResultHeader(KEY), torch.ones(3))
        assert_same(box.get(WAIT)[1], torch.ones(3))


# --------------------------------------------------------------------------------------------------------- streams


class linked:
    """A sender in this process; closed at the end of the block."""

    def __init__(self, receiver, path="unix", name="here", **options):
        self.sender = Sender(route(receiver.address, path), name, **options)

    def __enter__(self):
        return self.sender

    def __exit__(self, *_):
        self.sender.close()


def drained(sender) -> None:
    wait_until(lambda: sender.queued_bytes == 0)


def wait_until(condition, seconds=WAIT) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


@pytest.mark.parametrize("path", ["unix", "tcp"])
@pytest.mark.parametrize("inference", [False, True])
def test_a_stream_sends_each_tensor_once(receiver, path, inference):
    saves, got = [], []
    with torch.inference_mode(inference), receiver.expect(KEY) as box, linked(receiver, path) as sender:
        for step in range(6):
            saves.append(filled(torch.float32, (200, 100), salt=step) * 1)
            sender.send(ResultHeader(KEY, step), {"saves": saves}, stream="s")
            got.append(box.get(WAIT)[1]["saves"])
        sent = sender.stats["bytes"]
        sender.end("s")
    assert 6 * 80_000 <= sent < 6 * 80_000 + 6 * 2_000
    for step, snapshot in enumerate(got):
        assert len(snapshot) == step + 1
        for i, tensor in enumerate(snapshot):
            assert_same(tensor, filled(torch.float32, (200, 100), salt=i) * 1)
            assert tensor is got[-1][i]


def test_a_stream_sends_tensors_again_that_were_changed_in_place(receiver):
    total = torch.zeros(50_000)
    with receiver.expect(KEY) as box, linked(receiver) as sender:
        got = []
        for _ in range(3):
            sender.send(ResultHeader(KEY), total, stream="s")
            got.append(box.get(WAIT)[1])
            drained(sender)
            total += 1
        assert [int(tensor[0]) for tensor in got] == [0, 1, 2]


def test_a_new_tensor_with_the_id_of_a_dead_one_is_sent(receiver):
    with receiver.expect(KEY) as box, linked(receiver) as sender:
        for value in range(50):  # each takes the place, and often the id, of the one before
            sender.send(ResultHeader(KEY), torch.full((3,), float(value)), stream="s")
            assert box.get(WAIT)[1].tolist() == [value] * 3
            drained(sender)


def test_streams_are_independent_and_start_again_after_their_end(receiver):
    h = filled(torch.float32, (100,))
    with receiver.expect(KEY) as box, linked(receiver) as sender:
        for stream in ["a", "b", "a", None]:
            sender.send(ResultHeader(KEY), h, stream=stream)
            assert_same(box.get(WAIT)[1], h)
        before = sender.stats["bytes"]
        sender.end("a")
        sender.end("never begun")
        sender.send(ResultHeader(KEY), h, stream="a")
        assert_same(box.get(WAIT)[1], h)
        assert sender.stats["bytes"] - before >= 400


def test_a_tensor_whose_message_was_dropped_is_an_error_value_later(receiver):
    h = filled(torch.float32, (100,))
    with linked(receiver) as sender:
        sender.send(ResultHeader("nobody's"), h, stream="s")
        with receiver.expect(KEY) as box:
            sender.send(ResultHeader(KEY), h, stream="s")
            assert isinstance(box.get(WAIT)[1], UnsendableError)


# ------------------------------------------------------------------------------------------------ who may connect


@pytest.mark.parametrize("path", ["unix", "tcp"])
def test_a_wrong_key_is_refused_and_the_channel_goes_on(receiver, path):
    wrong = {**route(receiver.address, path), "key": "00" * 32}
    with pytest.raises(ChannelError, match="key"):
        Sender(wrong, "stranger")
    assert receiver.connected == [] and receiver.lost == []
    with receiver.expect(KEY) as box, linked(receiver, path) as sender:
        sender.send(ResultHeader(KEY), 1)
        assert box.get(WAIT)[1] == 1


@pytest.mark.parametrize("path", ["unix", "tcp"])
def test_many_strangers_have_few_threads_and_keep_no_worker_out(receiver, path):
    def connection():
        if path == "tcp":
            return socket.create_connection(receiver.address["tcp"])
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(f"\0{receiver.address['unix']}")
        return sock

    with ExitStack() as stack, linked(receiver, path) as early:
        before = most = len(midstream_threads())
        for _ in range(400):
            stack.enter_context(connection())
            most = max(most, len(midstream_threads()))
        with receiver.expect(KEY) as box, linked(receiver, path, name="late") as late:
            for sender in (early, late):
                sender.send(ResultHeader(KEY), 1)
                assert box.get(WAIT)[1] == 1
        assert most - before <= 64 and not receiver.lost


def test_connections_of_other_users_are_refused():
    class Connection:
        family = socket.AF_UNIX

        def __init__(self, user):
            self.user = user

        def getsockopt(self, level, name, size):
            assert (level, name) == (socket.SOL_SOCKET, socket.SO_PEERCRED)
            return struct.pack("3i", 1, self.user, 0)

    assert [receiving._is_welcome(Connection(user)) for user in (0, os.geteuid(), 12345)] == [True, True, False]


def test_nonsense_from_a_stranger_reaches_no_mailbox(receiver):
    with socket.create_connection(receiver.address["tcp"]) as sock, receiver.expect(KEY) as box:
        sock.sendall(b"\x05" * 400)
        sock.settimeout(WAIT)
        with suppress(ConnectionResetError):
            while sock.recv(4096):  # its greeting, then the end
                pass
        assert box.get_nowait() is None and receiver.lost == []


@pytest.mark.parametrize(
    "greeting",
    [b"n" * 32, struct.pack("<I", 31) + b"#CHALLENGE#" + b"n" * 20 + struct.pack("<I", 9) + b"#WELCOME#"],
    ids=["nonsense", "handshake"],
)
def test_a_worker_does_not_talk_to_an_impostor(receiver, greeting):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def impostor():
            sock, _ = server.accept()
            with sock, suppress(ConnectionError):
                sock.sendall(2 * greeting)  # a challenge, whatever the worker answers is right, and no proof of the key
                while sock.recv(4096):
                    pass

        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(ChannelError, match="not this engine's client"):
            Sender({**receiver.address, "tcp": list(server.getsockname()), "host": "another"})
        thread.join()


def test_a_remote_worker_needs_the_receivers_host():
    with Receiver() as receiver, pytest.raises(ChannelError, match="host"):
        Sender({**receiver.address, "host": "another machine"})


def test_no_client_is_a_channel_error():
    receiver = Receiver(host="127.0.0.1", headers=ResultHeader)
    receiver.close()
    for path in ("unix", "tcp"):
        with pytest.raises(ChannelError, match="reached"):
            Sender(route(receiver.address, path))


def test_the_address_is_plain_data(receiver):
    assert json.loads(json.dumps(receiver.address)) == receiver.address
    assert len(receiver.address["key"]) == 64
    with Receiver() as other:
        assert other.address["key"] != receiver.address["key"]


# --------------------------------------------------------------------------------------- the forward's thread


def test_send_does_not_wait_for_the_copy_and_snapshots_the_containers(receiver, monkeypatch):
    go, send = threading.Event(), SenderSlots.send
    monkeypatch.setattr(SenderSlots, "send", lambda *args: go.wait(WAIT) and send(*args))
    with receiver.expect(KEY) as box, linked(receiver) as sender:
        saves = [torch.ones(3)]
        sender.send(ResultHeader(KEY), saves)
        saves.append(torch.zeros(1))
        assert sender.queued_bytes > 0
        go.set()
        assert len(box.get(WAIT)[1]) == 1


def test_back_pressure_blocks_and_is_counted(receiver, monkeypatch):
    go, send = threading.Event(), SenderSlots.send
    monkeypatch.setattr(SenderSlots, "send", lambda *args: go.wait(WAIT) and send(*args))
    block = torch.zeros(1 << 20, dtype=torch.uint8)
    with receiver.expect(KEY) as box, linked(receiver, queue_bytes=5 << 19) as sender:  # room for two and a half

        def send_three():
            for i in range(3):
                sender.send(ResultHeader(KEY, i), block)

        thread = threading.Thread(target=send_three)
        thread.start()
        wait_until(lambda: sender.stats["messages"] == 2)
        thread.join(0.3)
        assert thread.is_alive() and 2 << 20 <= sender.queued_bytes <= 5 << 19
        go.set()
        thread.join(WAIT)
        assert [box.get(WAIT)[0].note for _ in range(3)] == [0, 1, 2]
        drained(sender)
        assert sender.stats["messages"] == 3 and 3 << 20 <= sender.stats["bytes"] < (3 << 20) + 3_000
        assert 0.25 < sender.stats["blocked_seconds"] < WAIT


def test_a_message_larger_than_the_bound_passes_an_empty_queue(receiver):
    with receiver.expect(KEY) as box, linked(receiver, queue_bytes=1000) as sender:
        sender.send(ResultHeader(KEY), torch.zeros(100_000))
        assert box.get(WAIT)[1].numel() == 100_000
        drained(sender)
        assert sender.stats["blocked_seconds"] == 0


def test_a_copied_message_is_written_before_the_next_copy_begins(receiver, monkeypatch):
    """Beginning the next copy may take long."""
    go, send = threading.Event(), SenderSlots.send

    def held(slots, tensors, offsets, size, ready):
        if size > 2 << 20:
            go.wait(WAIT)
        return send(slots, tensors, offsets, size, ready)

    monkeypatch.setattr(SenderSlots, "send", held)
    with receiver.expect(KEY) as box, linked(receiver) as sender:
        with sender._queue.changed:  # both are there when the thread looks
            sender.send(ResultHeader(KEY), torch.ones(1 << 20, dtype=torch.uint8))
            sender.send(ResultHeader(KEY), torch.ones(3 << 20, dtype=torch.uint8))
        assert box.get(5)[1].numel() == 1 << 20
        go.set()
        assert box.get(WAIT)[1].numel() == 3 << 20


def test_a_failed_channel_holds_nothing(receiver, monkeypatch):
    """Neither the frame after the failed one nor the error's traceback keeps tensors or bytes in the queue."""
    sender = Sender(receiver.address)

    def broken(*_):
        raise OSError("broken")

    monkeypatch.setattr(messages, "send_frame", broken)
    size = (1 << 20) + 12_345  # that no other tensor here has
    with sender._queue.changed:
        for _ in range(3):
            sender.send(ResultHeader(KEY), torch.ones(size, dtype=torch.uint8))
    sender._queue.join(WAIT)
    gc.collect()
    assert sender.queued_bytes == 0
    assert not [each for each in gc.get_objects() if type(each) is torch.Tensor and each.numel() == size]
    with pytest.raises(ChannelClosedError, match="broken"):
        sender.send(ResultHeader(KEY), 1)


def test_send_raises_and_unblocks_when_the_client_has_gone(receiver):
    sender = Sender(route(receiver.address, "tcp"), queue_bytes=1 << 20)
    receiver.close()
    with pytest.raises(ChannelClosedError):
        for _ in range(1000):
            sender.send(ResultHeader(KEY), torch.zeros(1 << 20, dtype=torch.uint8))
    assert sender.queued_bytes == 0
    sender.close()


# ------------------------------------------------------------------------------------------------------- mailboxes


def test_messages_are_routed_by_key_in_order(receiver):
    with receiver.expect("a") as a, receiver.expect(("b", 1)) as b, linked(receiver) as sender:
        assert receiver.open_mailboxes == 2
        for i in range(20):
            sender.send(ResultHeader(("b", 1) if i % 2 else "a"), i)
        assert [a.get(WAIT)[1] for _ in range(10)] == list(range(0, 20, 2))
        assert [b.get(WAIT)[1] for _ in range(10)] == list(range(1, 20, 2))
        assert a.get_nowait() is None
        with pytest.raises(TimeoutError, match="'a'"):
            a.get(0.01)
    assert receiver.open_mailboxes == 0


def test_messages_that_are_sent_together_are_routed_one_by_one(receiver):
    with receiver.expect("b") as other, linked(receiver) as sender:
        with pytest.raises(ChannelError, match="'b' are expected already"):
            receiver.expect("b")
        with receiver.expect("c") as box:
            sender.send(ResultHeader("c"), 0)
            sender.send_together([(ResultHeader(key), (key, torch.full((2,), i))) for i, key in enumerate("abc")])
            assert [box.get(WAIT)[1] for _ in range(1)] == [0]
            assert box.get(WAIT)[1][1].tolist() == [2, 2]
            assert other.get(WAIT)[1][0] == "b" and other.get_nowait() is None
            with pytest.raises(TimeoutError, match="'c'"):
                box.get(0.01)
        assert receiver.dropped == 1
        sender.send(ResultHeader("c"), 2)
        wait_until(lambda: receiver.dropped == 2)
    assert receiver.open_mailboxes == 0


def test_each_reader_of_a_shared_frame_gets_its_error(receiver):
    """The receiving thread goes on."""
    with receiver.expect("a") as a, receiver.expect("b") as b, linked(receiver) as sender:
        sender.send_together([(ResultHeader(key), RaisesWhenRead()) for key in "ab"])
        sender.send(ResultHeader("b"), 1)
        for key, box in (("a", a), ("b", b)):
            header, value = box.get(WAIT)
            assert header.key == key and isinstance(value, UnsendableError) and "not here" in str(value)
        assert b.get(WAIT)[1] == 1


class RaisesWhenRead:
    def __reduce__(self):
        return _raise, ()


def _raise():
    raise RuntimeError("not here")


def test_late_results_of_a_closed_mailbox_are_dropped(receiver):
    with linked(receiver) as sender:
        box = receiver.expect(KEY)
        with pytest.raises(ChannelError, match="expected already"):
            receiver.expect(KEY)
        sender.send(ResultHeader(KEY), 1)
        assert box.get(WAIT)[1] == 1  # so that only the two others are late
        box.close()
        box.close()
        sender.send(ResultHeader(KEY), torch.zeros(100_000))
        sender.send(ResultHeader(KEY), torch.zeros(3))
        wait_until(lambda: receiver.dropped >= 2)
        with pytest.raises(ChannelClosedError):
            box.get(WAIT)
        with receiver.expect(KEY) as again:
            assert again.get_nowait() is None
            sender.send(ResultHeader(KEY), 2)
            assert again.get(WAIT)[1] == 2


def test_asyncio_waits_without_a_thread(receiver):
    asyncio.run(waits_in_asyncio(receiver))


async def waits_in_asyncio(receiver):
    with receiver.expect(KEY) as box, linked(receiver) as sender:
        waiting = asyncio.create_task(box.aget())
        await asyncio.sleep(0.05)
        sender.send(ResultHeader(KEY), torch.ones(2))
        assert (await asyncio.wait_for(waiting, WAIT))[1].tolist() == [1, 1]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(box.aget(), 0.05)
        for i in range(3):
            sender.send(ResultHeader(KEY), i)
        assert [(await box.aget())[1] for _ in range(3)] == [0, 1, 2]
        waiting = asyncio.create_task(box.aget())
        await asyncio.sleep(0.05)
        await asyncio.to_thread(receiver.close)
        with pytest.raises(ChannelClosedError):
            await asyncio.wait_for(waiting, WAIT)


def test_closing_the_receiver_wakes_waiting_readers(receiver):
    box, raised = receiver.expect(KEY), []

    def waits():
        try:
            box.get()
        except ChannelClosedError as error:
            raised.append(error)

    thread = threading.Thread(target=waits)
    thread.start()
    time.sleep(0.05)
    receiver.close()
    receiver.close()
    thread.join(WAIT)
    assert raised
    with pytest.raises(ChannelClosedError):
        receiver.expect(KEY)


def test_several_workers_share_a_mailbox(receiver):
    with receiver.expect(KEY) as box, linked(receiver, name="0") as zero, linked(receiver, "tcp", name="1") as one:
        assert receiver.connected == ["0", "1"]
        for i in range(10):
            zero.send(ResultHeader(KEY, 0), i)
            one.send(ResultHeader(KEY, 1), i)
        got = [box.get(WAIT) for _ in range(20)]
        for rank in range(2):
            assert [value for header, value in got if header.note == rank] == list(range(10))


# ----------------------------------------------------------------------------------------------- ends, good and bad


def begin_a_frame(kept, part):
    """Write the beginning of a message after everything that is queued, and stop there."""
    drained(kept["sender"])
    sock, body = kept["sender"]._sock, b"0123456789"
    head = messages.encode(
        messages.Frame(
            [messages.MessagePart([msgspec.Raw(messages.encode(ResultHeader(KEY)))], [], len(body), 1 << 30)]
        )
    )
    frame = struct.pack("<I", len(head)) + head + body
    if part == "descriptor":
        descriptor = os.memfd_create("midstream-results")
        socket.send_fds(sock, [frame[:3]], [descriptor])
        os.close(descriptor)
    elif part == "payload":
        sock.sendall(frame + struct.pack("<iIQ", -1, 1 << 20, 0) + b"\0" * 100_000)


def send_forever(kept):
    while True:
        kept["sender"].send(ResultHeader(KEY), filled(torch.uint8, (8 << 20,)))


@pytest.mark.slow
@pytest.mark.parametrize("part", ["nothing", "descriptor", "payload", "many"])
def test_a_killed_worker_wakes_its_mailboxes_and_leaves_nothing(receiver, worker_process, part):
    settle(receiver)
    # Engines of other tests have some; the first process of all leaves descriptors open.
    files, mapped, worker = open_files(None), mappings(), Worker()
    try:
        other = receiver.expect("not of that worker")
        with receiver.expect(KEY, senders=["doomed", "other"]) as box:
            worker.call(connect, receiver.address, "doomed")
            worker.call(send, twice_the_same)
            if part == "many":
                worker.start(send_forever)
                box.get(WAIT), box.get(WAIT)
            else:
                worker.call(begin_a_frame, part)
            assert receiver.lost == []
            worker.kill()
            with pytest.raises(ChannelClosedError, match="doomed"):
                while True:
                    box.get(WAIT)  # what was sent whole still comes
        wait_until(lambda: receiver.lost == ["doomed"] and receiver.connected == [])
        with receiver.expect("later", senders=["doomed"]) as late, pytest.raises(ChannelClosedError):
            late.get(WAIT)
        assert other.get_nowait() is None
        other.close()
    finally:
        worker.kill() if worker.process.is_alive() else None
    worker.process.close()
    wait_until(lambda: open_files(None) <= files)
    wait_until(lambda: mappings() == mapped)


def test_a_worker_that_says_goodbye_is_not_lost(receiver):
    with receiver.expect(KEY, senders=["here"]) as box:
        with linked(receiver) as sender:
            sender.send(ResultHeader(KEY), "last words")
        assert box.get(WAIT)[1] == "last words"
        with pytest.raises(ChannelClosedError, match="here"):
            box.get(WAIT)
    assert receiver.lost == []


def mappings() -> int:
    """Of how many workers this process has mapped the slots, and of how many clients its own."""
    gc.collect()
    with open("/proc/self/maps") as file:
        return sum("midstream-results" in line for line in file)


def settle(receiver: Receiver) -> None:
    """Wait until the receiver holds nothing of earlier connections."""
    wait_until(lambda: receiver.connected == [])
    time.sleep(0.2)


def resident() -> int:
    """The memory of this process, in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def midstream_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("midstream")}


@pytest.mark.slow
def test_memory_is_freed_with_the_last_tensor_and_no_descriptor_stays_open(receiver, worker_process):
    settle(receiver)
    mapped = mappings()  # of engines of other tests
    worker_process.call(connect, receiver.address)
    files = open_files(None)
    with receiver.expect(KEY) as box:
        worker_process.call(send, filled, torch.uint8, (2 * SLOTS * SLOT_BYTES,))
        got = box.get(WAIT)[1]
        wait_until(lambda: open_files(None) <= files + 1)  # the mapping of the slots has one
        assert mappings() == mapped + 1
        one, before = got[:3].clone(), resident()
        assert_same(one, filled(torch.uint8, (3,)))
        del got
        wait_until(
            lambda: resident() < before - SLOTS * SLOT_BYTES
        )  # the receiver's thread lets go of it a little later
        theirs = worker_process.call(open_files)
        worker_process.call(send, one_of_each_dtype, 64)
        box.get(WAIT)
        assert worker_process.call(open_files) <= theirs
    worker_process.call(disconnect)
    wait_until(lambda: mappings() == mapped)
    assert open_files(None) <= files


def test_closed_ends_leave_no_thread_file_or_mapping():
    files, threads, mapped = open_files(None), midstream_threads(), mappings()  # engines of other tests may be alive
    for path in ("unix", "tcp"):
        receiver = Receiver(host="127.0.0.1", headers=ResultHeader)
        box, sender = receiver.expect(KEY), Sender(route(receiver.address, path))
        for size in (10, 100_000, 3 * SLOT_BYTES):
            sender.send(ResultHeader(KEY), torch.zeros(size, dtype=torch.uint8), stream="never ended")
        sender.close()
        sender.close()
        with pytest.raises(ChannelClosedError):
            sender.send(ResultHeader(KEY), 1)
        assert [box.get(WAIT)[1].numel() for _ in range(3)] == [10, 100_000, 3 * SLOT_BYTES]
        receiver.close()
        with pytest.raises(ChannelClosedError):
            box.get(WAIT)
    assert not midstream_threads() - threads
    assert open_files(None) == files
    assert mappings() == mapped


def test_closing_without_flush_drops_the_queue(receiver, monkeypatch):
    go, send = threading.Event(), SenderSlots.send
    monkeypatch.setattr(SenderSlots, "send", lambda *args: go.wait(WAIT) and send(*args))
    with receiver.expect(KEY, senders=["here"]) as box:
        sender = Sender(receiver.address, "here")
        for i in range(5):
            sender.send(ResultHeader(KEY), [i, torch.ones(3)])
        wait_until(lambda: len(sender._queue) == 4)  # the first is being copied
        threading.Timer(0.1, go.set).start()
        sender.close(flush=False)
        assert box.get(WAIT)[1][0] == 0
        with pytest.raises(ChannelClosedError):
            box.get(WAIT)
    assert sender.queued_bytes == 0 and receiver.lost == []


def test_closing_cuts_off_a_client_that_stopped_reading(receiver):
    server = socket.create_server(("127.0.0.1", 0))
    stuck = []

    def welcome_and_stop():
        sock, _ = server.accept()
        key = bytes.fromhex(receiver.address["key"])
        deliver_challenge(messages.Peer(sock), key)
        messages.Peer(sock).recv_bytes(256)
        answer_challenge(messages.Peer(sock), key)
        stuck.append(sock)

    thread = threading.Thread(target=welcome_and_stop)
    thread.start()
    sender = Sender({**receiver.address, "tcp": list(server.getsockname()), "host": "another"})
    thread.join(WAIT)
    sender.send(ResultHeader(KEY), torch.zeros(64 << 20, dtype=torch.uint8))
    start = time.monotonic()
    sender.close(timeout=0.2)
    assert time.monotonic() - start < 10
    stuck[0].close()
    server.close()


# ------------------------------------------------------------------------------------- from the device, without one


@pytest.fixture
def small_slots(monkeypatch):
    monkeypatch.setattr("midstream.transport.messages.SLOT_BYTES", 1000)
    monkeypatch.setattr("midstream.transport.messages.INLINE_LIMIT", 0)
    monkeypatch.setattr("midstream.transport.receiver._PIECE_BYTES", 300)


def through_slots(tensors, offsets, total):
    """What a reader gets of these tensors, and the sender's end."""
    ours, theirs = socket.socketpair()
    payload = torch.zeros(total, dtype=torch.uint8)
    with ours, theirs, ThreadPoolExecutor(3) as pool:
        slots = SenderSlots(ours)
        sent = pool.submit(slots.send, tensors, offsets, total, {})
        assert SlotReader(theirs, pool).read(payload.numpy()) is None
        sent.result(WAIT)
        slots.close()
    return payload, slots


def test_chunks_add_up_to_the_payload(small_slots):
    sizes = [1, 64, 999, 1000, 1001, 5000, 3, 0, 12_345, 64, 3 * SLOTS * 1000]
    tensors = [filled(torch.uint8, (size,), salt=i) for i, size in enumerate(sizes)]
    offsets, total = messages.payload_offsets(tensors)
    payload, _ = through_slots(tensors, [192 + offset for offset in offsets], 192 + total)
    assert payload[:192].count_nonzero() == 0
    for offset, tensor in zip(offsets, tensors, strict=True):
        assert torch.equal(payload[192 + offset : 192 + offset + tensor.numel()], tensor)


def test_every_shape_and_layout_passes_through_slots(small_slots):
    """The large ones pass through slots of the real size above."""
    tensors = [make().detach() for name, make in SHAPES.items() if not name.startswith("large")]
    offsets, total = messages.payload_offsets(tensors)
    payload, _ = through_slots(tensors, offsets, total)
    for offset, tensor in zip(offsets, tensors, strict=True):
        want = bits(tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format))
        assert payload[offset : offset + len(want)].numpy().tobytes() == want


def test_a_slot_is_used_again_before_another_one_is_touched():
    """Touching memory takes longer than copying to it, and pinning takes milliseconds, in which the forward's calls to the device wait."""
    ours, theirs = socket.socketpair()
    used = []
    with ours, theirs, ThreadPoolExecutor(3) as pool:
        slots, reader = SenderSlots(ours), SlotReader(theirs, pool)
        fill = slots._fill
        slots._fill = lambda slot, *rest: used.append(slot) or fill(slot, *rest)
        for value in range(1, 6):
            tensor = torch.full((100_000,), value, dtype=torch.uint8)
            slots.send([tensor], [0], 100_000, {})
            payload = torch.zeros_like(tensor)
            reader.read(payload.numpy())
            assert torch.equal(payload, tensor)
        slots.close()
    assert len(set(used)) == 1


def test_a_payload_waits_for_slots_that_the_client_has_not_given_back(small_slots):
    """Seen failing with slots that are used again at once: the client read a later chunk."""
    ours, theirs = socket.socketpair()
    tensor = filled(torch.uint8, (4 * SLOTS * 1000,))
    payload = torch.zeros_like(tensor)
    with ours, theirs, ThreadPoolExecutor(3) as pool:
        slots = SenderSlots(ours)
        sent = pool.submit(slots.send, [tensor], [0], tensor.numel(), {})
        time.sleep(0.3)
        assert not sent.done() and not slots._free
        SlotReader(theirs, pool).read(payload.numpy())
        sent.result(WAIT)
        slots.close()
    assert torch.equal(payload, tensor)


def test_offsets_are_aligned_and_tensors_of_a_device_lie_together():
    tensors = [torch.empty(3), torch.empty(5, device="meta"), torch.empty(0), torch.empty(7, dtype=torch.int8)]
    tensors += [torch.empty(100, 3, device="meta", dtype=torch.bfloat16), torch.tensor(1.0)]
    offsets, total = messages.payload_offsets(tensors)
    ends = [offset + t.numel() * t.element_size() for offset, t in zip(offsets, tensors, strict=True)]
    assert all(offset % 64 == 0 for offset in offsets) and max(ends) <= total
    ranges = sorted((offset, end, t.device.type) for offset, end, t in zip(offsets, ends, tensors, strict=True))
    assert all(end <= start for (_, end, _), (start, _, _) in pairwise(ranges))
    assert [device for _, _, device in ranges] == sorted(device for _, _, device in ranges)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("path", ["unix", "tcp"])
def test_cuda_tensors_are_sent_as_they_were_when_sent(receiver, path):
    with receiver.expect(KEY) as box, linked(receiver, path) as sender:
        for step in range(5):
            a_RH = filled(torch.float32, (1000, 1000), salt=step).cuda()
            torch.cuda._sleep(20_000_000)  # what is sent is still to be computed when `send` returns
            sums = a_RH * 1
            kinds = {str(dtype): filled(dtype, (64, 64)).cuda() for dtype in COPYABLE}
            value = [
                sums,
                sums.T,
                sums[::3, 5],
                sums[0, 0],
                kinds,
                torch.arange(5),
                filled(torch.uint8, (50 << 20,)).cuda(),
                sums[:1, 5],
                torch.eye(3).cuda().to_sparse(),
            ]
            sender.send(ResultHeader(KEY), value, stream="s")
            del value, kinds, sums
            _, got = box.get(WAIT)
            want = filled(torch.float32, (1000, 1000), salt=step) * 1
            for tensor, wanted in zip(got[:4], [want, want.T, want[::3, 5], want[0, 0]], strict=True):
                assert_same(tensor, wanted.contiguous())
            for dtype in COPYABLE:
                assert_same(got[4][str(dtype)], filled(dtype, (64, 64)))
            assert_same(got[5], torch.arange(5))
            assert_same(got[6], filled(torch.uint8, (50 << 20,)))
            assert_same(got[7], want[:1, 5].clone(memory_format=torch.contiguous_format))
            assert not got[8].is_cuda and torch.equal(got[8].to_dense(), torch.eye(3))


# --------------------------------------------------------------------------------------- any structure, any history


leaves = st.one_of(
    st.none(),
    st.integers(),
    st.text(max_size=5),
    st.floats(allow_nan=False),
    st.builds(lambda i: ("tensor", i), st.integers(0, 7)),
)
structures = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.builds(Point, inner, inner),
        st.builds(Run, st.text(max_size=3), st.lists(inner, max_size=3)),
        st.dictionaries(st.one_of(st.integers(), st.text(max_size=3)), inner, max_size=4),
    ),
    max_leaves=20,
)


def with_tensors(value, pool):
    """The structure with ("tensor", i) replaced by the i-th of the pool."""
    if isinstance(value, Point):
        return Point(*(with_tensors(item, pool) for item in value))
    if isinstance(value, Run):
        return Run(value.name, with_tensors(value.values, pool))
    if isinstance(value, tuple):
        return pool[value[1]] if value[0] == "tensor" else tuple(with_tensors(item, pool) for item in value)
    if isinstance(value, list):
        return [with_tensors(item, pool) for item in value]
    if isinstance(value, dict):
        return {key: with_tensors(item, pool) for key, item in value.items()}
    return value


def compare(got, want, met: dict) -> None:
    """Equal in types, values and shared tensors; `met` maps ids of the expected tensors to the received ones."""
    if isinstance(want, torch.Tensor):
        assert_same(got, want.contiguous())
        assert met.setdefault(id(want), got) is got
        return
    assert type(got) is type(want)
    if isinstance(want, Run):
        compare([got.name, got.values], [want.name, want.values], met)
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            compare(one, other, met)
    elif isinstance(want, dict):
        compare(list(got.items()), list(want.items()), met)
    else:
        assert got == want


@pytest.fixture(scope="module")
def loop():
    with Receiver(host="127.0.0.1", headers=ResultHeader) as receiver:
        senders = {path: Sender(route(receiver.address, path), path) for path in ("unix", "tcp")}
        yield receiver, senders
        for sender in senders.values():
            sender.close()


@pytest.mark.slow
@given(
    path=st.sampled_from(["unix", "tcp"]),
    stream=st.booleans(),
    dtypes=st.lists(st.sampled_from(COPYABLE), min_size=8, max_size=8),
    shapes=st.lists(st.lists(st.integers(0, 40), max_size=3), min_size=8, max_size=8),
    snapshots=st.lists(st.tuples(structures, st.sets(st.integers(0, 7))), min_size=1, max_size=5),
)
@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_structure_through_any_history(loop, path, stream, dtypes, shapes, snapshots):
    """Snapshots of one pool of tensors, some changed in place between them, as a stream or not."""
    receiver, senders = loop
    pool = [filled(dtype, tuple(shape)).clone() for dtype, shape in zip(dtypes, shapes, strict=True)]
    with receiver.expect(KEY) as box:
        for round_, (structure, changed) in enumerate(snapshots):
            for i in changed:
                pool[i].copy_(filled(dtypes[i], tuple(shapes[i]), salt=round_ + 2))
            value = with_tensors(structure, pool)
            senders[path].send(ResultHeader(KEY), value, stream="s" if stream else None)
            compare(box.get(WAIT)[1], value, {})
            drained(senders[path])
    senders[path].end("s")


# ----------------------------------------------------------------------------------------------------------- speed


def captures(megabytes):
    return {("resid_post", i): torch.full((megabytes << 19,), 0.5, dtype=torch.bfloat16) for i in range(16)}


def send_timed(kept, megabytes):
    value = captures(megabytes)
    start = time.monotonic()
    kept["sender"].send(ResultHeader(KEY, start), value)
    return time.monotonic() - start


@pytest.mark.slow
@pytest.mark.parametrize(("path", "floor"), [("unix", 0.3), ("tcp", 0.1)])
def test_throughput_of_a_gigabyte(receiver, worker_process, path, floor):
    worker_process.call(connect, route(receiver.address, path))
    with receiver.expect(KEY) as box:
        worker_process.call(send_timed, 1)
        box.get(WAIT)

        def seconds_per_gigabyte():
            worker_process.start(send_timed, 64)
            header, got = box.get(WAIT)
            seconds = time.monotonic() - header.note
            worker_process.result()
            assert all(bool(tensor[-1] == 0.5) and bool(tensor[0] == 0.5) for tensor in got.values())
            return seconds / sum(tensor.nbytes for tensor in got.values()) * 1e9

        assert least(seconds_per_gigabyte, 1 / floor) < 1 / floor
    worker_process.call(disconnect)
