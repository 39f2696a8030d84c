"""Values as bytes: a body, and a payload with the tensors of the value, each raw and at a 64-byte aligned offset.

`pack` writes the body in one of two forms. Between an engine's own processes it is a pickle. From a server to its clients it is data:
msgpack of the closed list of types in `_KINDS`, so reading it (`unpack_data`) runs none of the sender's code. In data, numbers and
texts stand for themselves, and every other value is a list `[kind, *parts]`.
"""

from __future__ import annotations

import builtins
import dataclasses
import io
import math
import pickle
import weakref
from collections import defaultdict, deque, namedtuple
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from types import EllipsisType
from typing import Annotated, Any, NamedTuple

import cloudpickle
import msgspec
import numpy as np
import torch
from cloudpickle.cloudpickle import _class_setstate

from midstream import errors
from midstream.errors import ChannelError, MidstreamError, UnsendableError, text_of
from midstream.trace.shipping import OUT_OF_BAND, is_sent, itself
from midstream.trace.tracer import Cache, CacheEntry, Result
from midstream.tree import is_raw, movable

ALIGNMENT = 64  # bytes; a cache line, and more than any dtype needs
NO_MESSAGE = "the server sent something that is no message of midstream's"
_DEEPEST = 100

Size = Annotated[int, msgspec.Meta(ge=0)]


class TensorEntry(NamedTuple):
    """One tensor of a message. A tensor that was sent earlier on the same stream has no dtype: the receiver looks it up."""

    number: int | None  # its number on the stream; None if the message belongs to no stream
    dtype: str | None = None  # "bfloat16"
    shape: tuple[int, ...] = ()
    offset: int = 0  # bytes from the start of the payload


class SentTensors:
    """The tensors that were sent on a stream. Holds them weakly."""

    def __init__(self) -> None:
        self._sent: dict[int, tuple[weakref.ref[torch.Tensor], int, int]] = {}  # id -> (tensor, version, number)
        self._count = 0

    def find(self, tensor: torch.Tensor) -> int | None:
        """The number under which this tensor was sent; None if it was not sent, or has changed since."""
        reference, version, number = self._sent.get(id(tensor), (None, 0, 0))
        if reference is None or reference() is not tensor or version != _version(tensor):
            return None
        return number

    def add(self, tensor: torch.Tensor) -> int:
        number, self._count = self._count, self._count + 1
        self._sent[id(tensor)] = (weakref.ref(tensor), _version(tensor), number)
        return number


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # inference tensors do not count their changes


class Packed(NamedTuple):
    """A value as a body and tensors."""

    body: bytes
    table: list[TensorEntry]
    tensors: list[torch.Tensor]  # the new ones only, without grad, in the table's order
    offsets: list[int]  # bytes, one for each of `tensors`
    size: int  # bytes of the payload


def pack(value: Any, stream: SentTensors | None = None, *, exact: bool = False, as_data: bool = False) -> Packed:
    """Divide `value` into a body and tensors. Parts that cannot be written become an `UnsendableError`; they never raise.

    Args:
        stream: tensors that were sent on it are not sent again unless they have changed.
        exact: send tensors made in inference mode even if `stream` has carried them: their changes cannot be seen.
        as_data: write the value as data, not as a pickle.
    """
    body, found = _as_data(value) if as_data else _pickled(value)
    known = [stream.find(tensor) if stream and not (exact and tensor.is_inference()) else None for tensor in found]
    new = [tensor for tensor, number in zip(found, known, strict=True) if number is None]
    offsets, size = payload_offsets(new)
    entries = (
        TensorEntry(stream.add(tensor) if stream else None, str(tensor.dtype)[6:], tuple(tensor.shape), offset)
        for tensor, offset in zip(new, offsets, strict=True)
    )
    table = [TensorEntry(number) if number is not None else next(entries) for number in known]
    with torch._C.DisableTorchFunctionSubclass():  # a parameter class may wrap what detach returns
        return Packed(body, table, [tensor.detach() for tensor in new], offsets, size)


def payload_offsets(tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Aligned offsets for `tensors` in a payload, and the payload's size in bytes.

    The tensors of one device lie next to each other, so that they can be staged as one range.
    """
    offsets, end = [0] * len(tensors), 0
    for i in sorted(range(len(tensors)), key=lambda i: str(tensors[i].device)):
        offsets[i] = end
        size = tensors[i].numel() * tensors[i].element_size()
        end += math.ceil(size / ALIGNMENT) * ALIGNMENT
    return offsets, end


def resolve_tensors(
    payload: torch.Tensor, table: Sequence[TensorEntry], known: dict[int, torch.Tensor]
) -> list[torch.Tensor | None]:
    """The tensors of a message: new ones as views of `payload` (uint8, flat), the others from `known`, None if lost.

    New tensors of a stream are added to `known`. Each tensor has a storage that ends where the tensor ends, because
    `torch.save` writes the whole storage. All of them keep the payload alive.
    """
    memory, tensors = payload.numpy(), list[torch.Tensor | None]()
    for number, dtype_name, shape, offset in table:
        found = known.get(number) if number is not None else None
        if dtype_name is not None:
            dtype: torch.dtype = getattr(torch, dtype_name)
            size = math.prod(shape) * dtype.itemsize
            flat = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=offset) if size else torch.empty(0)
            found = flat.view(dtype).reshape(shape)
            if number is not None:
                known[number] = found
        tensors.append(found)
    return tensors


# --------------------------------------------------------------------------------------------------------- as a pickle


def unpack(body: bytes | bytearray, tensors: Sequence[torch.Tensor | None]) -> Any:
    """The value. An `UnsendableError` if a tensor was lost, or if this process cannot rebuild the value, for example without a class."""
    if any(tensor is None for tensor in tensors):
        return UnsendableError("(unknown here)", "a tensor sent earlier on its stream was dropped")
    try:
        return _Unpickler(io.BytesIO(body), buffers=tensors).load()
    except Exception as error:
        return UnsendableError("(unknown here)", f"rebuilding it failed: {error!r}")


class _Pickler(cloudpickle.Pickler):
    """Pickles a value, with its tensors as out-of-band buffers."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL, buffer_callback=lambda buffer: buffer is not OUT_OF_BAND)
        self.tensors: list[torch.Tensor] = []

    def reducer_override(self, obj: Any) -> Any:  # unlike persistent_id, not called for every number and string
        if not is_raw(obj):
            if isinstance(obj, torch.Tensor) and (there := movable(obj)) is not obj:
                return there.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            return super().reducer_override(obj)
        self.tensors.append(obj)  # called once for each tensor: pickle remembers what it has seen
        return itself, (OUT_OF_BAND,)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return _fill_copies if found is _class_setstate else found


def _fill_copies(kind: type, state: Any) -> Any:
    """Set the attributes of a class that came by value. A class of this process, which a trace has returned, keeps its own."""
    return kind if is_sent(kind) else _class_setstate(kind, state)


class _ForgivingPickler(_Pickler):
    """Pickles an `UnsendableError` in place of each object that cannot be pickled. Containers and dataclasses stay."""

    def reducer_override(self, obj: Any) -> Any:
        is_container = isinstance(obj, dict) or hasattr(obj, "_make") or dataclasses.is_dataclass(obj)
        if not is_container and not is_raw(obj):
            try:
                _pickle(obj, _Pickler)
            except Exception as error:
                return UnsendableError, (type(obj).__qualname__, repr(error))
        return super().reducer_override(obj)


def _pickled(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    for pickler in (_Pickler, _ForgivingPickler):
        try:
            return _pickle(value, pickler)
        except Exception as error:  # from the second one, a container whose own class cannot be pickled
            failure = UnsendableError(type(value).__qualname__, repr(error))
    return _pickle(failure, _Pickler)


def _pickle(value: Any, kind: type[_Pickler]) -> tuple[bytes, list[torch.Tensor]]:
    pickler = kind(file := io.BytesIO())
    pickler.dump(value)
    return file.getvalue(), pickler.tensors


# ------------------------------------------------------------------------------------------------------------- as data


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
    """The value. Raises ChannelError for anything that `pack` does not write as data. Arguments as for `resolve_tensors`."""

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
    if kind is defaultdict and getattr(value.default_factory, "__name__", "") not in _FACTORIES:
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
    """The nearest class of midstream's that a client has, the nearest builtin one, the text, and the notes."""
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


_FACTORIES: dict[str, type] = {
    each.__name__: each for each in (list, tuple, set, frozenset, deque, dict, int, float, str)
}
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
        lambda factory, *flat: defaultdict(_FACTORIES[factory], _pairs(flat)),
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
