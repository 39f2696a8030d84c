"""The client's end of the results channel, which bypasses vLLM's scheduler and its output path.

    receiver = Receiver()                                  # client, once per engine
    box = receiver.expect(("req-1", 0))                    # before the request is submitted
    sender = Sender(receiver.address, name="rank 0")       # worker; the address came by RPC
    sender.send(ResultHeader(("req-1", 0), ...), {"h": tensor})  # returns at once
    header, value = box.get(timeout=60)                    # or: await box.aget()
    box.close()

`send` pickles the value without its tensors (`messages`), queues it and returns. The sender's thread writes a frame and copies the tensors
into memory that it shares with a client on its host (`messages`). The receiver has a thread for each worker, which copies the tensors
out and routes the messages to mailboxes. The reader of a mailbox unpickles the values; the receiving thread unpickles messages that were
sent together.

Tensors arrive on the CPU, contiguous, without grad. They lie in the memory of their message, which is freed with the last of them. A
tensor that several messages of one stream contain is sent once, and they share it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import mmap
import os
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import answer_challenge, deliver_challenge
from typing import Any, Self

import msgspec
import numpy as np
import torch

from midstream.errors import ChannelClosedError, ChannelError, UnsendableError
from midstream.queues import ByteBudget
from midstream.trace.shipping import itself
from midstream.transport import messages

_log = logging.getLogger(__name__)
_HANDSHAKE_SECONDS = 10.0  # how long a connection without the key may hold a thread
_STRANGERS = 64  # connections without the key, with a thread each; one more drops the oldest. An engine has fewer ranks
_NAME_BYTES = 256
_PIECE_BYTES = 1 << 20  # what one thread copies at a time
_PEER = struct.Struct("3i")  # SO_PEERCRED: process id, user, group


@dataclass(slots=True)
class Message:
    """A message as it arrived. `load` unpickles the value; the reader calls it, because it may take long."""

    header: Any
    size: int  # bytes of the payload
    load: Callable[[], Any]

    def open(self) -> tuple[Any, Any]:
        return self.header, self.load()


class Mailbox:
    """The messages for one key, in the order in which each worker sent them.

    Args:
        key: of the messages.
        senders: the mailbox ends when one of these workers has gone.
        forget: tells the receiver that the mailbox is closed.
        budget: counts the bytes that wait here, including the message that the reader works on.
    """

    def __init__(
        self, key: Hashable, senders: frozenset[str], forget: Callable[[Mailbox], None], budget: ByteBudget
    ) -> None:
        self.key = key
        self.senders = senders
        self._forget = forget
        self._budget = budget
        self._taken = 0  # bytes of the message that the reader works on
        self._messages: deque[Message] = deque()
        self._error: ChannelClosedError | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._waiters: list[asyncio.Future[None]] = []

    # For the reader.

    def get(self, timeout: float | None = None) -> tuple[Any, Any]:
        """The next (header, value), waiting for it up to `timeout` seconds.

        Raises TimeoutError, and ChannelClosedError if the mailbox is empty and no more messages can come.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._messages or self._error, timeout):
                raise TimeoutError(f"no result for {self.key!r} within {timeout} s")
            message = self._take()
        assert message is not None
        return message.open()

    def get_nowait(self) -> tuple[Any, Any] | None:
        """The next (header, value) if it is here, else None. Raises ChannelClosedError as `get` does."""
        with self._changed:
            message = self._take()
        return message.open() if message else None

    async def aget(self) -> tuple[Any, Any]:
        """`get` for asyncio, without a timeout: `asyncio.wait_for` adds one, and loses no message when it fires."""
        while True:
            with self._changed:
                message = self._take()
                if message is None:
                    self._waiters.append(waiter := asyncio.get_running_loop().create_future())
            if message is not None:
                return message.open()
            try:
                await waiter
            finally:
                with self._changed:
                    if waiter in self._waiters:
                        self._waiters.remove(waiter)

    def close(self) -> None:
        """Drop the messages that are here, and later ones. Idempotent."""
        self._forget(self)
        self.fail(ChannelClosedError(f"the mailbox of {self.key!r} is closed"))
        with self._changed:
            self._closed = True
            self._release(sum(message.size for message in self._messages))
            self._messages.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # For the receiver.

    def deliver(self, message: Message) -> None:
        """Add a message that has come."""
        with self._changed:
            if not self._closed:
                self._messages.append(message)
                self._budget.add(message.size)
                self._wake()

    def fail(self, error: ChannelClosedError) -> None:
        """End the mailbox: readers get the messages that are here, then this error."""
        with self._changed:
            self._error = self._error or error
            self._wake()

    def _take(self) -> Message | None:
        self._release()
        if self._messages:
            message = self._messages.popleft()
            self._taken = message.size
            return message
        if self._error:
            raise self._error
        return None

    def _release(self, more: int = 0) -> None:
        """Free the bytes of the message that the reader has finished, and `more` bytes."""
        size, self._taken = self._taken + more, 0
        if size:
            self._budget.add(-size)

    def _wake(self) -> None:
        self._changed.notify_all()
        waiters, self._waiters = self._waiters, []
        for future in waiters:
            with contextlib.suppress(RuntimeError):  # its loop was closed meanwhile
                future.get_loop().call_soon_threadsafe(_wake_waiter, future)


def _wake_waiter(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Receiver:
    """Listens for the workers of one engine and routes their messages to mailboxes.

    Args:
        host: also listen on TCP at this address, for workers on other hosts; they must be able to reach it. Bytes on TCP are neither
            encrypted nor signed after the handshake, so the network has to be trusted.
        paced_bytes: the limit of the bytes that wait in all `paced` mailboxes together, plus one frame of each worker. Above it, the
            receiver stops reading from the workers until readers have taken some.
        headers: the type of the headers, a msgspec.Struct.
        handle: takes every message, on the thread that received it, in place of mailboxes.

    Attributes:
        when_gone: called with a worker's name, on its own thread, when the worker has gone.

    Gauges: `open_mailboxes`; `connected`, names of the connected workers; `lost`, names of workers that went without closing; `dropped`,
    messages without a mailbox.
    """

    def __init__(
        self,
        host: str | None = None,
        *,
        paced_bytes: int = 256 << 20,
        headers: Any = messages.ResultHeader,
        handle: Callable[[Message], None] | None = None,
    ) -> None:
        self.when_gone: Callable[[str], None] | None = None
        self._header = msgspec.msgpack.Decoder(headers).decode
        self._handle = handle
        name = f"midstream-{os.getpid()}-{secrets.token_hex(8)}"
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._closed = False
        self._mailboxes: dict[Hashable, Mailbox] = {}
        self._gone: set[str] = set()  # workers that were here, by name
        self._connections: dict[socket.socket, str | None] = {}
        self._threads: dict[socket.socket, threading.Thread] = {}
        self.lost: list[str] = []
        self.dropped = 0
        self._paced = ByteBudget(paced_bytes)
        self._copies = ThreadPoolExecutor(min(8, os.cpu_count() or 1), "midstream-copy")
        self._listeners = [socket.socket(socket.AF_UNIX)]
        self._listeners[0].bind(f"\0{name}")  # the leading NUL keeps it off the filesystem
        self._listeners[0].listen(1024)  # a full queue would refuse a worker at once
        if host is not None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listeners.append(socket.create_server((host, 0), family=family, backlog=1024))
        tcp = [host, self._listeners[1].getsockname()[1]] if host is not None else None
        self.address: dict[str, Any] = {
            "unix": name,
            "tcp": tcp,
            "key": self._key.hex(),
            "host": messages.machine_name(),
        }
        for listener in self._listeners:
            self._start(self._accept, listener)

    @property
    def open_mailboxes(self) -> int:
        return len(set(self._mailboxes.values()))

    @property
    def connected(self) -> list[str]:
        with self._lock:
            return sorted(name for name in self._connections.values() if name is not None)

    def expect(self, key: Hashable, *, senders: Collection[str] = (), paced: bool = False) -> Mailbox:
        """A mailbox for the messages whose header has this key. Call it before the workers can send any.

        After one of `senders` has gone, the empty mailbox raises ChannelClosedError. `paced`: the reader takes messages as they come and
        waits for nothing else, so a full mailbox may delay the workers.
        """
        mailbox = Mailbox(key, frozenset(senders), self._forget, self._paced if paced else ByteBudget(0))
        with self._lock:
            if self._closed:
                raise ChannelClosedError("the results channel is closed")
            if key in self._mailboxes:
                raise ChannelError(f"results for {key!r} are expected already; close that mailbox first")
            self._mailboxes[key] = mailbox
            gone = self._gone & mailbox.senders
        for name in gone:
            mailbox.fail(_gone_error(name))
        return mailbox

    def close(self) -> None:
        """Disconnect the workers, wake every mailbox with ChannelClosedError, end the threads. Idempotent."""
        with self._lock:
            self._closed = True
            sockets, threads = [*self._listeners, *self._connections], list(self._threads.values())
            mailboxes = list(self._mailboxes.values())
            self._mailboxes.clear()
        self._paced.close()
        for sock in sockets:
            _hang_up(sock)
        for thread in threads:
            thread.join()
        self._copies.shutdown()
        for mailbox in mailboxes:
            mailbox.fail(ChannelClosedError("the results channel is closed"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _forget(self, mailbox: Mailbox) -> None:
        with self._lock:
            if self._mailboxes.get(mailbox.key) is mailbox:
                del self._mailboxes[mailbox.key]

    def _start(self, target: Callable[[socket.socket], None], sock: socket.socket) -> None:
        def run() -> None:
            try:
                target(sock)
            finally:
                sock.close()
                with self._lock:
                    self._threads.pop(sock, None)

        thread = threading.Thread(target=run, name="midstream-receive", daemon=True)
        self._threads[sock] = thread
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed:
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if not self._closed:  # for example no free descriptor: some may be freed soon
                    _log.warning("the results channel could not take a connection: %s", error)
                    time.sleep(0.1)
                continue
            if not _is_welcome(sock):
                sock.close()
                continue
            self._make_room()
            with self._lock:
                if self._closed:
                    return sock.close()
                self._connections[sock] = None
                self._start(self._converse, sock)

    def _make_room(self) -> None:
        """Drop the oldest of many connections that have not proved the key, so that strangers cannot lock workers out."""
        with self._lock:
            strangers = [sock for sock, name in self._connections.items() if name is None]
            if len(strangers) < _STRANGERS:
                return
            thread = self._threads[strangers[0]]
            del self._connections[strangers[0]]
            _hang_up(strangers[0])
        thread.join()

    def _converse(self, sock: socket.socket) -> None:
        """Serve one worker, from the handshake to the end of its connection."""
        name: str | None = None
        in_order = False
        try:
            sock.settimeout(_HANDSHAKE_SECONDS)
            peer: Any = messages.Peer(sock)
            deliver_challenge(peer, self._key)
            name = peer.recv_bytes(_NAME_BYTES).decode(errors="replace")
            with self._lock:
                if sock not in self._connections:
                    raise ChannelError(f"{name!r} was dropped: {_STRANGERS} newer connections had not shown the key")
                self._connections[sock] = name
                self._gone.discard(name)
            answer_challenge(peer, self._key)
            sock.settimeout(None)
            self._read(sock)
            in_order = True
        except Exception as error:
            if not self._closed:
                who = f"worker {name!r}" if name else "a stranger"
                # Not the error itself, whose traceback holds the mapped slots: some log handlers keep it.
                _log.warning("results channel, %s: %s", who, repr(error))
        finally:
            self._lose(sock, name, in_order)

    def _lose(self, sock: socket.socket, name: str | None, in_order: bool) -> None:
        with self._lock:
            self._connections.pop(sock, None)
            if name is None or self._closed:
                return
            self._gone.add(name)
            if not in_order:
                self.lost.append(name)
            waiting = [mailbox for mailbox in self._mailboxes.values() if name in mailbox.senders]
        for mailbox in waiting:
            mailbox.fail(_gone_error(name))
        if self.when_gone is not None:
            threading.Thread(target=self.when_gone, args=(name,), name="midstream-gone", daemon=True).start()

    def _read(self, sock: socket.socket) -> None:
        """Handle frames until the sender says goodbye. Raises ConnectionError if the connection ends otherwise."""
        streams: dict[str, dict[int, torch.Tensor]] = {}
        slots = SlotReader(sock, self._copies)
        while True:
            frame = messages.receive_frame(sock)
            if frame.parts:
                self._deliver(sock, frame, slots, streams)
            elif frame.stream is None:
                return
            else:
                streams.pop(frame.stream, None)
            self._paced.wait_for_room()

    def _deliver(
        self,
        sock: socket.socket,
        frame: messages.Frame,
        slots: SlotReader,
        streams: dict[str, dict[int, torch.Tensor]],
    ) -> None:
        bodies = [messages.receive(sock, part.body) for part in frame.parts]
        parts = [[self._header(each) for each in part.headers] for part in frame.parts]
        is_wanted = self._handle is not None or any(header.key in self._mailboxes for each in parts for header in each)
        sizes = [part.payload for part in frame.parts]
        payload = torch.empty(0, dtype=torch.uint8)
        lost: str | None = None
        try:
            payload = torch.empty(sum(sizes) if is_wanted else 0, dtype=torch.uint8)
        except Exception as error:  # no memory for it: this message is lost, and the channel goes on
            lost = f"taking it in failed: {error!r}"
        if any(sizes):
            lost = slots.read(payload.numpy() if is_wanted and lost is None else None) or lost
        if not is_wanted:
            self._note_dropped(sum(map(len, parts)))
            if frame.stream is not None:
                streams.pop(frame.stream, None)
            return
        known = streams.setdefault(frame.stream, {}) if frame.stream is not None else {}
        loads: list[Callable[[], Any]]
        if lost is not None:
            loads = [partial(UnsendableError, "result", lost)] * len(parts)
        else:
            payloads = payload.split(sizes) if len(sizes) > 1 else (payload,)
            loads = [
                partial(messages.unpack, body, messages.resolve_tensors(payload, part.table, known))
                for part, body, payload in zip(frame.parts, bodies, payloads, strict=True)
            ]
        take = self._handle or self._put
        for part, headers, load in zip(frame.parts, parts, loads, strict=True):
            its_loads: list[Callable[[], Any]] = [load]
            if len(headers) > 1:  # unpickled here: their readers have just ended a run of many requests and are busy
                values = load()
                if isinstance(values, UnsendableError):
                    values = [values] * len(headers)
                its_loads = [partial(itself, value) for value in values]
            for header, each in zip(headers, its_loads, strict=True):
                take(Message(header, part.payload // len(headers), each))

    def _put(self, message: Message) -> None:
        if (mailbox := self._mailboxes.get(message.header.key)) is not None:
            mailbox.deliver(message)
        else:
            self._note_dropped(1)

    def _note_dropped(self, count: int) -> None:
        with self._lock:
            self.dropped += count


def _is_welcome(sock: socket.socket) -> bool:
    """False for other users of this machine: every user may connect to an abstract socket."""
    if sock.family != socket.AF_UNIX:
        return True
    _, user, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return user in (0, os.geteuid())


def _hang_up(sock: socket.socket) -> None:
    """Wake the thread that is in accept, recv or send on `sock`; it closes the socket itself."""
    with contextlib.suppress(OSError):  # the other side was first
        sock.shutdown(socket.SHUT_RDWR)


def _gone_error(name: str) -> ChannelClosedError:
    return ChannelClosedError(f"worker {name!r} has gone: it closed its results channel, or died")


class SlotReader:
    """The client's end of the memory that it shares with a worker: see `messages`. Used from one thread.

    Args:
        pool: its threads share the copies of large payloads.
    """

    def __init__(self, sock: socket.socket, pool: ThreadPoolExecutor) -> None:
        self._sock, self._pool = sock, pool
        self._slots: np.ndarray | None = None  # uint8, of all slots

    def read(self, memory: np.ndarray | None) -> str | None:
        """Read the next payload into `memory`, uint8, or drop it. Returns why the worker could not send it, if it could not.

        Raises OSError at the end of the connection.
        """
        copies: list[Future[None]] = []
        try:
            while True:
                slot, size, place = self._header()
                if slot == messages.END:
                    for copy in copies:
                        copy.result()
                    return None
                if slot == messages.LOST:
                    return messages.receive(self._sock, size).decode()
                target = memory[place : place + size] if memory is not None else None
                if slot == messages.INLINE:
                    messages.receive_into(self._sock, (np.empty(size, np.uint8) if target is None else target).data)
                elif target is None:
                    self._give_back(slot)
                else:
                    self._copy_out(slot, target, copies)
        finally:
            wait(copies)

    def _header(self) -> tuple[int, int, int]:
        data, descriptors, _, _ = socket.recv_fds(self._sock, messages.CHUNK.size, 1, socket.MSG_CMSG_CLOEXEC)
        for descriptor in descriptors:
            try:
                mapped = mmap.mmap(descriptor, messages.SLOTS * messages.SLOT_BYTES, prot=mmap.PROT_READ)
            finally:
                os.close(descriptor)
            self._slots = np.frombuffer(mapped, np.uint8)
        if not data:
            raise ConnectionError("the other side of the results channel is gone")
        data += messages.receive(self._sock, messages.CHUNK.size - len(data))
        return messages.CHUNK.unpack(data)  # type: ignore[return-value]

    def _copy_out(self, slot: int, target: np.ndarray, copies: list[Future[None]]) -> None:
        """Copy a slot's bytes and give the slot back: now if they are few, else the thread that copies the last piece does."""
        assert self._slots is not None
        source = self._slots[slot * messages.SLOT_BYTES :][: len(target)]
        if len(target) <= 2 * _PIECE_BYTES:
            np.copyto(target, source)
            return self._give_back(slot)
        starts, done = range(0, len(target), _PIECE_BYTES), itertools.count(1)
        for start in starts:
            piece = slice(start, start + _PIECE_BYTES)
            copy = self._pool.submit(np.copyto, target[piece], source[piece])
            copies.append(copy)
            copy.add_done_callback(partial(self._note_copied, slot, done, len(starts)))

    def _note_copied(self, slot: int, done: Iterator[int], pieces: int, _: Future[None]) -> None:
        if next(done) == pieces:
            with contextlib.suppress(OSError):  # the worker has gone
                self._give_back(slot)

    def _give_back(self, slot: int) -> None:
        self._sock.sendall(bytes([slot]))
