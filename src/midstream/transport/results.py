"""The way results take from the engine's workers to the client, past vLLM's scheduler and its output path.

    receiver = Receiver()                                  # client, once per engine
    box = receiver.expect(("req-1", 0))                    # before the request is submitted
    sender = Sender(receiver.address, name="rank 0")       # worker; the address came by RPC
    sender.send({"key": ("req-1", 0)}, {"h": tensor})      # returns at once
    header, value = box.get(timeout=60)                    # or: await box.aget()
    box.close()

`send` (in `sender`) pickles the skeleton, notes which tensors are new, and returns; a thread copies the bytes
(`staging`) and writes the frame (`wire`). On one host the bytes lie in a memfd that the client maps, so the copy into
it is the only one. Here, on the client, a thread for each worker routes messages to mailboxes, and a value is unpickled
by whoever takes it out, or by that thread if it came together with others. Tensors arrive on the CPU, contiguous,
without grad. They lie in the memory of the message that brought them: it is freed with the last of them, and snapshots
of one stream share the tensors that they have in common.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, Self

import torch

from midstream.errors import ChannelError
from midstream.transport import codec as wire
from midstream.transport.codec import ChannelClosedError, Kind, UnsendableError
from midstream.transport.mailbox import Handler, Mailbox, Message, Pace, Part, parts_of
from midstream.transport.sender import Sender

__all__ = ["ChannelClosedError", "Mailbox", "Receiver", "Sender", "UnsendableError"]

_log = logging.getLogger(__name__)
_HANDSHAKE_SECONDS = 10.0  # a stranger who says nothing holds a thread for this long
_STRANGERS = 64  # connections that have not proved the key, with a thread each; one more drops the oldest. More than an engine's ranks

_PEER = struct.Struct("3i")  # of the process at the other end: its id, user and group


class Receiver:
    """The client's end: listens for the workers of one engine and routes what they send to mailboxes.

    `host` (and `port`, 0 for any): also listen there on TCP, for workers on other hosts; an address that they can
    reach. The bytes on TCP are neither encrypted nor signed after the handshake, so it has to be a trusted network.

    `paced_bytes` bounds what waits in mailboxes that are `paced`, but for one frame of each worker; beyond it the workers
    are not heard until some of it was read.

    Gauges: `open_mailboxes`; `paced_waiting`, bytes in paced ones; `connected`, names of the workers that are; `lost`,
    names of those that went without closing; `dropped`, messages that nobody expected any more.
    """

    def __init__(self, host: str | None = None, port: int = 0, *, paced_bytes: int = 256 << 20) -> None:
        name = f"midstream-{os.getpid()}-{secrets.token_hex(8)}"
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._closed = False
        self._mailboxes: dict[Hashable, Mailbox] = {}
        self._gone: set[str] = set()  # workers that were here, by name
        self._connections: dict[socket.socket, str | None] = {}
        self._threads: dict[socket.socket, threading.Thread] = {}
        self.lost: list[str] = []
        self.when_gone: Callable[[], None] | None = None  # called on a thread of its own when a worker has gone
        self.dropped = 0
        self._pace = Pace(paced_bytes)
        self._listeners = [_listen_unix(name)]
        if host is not None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listeners.append(socket.create_server((host, port), family=family, backlog=1024))
        tcp = [host, self._listeners[1].getsockname()[1]] if host is not None else None
        self.address: dict[str, Any] = {"unix": name, "tcp": tcp, "key": self._key.hex(), "host": wire.machine()}
        for listener in self._listeners:
            self._start(self._accept, listener)

    @property
    def open_mailboxes(self) -> int:
        return len(set(self._mailboxes.values()))

    @property
    def paced_waiting(self) -> int:
        return self._pace.bytes

    @property
    def connected(self) -> list[str]:
        with self._lock:
            return sorted(name for name in self._connections.values() if name is not None)

    def expect(self, key: Hashable, senders: Collection[str] = (), *, paced: bool = False) -> Mailbox:
        """A mailbox for the messages whose header has this key. Call it before the workers can send any.

        `paced`: its messages are read as they come, on a thread that waits for nothing else, and may hold the workers up.
        The mailbox raises ChannelClosedError, once empty, after any of `senders` has gone.
        """
        return self.expect_all([key], senders, paced=paced)

    def expect_all(self, keys: Sequence[Hashable], senders: Collection[str] = (), *, paced: bool = False) -> Mailbox:
        """One mailbox for the messages with any of these keys; not for none."""
        mailbox = Mailbox(self, keys, frozenset(senders), self._pace if paced else None)
        self._add(mailbox)
        return mailbox

    def serve(self, key: Hashable, sender: str, handle: Callable[[Message], None], gone: Callable[[], None]) -> None:
        """From now on each message with this key goes to `handle`, on the thread that reads from its sender.

        `gone` is called when `sender` has gone, or this end was closed; it may be called more than once.
        """
        self._add(Handler(self, key, sender, handle, gone))

    def close(self) -> None:
        """Disconnect the workers, wake every mailbox with ChannelClosedError, end the threads. Idempotent."""
        with self._lock:
            self._closed = True
            sockets, threads = [*self._listeners, *self._connections], list(self._threads.values())
            mailboxes = list(dict.fromkeys(self._mailboxes.values()))
            self._mailboxes.clear()
        self._pace.end()
        for sock in sockets:
            _hang_up(sock)
        for thread in threads:
            thread.join()
        for mailbox in mailboxes:
            mailbox._fail(ChannelClosedError("the results channel is closed"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add(self, mailbox: Mailbox) -> None:
        with self._lock:
            if self._closed:
                raise ChannelClosedError("the results channel is closed")
            for key in mailbox.keys:
                if key in self._mailboxes:
                    raise ChannelError(f"results for {key!r} are expected already; close that mailbox first")
            self._mailboxes.update(dict.fromkeys(mailbox.keys, mailbox))
            gone = self._gone & mailbox.senders
        for name in gone:
            mailbox._fail(_gone_error(name))

    def _forget(self, mailbox: Mailbox) -> None:
        with self._lock:
            for key in mailbox.keys:
                if self._mailboxes.get(key) is mailbox:
                    del self._mailboxes[key]

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
                if not self._closed:  # out of descriptors, say: others may be freed
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
        """Drop the oldest stranger if there are many, so that none of them keeps a worker out."""
        with self._lock:
            strangers = [sock for sock, name in self._connections.items() if name is None]
            if len(strangers) < _STRANGERS:
                return
            thread = self._threads[strangers[0]]
            del self._connections[strangers[0]]
            _hang_up(strangers[0])
        thread.join()

    def _converse(self, sock: socket.socket) -> None:
        """One worker, from the handshake to its end."""
        name: str | None = None
        in_order = False
        try:
            sock.settimeout(_HANDSHAKE_SECONDS)
            name, answer = wire.welcome(sock, self._key)
            with self._lock:
                if sock not in self._connections:
                    raise ChannelError(f"{name!r} was dropped: {_STRANGERS} newer connections had not shown the key")
                self._connections[sock] = name
                self._gone.discard(name)
            sock.sendall(answer)
            sock.settimeout(None)
            self._read(sock)
            in_order = True
        except Exception as error:
            if not self._closed:
                _log.warning("results channel, %s: %r", f"worker {name!r}" if name else "a stranger", error)
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
            waiting = [mailbox for mailbox in dict.fromkeys(self._mailboxes.values()) if name in mailbox.senders]
        for mailbox in waiting:
            mailbox._fail(_gone_error(name))
        if self.when_gone is not None:
            threading.Thread(target=self.when_gone, name="midstream-gone", daemon=True).start()

    def _read(self, sock: socket.socket) -> None:
        """Frames until the sender says goodbye. Raises ConnectionError if it ends otherwise."""
        streams: dict[str, dict[int, torch.Tensor]] = {}
        while (prefix := wire.read_prefix(sock)).kind is not Kind.BYE:
            try:
                meta, body = wire.read(sock, prefix.meta), wire.read(sock, prefix.body)
                if prefix.kind is Kind.END:
                    streams.pop(pickle.loads(meta), None)
                else:
                    inline = wire.read_payload(sock, prefix) if prefix.descriptor is None else None
                    self._deliver(meta, body, inline, prefix, streams)
            finally:
                if prefix.descriptor is not None:
                    os.close(prefix.descriptor)
            self._pace.wait()

    def _deliver(
        self,
        meta: bytearray,
        body: bytearray,
        payload: torch.Tensor | None,
        prefix: wire.Prefix,
        streams: dict[str, dict[int, torch.Tensor]],
    ) -> None:
        pickled_header, stream, table = pickle.loads(meta)
        header = pickle.loads(pickled_header)
        keys = header["keys"] if "keys" in header else [header["key"]]
        mailboxes = [self._mailboxes.get(key) for key in keys]
        with self._lock:
            self.dropped += mailboxes.count(None)
        if not any(mailboxes):
            streams.pop(stream, None)
            return
        known = streams.setdefault(stream, {}) if stream is not None else {}
        try:
            if payload is None:
                payload = wire.map_memfd(prefix)
            message = Message(header, body, wire.resolve(payload, table, known), size=prefix.payload)
        except Exception as error:  # no room to map it, say: that is this result's trouble, not the channel's
            message = Message(header, body, [], f"taking it in failed: {error!r}")
        # What came together is read here: its readers, who have ended a run of many requests, have no time to lose.
        messages: Sequence[Message | Part] = parts_of(message, keys) if "keys" in header else [message]
        for mailbox, each in zip(mailboxes, messages, strict=True):
            if mailbox is not None:
                mailbox._put(each)


def _listen_unix(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{name}")  # the leading NUL keeps it off the filesystem
    listener.listen(1024)  # a full queue would refuse a worker at once
    return listener


def _is_welcome(sock: socket.socket) -> bool:
    """False for other users of this machine: anyone may connect to an abstract socket."""
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
