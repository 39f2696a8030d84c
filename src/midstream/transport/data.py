"""Values as data: what a server sends to clients elsewhere. Nothing is pickled, so reading a message runs no code of the sender's.

A value is one message. Its tensors travel as raw bytes, the payload, each at a 64-byte aligned offset:

    length of the head | head (msgpack: tree, table of the tensors, size of the payload) | payload

The tree has numbers and texts as they are, and a list `[kind, ...]` for everything else.
"""

from __future__ import annotations

import builtins
import struct
from collections import defaultdict, deque, namedtuple
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Annotated, Any

import msgspec
import numpy as np
import torch

from midstream import errors
from midstream.errors import ChannelError, MidstreamError, UnsendableError, text_of
from midstream.trace.tracer import Cache, CacheEntry, Result
from midstream.transport.wire import Entry, Stream, lay_out, resolve
from midstream.tree import as_bytes, is_raw

MAX_HEAD_BYTES = 64 << 20
_PIECE_BYTES = 1 << 20
_LENGTH = struct.Struct("<I")  # bytes of the head
_DEEPEST = 100
_NO_MESSAGE = "the server sent something that is no message of midstream's"
_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", deque: "deque"}
_FACTORIES: dict[str, type] = {each.__name__: each for each in (*_SEQUENCES, dict, int, float, str)}
_MAKERS: dict[str, Callable[[Any], Any]] = {kind: make for make, kind in _SEQUENCES.items()}


class _Head(msgspec.Struct, array_like=True):
    tree: Any
    table: list[Entry]
    size: Annotated[int, msgspec.Meta(ge=0)]


class Writer:
    """Makes messages. A tensor that an earlier message of this writer has carried is not sent again."""

    def __init__(self) -> None:
        self._stream = Stream()

    def message(self, value: Any) -> Iterator[bytes]:
        """The message of a value, in pieces. What is no data is replaced by an UnsendableError."""
        tensors: dict[int, tuple[int, torch.Tensor]] = {}
        tree = _written(value, tensors, 0)
        numbers = [self._stream.find(tensor) for _, tensor in tensors.values()]
        new = [tensor for (_, tensor), number in zip(tensors.values(), numbers, strict=True) if number is None]
        offsets, size = lay_out(new)
        places = iter(offsets)
        table = [
            Entry(number)
            if number is not None
            else Entry(self._stream.add(tensor), str(tensor.dtype)[6:], tuple(tensor.shape), next(places))
            for (_, tensor), number in zip(tensors.values(), numbers, strict=True)
        ]
        head = msgspec.msgpack.encode(_Head(tree, table, size))
        yield _LENGTH.pack(len(head)) + head
        at = 0
        for tensor, offset in zip(new, offsets, strict=True):
            yield bytes(offset - at)
            data = as_bytes(tensor.cpu()).numpy().data
            for begin in range(0, len(data), _PIECE_BYTES):
                yield bytes(data[begin : begin + _PIECE_BYTES])
            at = offset + len(data)
        yield bytes(size - at)


def joined(pieces: Iterable[bytes], least: int) -> Iterator[bytes]:
    """The same bytes in pieces that have at least so many, the last one excepted."""
    parts, size = list[bytes](), 0
    for piece in pieces:
        parts.append(piece)
        size += len(piece)
        if size >= least:
            yield b"".join(parts)
            parts, size = [], 0
    yield b"".join(parts)


class Reader:
    """Reads the messages of one writer."""

    def __init__(self) -> None:
        self._known: dict[int, torch.Tensor] = {}
        self._parts: deque[memoryview] = deque()
        self._held = 0  # bytes in the parts
        self._wanted = _LENGTH.size
        self._head: _Head | None = None
        self._in_head = False

    def feed(self, data: bytes) -> Iterator[Any]:
        """More bytes have come: the values that they complete. Raises ChannelError for anything but messages."""
        self._parts.append(memoryview(data))
        self._held += len(data)
        while self._held >= self._wanted:
            taken = self._take(self._wanted)
            if self._head is not None:
                yield self._value(self._head, taken)
                self._head, self._wanted = None, _LENGTH.size
            elif self._in_head:
                try:
                    self._head = msgspec.msgpack.decode(taken, type=_Head)
                except (msgspec.MsgspecError, RecursionError) as error:
                    raise ChannelError(f"{_NO_MESSAGE}: {error}") from error
                self._in_head, self._wanted = False, self._head.size
            else:
                (self._wanted,), self._in_head = _LENGTH.unpack(taken), True
                if self._wanted > MAX_HEAD_BYTES:
                    raise ChannelError(_NO_MESSAGE)

    def _take(self, size: int) -> bytearray:
        self._held -= size
        taken = bytearray()
        while len(taken) < size:
            part, missing = self._parts.popleft(), size - len(taken)
            taken += part[:missing]
            if len(part) > missing:
                self._parts.appendleft(part[missing:])
        return taken

    def _value(self, head: _Head, payload: bytearray) -> Any:
        flat = torch.frombuffer(payload, dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)
        try:
            return _read(head.tree, resolve(flat, head.table, self._known))
        except (LookupError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise ChannelError(f"{_NO_MESSAGE}: {error}") from error


# Writing.


def _written(value: Any, tensors: dict[int, tuple[int, torch.Tensor]], depth: int) -> Any:
    kind = type(value)
    if value is None or kind in (bool, float, bytes):
        return value
    if kind is str:
        return value if _is_utf8(value) else ["text", value.encode(errors="surrogatepass")]
    if kind is int:
        return value if -(1 << 63) <= value < 1 << 64 else ["int", hex(value)]
    if depth > _DEEPEST:
        return _unsendable(value, f"it is nested more than {_DEEPEST} deep")

    def each(items: Iterable[Any]) -> list[Any]:
        return [_written(item, tensors, depth + 1) for item in items]

    if isinstance(value, torch.Tensor):
        if not is_raw(value):
            return _unsendable(value, "it is not a plain dense tensor: save `.to_dense()` or `.dequantize()` of it")
        number, _ = tensors.setdefault(id(value), (len(tensors), value))
        return ["tensor", number]
    if kind in _SEQUENCES:
        return [_SEQUENCES[kind], *each(value)]
    if isinstance(value, Cache):
        aliases = [[*at, path] for at, path in value._aliases.items()]
        return ["cache", list(value), aliases, *each([entry.parts() for entry in value.values()])]
    if kind is defaultdict and (factory := getattr(value.default_factory, "__name__", "")) in _FACTORIES:
        return ["defaultdict", factory, each(value), each(value.values())]
    if isinstance(value, dict):  # a ModelOutput, for one, becomes a plain one
        return ["dict", each(value), each(value.values())]
    if isinstance(value, list):
        return ["list", *each(value)]
    if kind is torch.Size:
        return ["size", *value]
    if isinstance(value, tuple):
        if hasattr(value, "_fields"):
            return ["named", kind.__name__, list(value._fields), each(value)]
        if getattr(torch.return_types, kind.__name__, None) is kind:
            return ["returned", kind.__name__, each(value)]
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject and value.dtype.kind != "V":
        array = np.asarray(value)
        return ["array", array.dtype.str, list(array.shape), array.tobytes(), isinstance(value, np.generic)]
    if kind in (torch.dtype, torch.device):
        return [kind.__name__, str(value).removeprefix("torch.")]
    if kind in (range, slice):
        return [kind.__name__, *each((value.start, value.stop, value.step))]
    if kind is complex:
        return ["complex", value.real, value.imag]
    if value is ...:
        return ["ellipsis"]
    if isinstance(value, Result):
        return ["result"]
    if isinstance(value, UnsendableError):
        return ["unsendable", *map(_as_utf8, (value.type_name, value.reason))]
    if isinstance(value, MidstreamError):
        notes = getattr(value, "__notes__", [])
        return [
            "error",
            *_known_class(value),
            _as_utf8(text_of(value)),
            value.field and _as_utf8(value.field),
            [*map(_as_utf8, notes)],
        ]
    return _unsendable(
        value,
        "a server sends tensors, numbers, texts and containers of them, and nothing that code would have to rebuild",
    )


def _unsendable(value: Any, reason: str) -> list[Any]:
    return ["unsendable", type(value).__qualname__, reason]


def _is_utf8(text: str) -> bool:
    return text.isascii() or _as_utf8(text) == text


def _as_utf8(text: str) -> str:
    """The text, with its lone surrogates as escapes."""
    return text.encode(errors="backslashreplace").decode()


def _known_class(error: MidstreamError) -> tuple[str, str | None]:
    """The nearest class of midstream's that a client has, and the nearest builtin one."""
    own = next(each.__name__ for each in type(error).__mro__ if getattr(errors, each.__name__, None) is each)
    builtin = next(each.__name__ for each in type(error).__mro__ if each.__module__ == "builtins")
    return own, None if builtin == "Exception" else builtin


# Reading.


def _read(tree: Any, tensors: list[torch.Tensor | None]) -> Any:
    if not isinstance(tree, list):
        return tree

    def each(items: Iterable[Any]) -> list[Any]:
        return [_read(item, tensors) for item in items]

    match tree:
        case ["tensor", number]:
            return tensors[number]
        case ["dict", keys, values]:
            return dict(zip(each(keys), each(values), strict=True))
        case ["defaultdict", name, keys, values]:
            return defaultdict(_FACTORIES[name], zip(each(keys), each(values), strict=True))
        case ["cache", paths, aliases, *entries]:
            cache = Cache(zip(paths, map(CacheEntry.of, each(entries)), strict=True))
            cache._aliases = {(owner, name): path for owner, name, path in aliases}
            return cache
        case ["size", *shape]:
            return torch.Size(shape)
        case ["named", name, fields, items]:
            return namedtuple(name, fields)(*each(items))  # type: ignore[misc]
        case ["returned", name, items]:
            return _class(torch.return_types, name, tuple)(each(items))
        case ["array", dtype, shape, data, is_scalar]:
            array = np.frombuffer(bytearray(data), np.dtype(dtype)).reshape(shape)
            return array[()] if is_scalar else array
        case ["dtype", name]:
            return _dtypes()[name]
        case ["device", name]:
            return torch.device(name)
        case ["range" | "slice" as name, *arguments]:
            return getattr(builtins, name)(*each(arguments))
        case ["ellipsis"]:
            return ...
        case ["result"]:
            return Result()
        case ["text", data]:
            return bytes(data).decode(errors="surrogatepass")
        case ["int", digits]:
            return int(digits, 16)
        case ["complex", real, imaginary]:
            return complex(real, imaginary)
        case ["unsendable", type_name, reason]:
            return UnsendableError(type_name, reason)
        case ["error", own, builtin, message, field, notes]:
            return _error(own, builtin, message, field, notes)
        case [kind, *items] if kind in _MAKERS:
            return _MAKERS[kind](each(items))
    raise ChannelError(
        f"the server sent a value of the unknown kind {tree[:1]}: this midstream may be older than the server's"
    )


@cache
def _dtypes() -> dict[str, torch.dtype]:
    return {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)}


def _error(own: str, builtin: str | None, message: str, field: str | None, notes: list[str]) -> MidstreamError:
    """An error of a class of midstream's; if it has a builtin base beside, as InterventionErrors do, of a class with both."""
    cls, base = _class(errors, own, MidstreamError), _class(builtins, builtin, Exception)
    if not issubclass(cls, base):
        name = cls.__name__.removesuffix("Error") + base.__name__  # InterventionValueError, as in `Failure.exception`
        cls = type(name, (cls, base), {"__module__": cls.__module__, "__str__": Exception.__str__})
    error: MidstreamError = cls(message)
    error.field = field
    for note in notes:
        error.add_note(note)
    return error


def _class(module: Any, name: str | None, base: type) -> Any:
    found = getattr(module, name or "", None)
    return found if isinstance(found, type) and issubclass(found, base) else base
