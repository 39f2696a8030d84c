"""Sends a trace's code to the engine, and copies it for this process.

Code goes by value, except for the model's own objects, which the worker replaces by its own. Tensors and arrays are sent separately
(`trace.weights`).
"""

from __future__ import annotations

import contextlib
import enum
import functools
import gc
import inspect
import io
import operator
import pickle
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from types import CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any
from weakref import WeakValueDictionary

import cloudpickle
import torch
from cloudpickle.cloudpickle import _extract_code_globals
from torch.utils._device import DeviceContext

from midstream.errors import MidstreamError, TraceError
from midstream.trace.code import BlockProgram, FunctionProgram, TraceProgram, plain_function
from midstream.trace.saves import ORIGINALS, is_imported, is_installed, variables_of
from midstream.trace.weights import Weight, Weights, values_of
from midstream.tree import movable

_CHANGING_CLOUDPICKLE = threading.Lock()


def _reference(value: Any) -> Any:
    """The part of the running model that the caller's value stands for in a trace; None for an ordinary value."""
    refers = getattr(type(value), "__midstream_reference__", None)
    return refers(value) if refers is not None else None


OUT_OF_BAND = pickle.PickleBuffer(bytearray())  # stands for a tensor in a pickle


def itself(value: Any) -> Any:
    """The argument. Pickles call it to refer to a value that they contain already, or to an out-of-band buffer."""
    return value


class CodePickler(cloudpickle.Pickler):
    """Pickles code. `weights` collects its tensors and arrays, in the order of the out-of-band buffers that stand for them."""

    def __init__(self, buffer: io.BytesIO, weights: Weights) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL, buffer_callback=lambda each: each is not OUT_OF_BAND)
        self._weights = weights

    def persistent_id(self, obj: Any) -> Any:
        return _reference(obj)

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)  # isinstance might run the object's own code
        if self._weights.takes(obj):
            self._weights.take(obj)
            own = _attributes(obj) if issubclass(kind, torch.Tensor) else {}
            return itself, (OUT_OF_BAND,), own or None, None, None, _set_attributes
        if issubclass(kind, torch.Tensor) and (there := movable(obj)) is not obj:
            return there.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if issubclass(kind, _LruCache) and not _is_imported(obj):
            return _make_lru_cache, (obj.__wrapped__, obj.cache_parameters())
        if kind is FunctionType and obj.__code__ is _DISPATCHER and not _is_imported(obj):
            return _make_singledispatch, (obj.__wrapped__, [*obj.registry.items()])  # type: ignore[attr-defined]
        if kind is functools.cached_property:  # it has a lock in Python 3.11
            return functools.cached_property, (obj.func,), {"attrname": obj.attrname, "__doc__": obj.__doc__}
        if (view_of := _VIEWS.get(kind)) is not None:  # cloudpickle would copy what the dict has now
            return view_of, tuple(gc.get_referents(obj))
        if kind.__module__ == "torch._ops" and (found := _operation(obj)) is not None:
            return found
        if kind is FunctionType:
            _note_globals(obj.__code__)
        reduced = super().reducer_override(obj)
        if issubclass(kind, type) and isinstance(reduced, tuple) and len(reduced) == 6:  # a class that goes by value
            maker, args, state, *_, fill = reduced
            _SENT[args[-2]] = obj
            if vars(obj).get("__slots__") and not issubclass(obj, (enum.Enum, tuple)):  # cloudpickle leaves them out
                args = (*args[:3], {**args[3], "__slots__": obj.__slots__}, *args[4:])
            return _make_class, (maker, args), (args[-2], fill, state), None, None, _fill_class
        return reduced


def _attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """The attributes that the caller has given to a tensor, and its gradient if it has one."""
    own = dict(object.__getattribute__(tensor, "__dict__"))
    return {**own, "grad": tensor.grad} if tensor.is_leaf and tensor.grad is not None else own


def _set_attributes(tensor: torch.Tensor, own: dict[str, Any]) -> None:
    for name, value in own.items():
        setattr(tensor, name, value)


def _operation(obj: Any) -> Any:
    """How to pickle `torch.ops`, or a namespace or an operation in it: as an attribute of its parent. None for other objects."""
    if obj is torch.ops:
        return getattr, (torch, "ops")
    if isinstance(obj, torch._ops._OpNamespace):
        return getattr, (torch.ops, obj.name)
    if isinstance(obj, torch._ops.OpOverloadPacket):
        namespace, _, name = obj._qualified_op_name.partition("::")
        return getattr, (getattr(torch.ops, namespace), name)
    return (getattr, (obj.overloadpacket, obj._overloadname)) if isinstance(obj, torch._ops.OpOverload) else None


_LruCache = type(functools.lru_cache(_reference))
# The types of views of a dict -> functions that make one.
_VIEWS: dict[type, Callable[..., Any]] = {
    type(getattr(kind(), name)()): getattr(kind, name)
    for kind in (dict, OrderedDict)
    for name in ("keys", "values", "items")
}
_VIEWS[MappingProxyType] = MappingProxyType
_DISPATCHER = functools.singledispatch(_reference).__code__  # type: ignore[attr-defined]
_SENT: WeakValueDictionary[str, type] = WeakValueDictionary()  # cloudpickle's id of a class -> this process's own class


def _note_globals(code: CodeType) -> dict[str, Any]:
    """Make cloudpickle send globals that it does not look for: those of class bodies in the code, and names that the code may look up in
    `globals()`.
    """
    names: dict[str, Any] = _extract_code_globals(code)  # cloudpickle's cached dict for this code
    if "globals" in code.co_names:
        names.update(dict.fromkeys(const for const in code.co_consts if type(const) is str))
    for const in code.co_consts:
        if isinstance(const, CodeType):
            names.update(_note_globals(const))
            if not const.co_flags & inspect.CO_OPTIMIZED:  # a class body
                names.update(dict.fromkeys(const.co_names))
    return names


def is_sent(kind: type) -> bool:
    """Whether this process has sent the class by value with code."""
    return any(kind is each for each in _SENT.values())


def _make_lru_cache(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _make_singledispatch(default: Any, registry: list[tuple[type, Any]]) -> Any:
    made = functools.singledispatch(default)
    for kind, function in registry:
        made.register(kind, function)
    return made


def _make_class(maker: Callable[..., type], args: tuple[Any, ...], apart: bool = False) -> type:
    """A class that came by value. In the process that sent it, this is a copy: cloudpickle would put copied methods into the original."""
    original = _SENT.get(args[-2])
    if original is None:
        return maker(*args[:-2], None, args[-1]) if apart else maker(*args)
    if issubclass(original, enum.Enum):  # members are compared by identity
        return original
    made = maker(*args[:-2], None, args[-1])
    ORIGINALS[made] = original
    return made


def _fill_class(made: type, state: tuple[str, Callable[..., Any], Any]) -> None:
    name, fill, attributes = state
    if _SENT.get(name) is not made:
        fill(made, attributes)


def _is_imported(function: Any) -> bool:
    """Whether the engine imports a function, or a decorator's result, by name."""
    by_value = cloudpickle.list_registry_pickle_by_value()
    module = function.__module__ or ""
    return is_imported(function) and not any(module == name or module.startswith(f"{name}.") for name in by_value)


class _CopyPickler(CodePickler):
    """Pickles code for this process. Some objects are not copied: those of models, those for which `keeps` returns True, and those that
    cannot be pickled.

    Attributes:
        originals: these objects.
    """

    def __init__(self, buffer: io.BytesIO, weights: Weights, keeps: Callable[[Any], bool]) -> None:
        super().__init__(buffer, weights)
        self._keeps = keeps
        self._places: dict[int, int] = {}
        self.originals: list[Any] = []

    def persistent_id(self, obj: Any) -> Any:
        if id(obj) in self._places or super().persistent_id(obj) is not None or self._keeps(obj):
            return self._place(obj)
        return None

    def _place(self, obj: Any) -> int:
        if id(obj) not in self._places:
            self._places[id(obj)] = len(self.originals)
            self.originals.append(obj)
        return self._places[id(obj)]

    def reducer_override(self, obj: Any) -> Any:
        if issubclass(type(obj), (type, FunctionType)):
            return super().reducer_override(obj)
        try:
            reduced = super().reducer_override(obj)
            if reduced is not NotImplemented:
                return reduced
            reduce = self.dispatch_table.get(type(obj))
            return obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL) if reduce is None else reduce(obj)
        except Exception:
            self._place(obj)
            return itself, (obj,)


class _CodeUnpickler(pickle.Unpickler):
    def __init__(
        self, source: io.BytesIO, resolve: Callable[[Any], Any], values: Mapping[int, Any], apart: bool = False
    ) -> None:
        super().__init__(source, buffers=map(values.__getitem__, count()))
        self._resolve, self._apart = resolve, apart

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return functools.partial(found, apart=True) if self._apart and found is _make_class else found

    def persistent_load(self, pid: Any) -> Any:
        return self._resolve(pid)


@dataclass(frozen=True)
class ShippedCode:
    """The code of several requests.

    Attributes:
        programs: the programs of each request, pickled, after a table of the tensors and arrays that they use.
        bodies: how many programs each request has: standing edits, then its own.
        weights: the tensors' content that the workers must hold, by digest.
        by_name: why it contains only the names of the user's own modules, which the engine then imports; None if it contains the modules.
    """

    programs: bytes
    bodies: list[int]
    weights: Mapping[str, Weight] = field(default_factory=dict)
    by_name: str | None = None


def ship(programs: list[list[TraceProgram]], elsewhere: bool = False) -> ShippedCode:
    """The programs of each request with the user's own modules. Objects that they share stay shared.

    Args:
        elsewhere: whether they run on a machine that has only installed packages. All tensors then go with the code.

    Raises:
        TraceError: names the value that cannot be sent, or a setting of PyTorch in this process that would not reach the code.
    """
    _check_settings()
    try:
        return _shipped(programs, _by_value(_own_modules), not elsewhere)
    except Exception as error:
        with _by_value(_own_modules):
            found = next((each for own in programs for program in own for each in _unsendable(program)), None)
        if not elsewhere:  # the value may be in a module of the user's, which the engine can import
            what = "a value" if found is None else f"{found[0]}, a {type(found[1]).__name__},"
            reason = f"it uses {what} which cannot be sent, so the engine imports its module: {error}"
            with contextlib.suppress(Exception):
                return replace(_shipped(programs, contextlib.nullcontext(), True), by_name=reason)
        what = "" if found is None else f", {found[0]},"
        raise TraceError(f"The trace uses a value{what} that cannot be sent to the engine: {error}") from error


def _check_settings() -> None:
    """Raise TraceError for a setting of this process that changes what PyTorch's operations return: the engine's process lacks it."""
    if (dtype := torch.get_default_dtype()) is not torch.float32:
        raise TraceError(
            f"The default dtype of this process is {dtype}, and a trace's code runs in another process, where it is torch.float32. Call "
            "torch.set_default_dtype(torch.float32) before the trace, and give dtype= to the calls that need another."
        )
    if torch._C._is_any_autocast_enabled():
        raise TraceError(
            "torch.autocast is on here, and does not reach a trace's code, which runs in another process: write "
            "`with torch.autocast(...):` in the trace, and make the trace outside of it."
        )
    modes = [type(each) for each in torch.overrides._get_current_function_mode_stack()]
    if other := next((kind for kind in modes if kind is not DeviceContext), None):  # that of `set_default_device`
        raise TraceError(
            f"{other.__qualname__} is active here, and does not reach a trace's code, which runs in another process: enter it in the trace."
        )


def _shipped(
    programs: list[list[TraceProgram]], modules: contextlib.AbstractContextManager[None], apart: bool
) -> ShippedCode:
    buffer, weights = io.BytesIO(), Weights(apart=apart)
    with modules:
        CodePickler(buffer, weights).dump(programs)
    head, needed = weights.table(functools.partial(_name_of, programs))
    data = b"".join((bytes(sys.version_info[:2]), pickle.dumps(head), buffer.getbuffer()))
    return ShippedCode(data, [len(each) for each in programs], needed)


def copies(programs: Sequence[TraceProgram], keeps: Callable[[Any], bool]) -> list[TraceProgram]:
    """Copies of the programs and of the values of their variables, for this process. Importable functions are copied, too.

    Gradients reach the caller's tensors: `Weights.copies` says which of them are copied. A value that cannot be copied, or for which
    `keeps` returns True, stays the caller's own. Raises TraceError if a copy cannot be built.
    """
    functions = [plain_function(program.fn) for program in programs if isinstance(program, FunctionProgram)]
    homes = {sys.modules.get(getattr(fn, "__module__", None) or "__main__") for fn in functions}
    buffer, weights = io.BytesIO(), Weights()
    pickler = _CopyPickler(buffer, weights, keeps)
    try:
        with _by_value(lambda: [module for module in homes if module is not None and _is_own(module)]):
            pickler.dump(list(programs))
        with torch.inference_mode(False):
            values = weights.copies()
        buffer.seek(0)
        found: list[TraceProgram] = _CodeUnpickler(buffer, pickler.originals.__getitem__, values).load()
    except MidstreamError:
        raise
    except Exception as error:
        raise TraceError(f"The trace uses a value that cannot be copied: {type(error).__name__}: {error}") from error
    return found


@contextlib.contextmanager
def _by_value(modules: Callable[[], Iterable[ModuleType]]) -> Iterator[None]:
    """Pickle functions and classes of these modules by value. One thread at a time, since this changes cloudpickle."""
    with _CHANGING_CLOUDPICKLE:
        own = [each for each in modules() if each.__name__ not in cloudpickle.list_registry_pickle_by_value()]
        for module in own:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in own:
                cloudpickle.unregister_pickle_by_value(module)


_KNOWN_MODULES: dict[str, tuple[Any, bool]] = {}  # name -> the module, and whether it is the user's own
# All modules at the last call of `_own_modules`, and the user's own among them.
_imported: tuple[list[Any], list[ModuleType]] = ([], [])


def _own_modules() -> list[ModuleType]:
    """The user's own modules: neither installed nor midstream's."""
    global _imported
    before, own = _imported
    now = list(sys.modules.values())
    if len(now) == len(before) and all(map(operator.is_, now, before)):
        return own
    for name, module in list(sys.modules.items()):
        if _KNOWN_MODULES.get(name, (None,))[0] is not module:
            _KNOWN_MODULES[name] = module, _is_own(module) and name == module.__name__
    own = [
        sys.modules[name]
        for name, (module, is_own) in _KNOWN_MODULES.items()
        if is_own and sys.modules.get(name) is module
    ]
    _imported = now, own
    return own


def _is_own(module: Any) -> bool:
    """Whether a module is the user's own. `__main__` is not: its definitions always go by value."""
    file, name = getattr(module, "__file__", None), getattr(module, "__name__", "")
    return (
        file is not None
        and not is_installed(file)
        and name.partition(".")[0] not in (__name__.partition(".")[0], "__main__")
    )


def _unsendable(program: TraceProgram) -> Iterator[tuple[str, Any]]:
    """The program's variables that cannot be pickled, and such variables of the functions and modules that it uses."""
    rest: list[tuple[str, Any]] = []
    if isinstance(program, BlockProgram):
        rest += [(name, value) for name, value in program.block.captured.items() if name not in program.injected]
    elif isinstance(program, FunctionProgram):
        rest.append(("the function", plain_function(program.fn)))
    seen = set[int]()
    while rest:
        name, value = rest.pop(0)
        if id(value) in seen or _can_be_sent(value):
            continue
        seen.add(id(value))
        inner: list[tuple[str, Any]] = []
        if isinstance(value, FunctionType):
            inner = [*variables_of(value), *((value.__name__, each) for each in value.__defaults__ or ())]
        elif isinstance(value, ModuleType):
            inner = [*vars(value).items()]
        inner = [each for each in inner if not _can_be_sent(each[1])]
        rest = inner + rest
        if not inner:
            yield name, value


def _can_be_sent(value: Any) -> bool:
    try:
        CodePickler(io.BytesIO(), Weights()).dump(value)
    except Exception:
        return False
    return True


def _name_of(programs: Sequence[Sequence[TraceProgram]], value: Any) -> str | None:
    for program in chain.from_iterable(programs):
        for name, held in _variables(program).items():
            if held is value:
                return name
    return None


def _variables(program: TraceProgram) -> Mapping[str, Any]:
    if isinstance(program, BlockProgram):
        return program.block.outside
    return program.outside if isinstance(program, FunctionProgram) else {}


def check_python(data: bytes) -> None:
    """Raise TraceError if another minor version of Python has shipped these programs."""
    written, here = tuple(data[:2]), tuple(sys.version_info[:2])
    if written != here:
        raise TraceError(
            f"The trace was compiled by Python {'.'.join(map(str, written))} and this process runs {here[0]}.{here[1]}. "
            "Code travels as bytecode: run the client and the engine on the same minor version of Python."
        )


def unship(
    data: bytes,
    resolve: Callable[[Any], Any],
    device: torch.device | None = None,
    weights: Mapping[str, torch.Tensor] | None = None,
    apart: bool = False,
) -> list[list[TraceProgram]]:
    """The programs, with references resolved by `resolve`, and tensors on `device`. `weights` are the tensors that this process holds, by
    digest. `apart`: whether they share no classes with other copies, so that none sees what another one has changed.

    Raises TraceError if another minor version of Python has sent them: code travels as bytecode.
    """
    check_python(data)
    source = io.BytesIO(data)
    source.seek(2)
    with torch.inference_mode(False):
        values = values_of(pickle.load(source), weights or {}, device)
        programs: Any = _CodeUnpickler(source, resolve, values, apart).load()
    if type(programs) is not list or not all(isinstance(each, TraceProgram) for every in programs for each in every):
        raise TraceError("The trace's code was not made by `ship`.")
    return programs
