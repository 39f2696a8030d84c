"""Writes and reads values as data, and the messages that bring them from a server to its clients in an HTTP response.

Data is msgpack of the closed list of types in `_KINDS`, so reading it (`unpack_data`) runs none of the sender's code. Numbers and texts
stand for themselves, and every other value is a list `[kind, *parts]`. Tensors and messages are as in `transport.messages`, but the bodies
are data.
"""

from __future__ import annotations

import builtins
from collections import defaultdict, deque, namedtuple
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import cache
from types import EllipsisType
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from midstream import errors
from midstream.errors import ChannelError, MidstreamError, UnsendableError, text_of
from midstream.trace.containers import FACTORIES
from midstream.trace.tracer import Cache, CacheEntry, Result
from midstream.transport.messages import (
    LENGTH,
    Frame,
    Packed,
    SentTensors,
    TensorEntry,
    decode,
    head_and_body,
    message_part,
    resolve_tensors,
    with_tensors,
)
from midstream.tree import as_bytes, is_raw

NO_MESSAGE = "the server sent something that is no message of midstream's"
_DEEPEST = 100
_MAX_HEAD_BYTES = 64 << 20
_CHUNK_BYTES, _LEAST_BYTES = 1 << 20, 1 << 16


def pack_data(value: Any, stream: SentTensors | None = None) -> Packed:
    """Pack a value as `messages.pack` does, but with data as the body."""
    return with_tensors(*_as_data(value), stream)


def message_chunks(packed: Packed) -> Iterator[bytes]:
    """The message of a value that was packed as data, in chunks of 64 KiB to about 1 MiB. The last one may be shorter."""
    parts = [head_and_body(Frame([message_part([], packed)]), packed.body)]
    held = at = 0
    for tensor, offset in zip(packed.tensors, packed.offsets, strict=True):
        parts.append(bytes(offset - at))
        data = as_bytes(tensor.cpu()).numpy().data
        at = offset + len(data)
        for begin in range(0, len(data), _CHUNK_BYTES):
            parts.append(bytes(data[begin : begin + _CHUNK_BYTES]))
            held += len(parts[-1])
            if held >= _LEAST_BYTES:
                yield b"".join(parts)
                parts, held = [], 0
    yield b"".join([*parts, bytes(packed.size - at)])


class MessageReader:
    """Reads the messages of one stream of values as data."""

    def __init__(self) -> None:
        self._known: dict[int, torch.Tensor] = {}
        self._parts: deque[memoryview] = deque()
        self._held = 0  # bytes in the parts
        self._reading = self._message()
        self._needed = next(self._reading)

    def feed(self, data: bytes) -> Iterator[Any]:
        """Take more bytes, and return the values that they complete. Raises ChannelError for anything but messages."""
        self._parts.append(memoryview(data))
        self._held += len(data)
        while self._held >= self._needed:
            try:
                self._needed = self._reading.send(self._take(self._needed))
            except StopIteration as done:
                yield done.value
                self._reading = self._message()
                self._needed = next(self._reading)
            except (RecursionError, ValueError) as error:
                raise ChannelError(f"{NO_MESSAGE}: {error}") from error

    def _message(self) -> Generator[int, bytearray, Any]:
        """Reads one message: yields how many bytes it needs next, and is sent them."""
        (size,) = LENGTH.unpack((yield LENGTH.size))
        if size > _MAX_HEAD_BYTES:
            raise ChannelError(NO_MESSAGE)
        (head,) = decode((yield size)).parts
        body, payload = (yield head.body), (yield head.payload)
        flat = torch.frombuffer(payload, dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)
        return unpack_data(body, flat, head.table, self._known)

    def _take(self, size: int) -> bytearray:
        self._held -= size
        taken = bytearray()
        while len(taken) < size:
            part, missing = self._parts.popleft(), size - len(taken)
            taken += part[:missing]
            if len(part) > missing:
                self._parts.appendleft(part[missing:])
        return taken


# Values.


def register_data_kind(
    cls: type, parts: Callable[[Any], Iterable[Any]] | None = None, make: Callable[..., Any] | None = None
) -> None:
    """Add a class to the types that are written as data. By default its parts are its fields."""
    names: tuple[str, ...] = getattr(cls, "__match_args__", ())
    _KINDS[cls.__name__] = _Kind(cls, parts or (lambda value: [getattr(value, name) for name in names]), make or cls)
    _NAMES[cls] = cls.__name__


def unpack_data(
    body: bytes | bytearray, payload: torch.Tensor, table: Sequence[TensorEntry], known: dict[int, torch.Tensor]
) -> Any:
    """The value that `pack_data` wrote. Raises ChannelError for anything else. Arguments as for `resolve_tensors`."""

    def read(tree: Any) -> Any:
        if not isinstance(tree, list):
            return tree
        name, *parts = tree
        if name == "tensor":
            return tensors[parts[0]]
        if name not in _KINDS:
            raise ValueError(f"values of the unknown kind {name!r}; this midstream may be older than the server's")
        return _KINDS[name].make(*map(read, parts))

    try:
        tensors = resolve_tensors(payload, table, known)
        if any(tensor is None for tensor in tensors):
            raise LookupError("a tensor that was to come earlier")
        return read(msgspec.msgpack.decode(body))
    except (ArithmeticError, AttributeError, LookupError, MidstreamError, RuntimeError, TypeError, ValueError) as error:
        raise ChannelError(f"{NO_MESSAGE}: {error}") from error


def _as_data(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    tensors: dict[int, tuple[int, torch.Tensor]] = {}  # by id, with their numbers

    def written(value: Any, depth: int) -> Any:
        kind = type(value)
        if value is None or kind in (bool, float, bytes):
            return value
        is_utf8 = kind is str and (value.isascii() or _as_utf8(value) == value)
        if is_utf8 or (kind is int and -(1 << 63) <= value < 1 << 64):
            return value
        if depth > _DEEPEST:
            return _unsendable(value, f"it is nested more than {_DEEPEST} deep")
        if isinstance(value, torch.Tensor):
            if not is_raw(value):
                return _unsendable(value, "it is not a plain dense tensor: save `.to_dense()` or `.dequantize()` of it")
            return ["tensor", tensors.setdefault(id(value), (len(tensors), value))[0]]
        if (name := _kind_of(value)) is None:
            reason = "a server sends tensors, numbers, texts and containers of them, and nothing that code would have to rebuild"
            return _unsendable(value, reason)
        return [name, *[written(part, depth + 1) for part in _KINDS[name].parts(value)]]

    return msgspec.msgpack.encode(written(value, 0)), [tensor for _, tensor in tensors.values()]


def _unsendable(value: Any, reason: str) -> list[Any]:
    return ["unsendable", type(value).__qualname__, reason]


def _kind_of(value: Any) -> str | None:
    kind = type(value)
    if kind is defaultdict and getattr(value.default_factory, "__name__", "") not in FACTORIES:
        return "dict"
    if kind in _NAMES:
        return _NAMES[kind]
    if isinstance(value, tuple):
        if hasattr(value, "_fields"):
            return "named"
        return "returned" if getattr(torch.return_types, kind.__name__, None) is kind else None
    if isinstance(value, (np.ndarray, np.generic)):
        return None if value.dtype.hasobject or value.dtype.kind == "V" else "array"
    bases = (Cache, dict, list, Result, UnsendableError, MidstreamError)  # a ModelOutput, for one, becomes a plain dict
    return next((_NAMES[base] for base in bases if isinstance(value, base)), None)


class _Kind(NamedTuple):
    """How values of a kind are written as data.

    Attributes:
        of: the class of the values; None if `_kind_of` recognises them in another way.
        parts: returns the parts of a value.
        make: makes the value from its parts. It must run no code that the parts choose.
    """

    of: type | None
    parts: Callable[[Any], Iterable[Any]]
    make: Callable[..., Any]


def _sequence(kind: type) -> _Kind:
    return _Kind(kind, iter, lambda *items: kind(items))


def _as_utf8(text: str) -> str:
    """The text, with its lone surrogates as escapes."""
    return text.encode(errors="backslashreplace").decode()


def _flat(items: dict[Any, Any]) -> list[Any]:
    return [each for item in items.items() for each in item]


def _pairs(flat: Sequence[Any]) -> Iterable[tuple[Any, Any]]:
    return zip(flat[::2], flat[1::2], strict=True)


def _cache_parts(cache: Cache) -> list[Any]:
    aliases = [(*at, path) for at, path in cache._aliases.items()]
    return [list(cache), aliases, *[entry.calls for entry in cache.values()]]


def _cache(paths: list[str], aliases: list[tuple[str, str, str]], *entries: Any) -> Cache:
    made = Cache(zip(paths, map(CacheEntry, entries), strict=True))
    made._aliases = {(owner, name): path for owner, name, path in aliases}
    return made


def _array(dtype: str, shape: tuple[int, ...], data: bytes, is_scalar: bool) -> Any:
    array = np.frombuffer(bytearray(data), np.dtype(dtype)).reshape(shape)
    return array[()] if is_scalar else array


def _array_parts(value: Any) -> tuple[Any, ...]:
    array = np.asarray(value)
    return array.dtype.str, array.shape, array.tobytes(), isinstance(value, np.generic)


@cache
def _dtypes() -> dict[str, torch.dtype]:
    return {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)}


def _error_parts(error: MidstreamError) -> tuple[Any, ...]:
    """The error as data: its nearest class in `midstream.errors`, its nearest builtin class, its text, its field and its notes."""
    own = next(each.__name__ for each in type(error).__mro__ if getattr(errors, each.__name__, None) is each)
    builtin = next(each.__name__ for each in type(error).__mro__ if each.__module__ == "builtins")
    notes = [_as_utf8(note) for note in getattr(error, "__notes__", [])]
    field = error.field and _as_utf8(error.field)
    return own, None if builtin == "Exception" else builtin, _as_utf8(text_of(error)), field, notes


def _error(own: str, builtin: str | None, message: str, field: str | None, notes: list[str]) -> MidstreamError:
    """An error of a midstream class. If it also had a builtin base, as InterventionErrors do, its class has both bases."""
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


_KINDS = {
    "list": _sequence(list),
    "tuple": _sequence(tuple),
    "set": _sequence(set),
    "frozenset": _sequence(frozenset),
    "deque": _sequence(deque),
    "size": _sequence(torch.Size),
    "dict": _Kind(dict, _flat, lambda *flat: dict(_pairs(flat))),
    "defaultdict": _Kind(
        defaultdict,
        lambda d: [d.default_factory.__name__, *_flat(d)],
        lambda factory, *flat: defaultdict(FACTORIES[factory], _pairs(flat)),
    ),
    "cache": _Kind(Cache, _cache_parts, _cache),
    "named": _Kind(
        None,
        lambda t: [type(t).__name__, list(t._fields), *t],
        lambda name, fields, *items: namedtuple(name, fields)(*items),  # type: ignore[misc]
    ),
    "returned": _Kind(
        None, lambda t: [type(t).__name__, *t], lambda name, *items: _class(torch.return_types, name, tuple)(items)
    ),
    "array": _Kind(None, _array_parts, _array),
    "dtype": _Kind(torch.dtype, lambda dtype: [str(dtype)[6:]], lambda name: _dtypes()[name]),
    "device": _Kind(torch.device, lambda device: [str(device)], torch.device),
    "range": _Kind(range, lambda r: (r.start, r.stop, r.step), range),
    "slice": _Kind(slice, lambda s: (s.start, s.stop, s.step), slice),
    "complex": _Kind(complex, lambda number: (number.real, number.imag), complex),
    "int": _Kind(int, lambda number: [hex(number)], lambda digits: int(digits, 16)),
    "text": _Kind(
        str, lambda text: [text.encode(errors="surrogatepass")], lambda data: data.decode(errors="surrogatepass")
    ),
    "ellipsis": _Kind(EllipsisType, lambda _: (), lambda: ...),
    "result": _Kind(Result, lambda _: (), Result),
    "unsendable": _Kind(UnsendableError, lambda e: map(_as_utf8, (e.type_name, e.reason)), UnsendableError),
    "error": _Kind(MidstreamError, _error_parts, _error),
}
_NAMES = {kind.of: name for name, kind in _KINDS.items() if kind.of is not None}
