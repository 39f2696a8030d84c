"""A trace's code, a with-block or a function: the sites that it uses, how it is sent to the engine, and the values that come back."""

from __future__ import annotations

import builtins
import contextlib
import enum
import functools
import inspect
import io
import linecache
import operator
import pickle
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from types import CodeType, FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import cloudpickle
import numpy as np
import torch
from cloudpickle.cloudpickle import _extract_code_globals

from midstream.errors import InterventionError, MidstreamError, StageFailedError, TraceError, text_of
from midstream.trace.block import Block, locals_at
from midstream.trace.body import Body, StopTrace, current_body
from midstream.trace.saves import (
    attributes_of,
    contents,
    is_container,
    is_imported,
    is_installed,
    reached,
    variables_of,
)
from midstream.trace.tracer import BodyTracer, Result, backward, save, steps_of
from midstream.trace.weights import Weight, Weights, values_of
from midstream.tree import map_objects, map_tensors, movable

RETURNED = "return"
STOPPED = "trace:stop"  # the stop reason of a request that `tracer.stop()` has ended
_CHANGING_CLOUDPICKLE = threading.Lock()
_HASHED_BYTES = 1 << 20  # of the largest array that is looked at for changes


@dataclass
class Found:
    """The values that a trace brings back, and the names of those that it does not.

    Attributes:
        values: the saved values by name.
        left: names of the caller's containers and tensors that the trace has changed and not saved.
        unsaved: names that it has set and not saved.
        counted: names of the caller's numbers and texts that it has set to something else and not saved.
    """

    values: dict[str, Any] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    unsaved: list[str] = field(default_factory=list)
    counted: list[str] = field(default_factory=list)


class Program:
    """One invoke's code.

    Attributes:
        is_standing: whether it runs in every step of a request.
    """

    is_standing = False

    def run(self, model: Any, shared: dict[str, Any]) -> Found:
        """Run in the current body."""
        raise NotImplementedError

    def recover(self, error: BaseException, body: Body) -> Found:
        """The values saved before `run` raised."""
        raise NotImplementedError

    def snapshot(self, body: Body) -> dict[str, Any]:
        """The values saved so far, while `run` is parked."""
        return {}


@dataclass
class FunctionProgram(Program):
    """`fn(model)` or `fn(model, tracer)`. Its return value comes back."""

    fn: Callable[..., Any]

    def run(self, model: Any, shared: dict[str, Any]) -> Found:
        body, outside = current_body(), self.outside
        body.entry = {name: _state(value) for name, value in outside.items()}, {}
        arguments = (model, BodyTracer()) if self._takes_tracer else (model,)
        returned = self.fn(*arguments)
        values = map_tensors(returned, lambda _, t: body.save(t))
        back = {id(value) for value in contents([returned])}
        left = [name for name, v in outside.items() if id(v) not in back and _is_changed(body, name, v)]
        return Found({RETURNED: values}, left)

    @property
    def outside(self) -> dict[str, Any]:
        """The values that the function uses from outside, by name, and those that functions and objects among them use."""
        fn, used = self.fn, dict[str, Any]()
        while isinstance(fn, functools.partial):
            used |= inspect.signature(fn.func).bind_partial(*fn.args, **fn.keywords).arguments
            fn = fn.func
        fn = inspect.unwrap(fn)
        used |= attributes_of(getattr(fn, "__self__", fn)) or {}
        fn = getattr(fn, "__func__", fn)
        if type(fn) is FunctionType:
            given = inspect.signature(fn).parameters.values()
            used = {p.name: p.default for p in given if p.default is not p.empty} | dict(variables_of(fn)) | used
        return {**used, **reached(used)}

    @functools.cached_property
    def _takes_tracer(self) -> bool:
        parameters = inspect.signature(self.fn).parameters.values()
        required = [
            p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        if len(required) not in (1, 2):
            raise TraceError(f"{self.fn!r} must take (model) or (model, tracer).")
        return len(required) == 2

    def recover(self, error: BaseException, body: Body) -> Found:
        return Found(body.saves.pick(locals_at(error, code_of(self.fn))))


def code_of(fn: Any) -> CodeType | None:
    """The code of a function, a method, a partial or a callable object."""
    fn = inspect.unwrap(_plain(fn))
    code: CodeType | None = getattr(fn, "__code__", None) or getattr(type(fn).__call__, "__code__", None)
    return code


@dataclass
class BlockProgram(Program):
    """A with-block. Those of its variables that were saved come back.

    Attributes:
        injected: names that have another value where the block runs: the tracer.
        saved: captured names whose object was saved above the block.
    """

    block: Block
    injected: dict[str, Any]
    saved: list[str] = field(default_factory=list)

    def run(self, model: Any, shared: dict[str, Any]) -> Found:
        body = current_body()
        body.entry = {name: _state(value) for name, value in self._outside().items()}, self._attributes()
        for name in self.saved:
            body.save(self.block.captured[name])
        injected = {**self.injected, "__save__": save, "__backward__": backward, "__steps__": steps_of}
        names = self.block.function()(injected, shared, body.wait_for_sibling)
        saved = self._saved(body, names)
        left = [name for name, v in self._outside().items() if name not in saved and _is_changed(body, name, v)]
        counted = [name for name, v in names.items() if name not in saved and self._goes_on(name, v)]
        return Found(saved, left, self._unsaved(names, saved), counted)

    def _goes_on(self, name: str, value: Any) -> bool:
        """Whether the block has read a number or text of the caller's and set its name to something else."""
        before = self.block.captured.get(name)
        return isinstance(before, (int, float, complex, str)) and value is not before

    def _unsaved(self, names: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
        return [name for name in names if name not in saved and name not in self.block.captured]

    def recover(self, error: BaseException, body: Body) -> Found:
        names = locals_at(error, self.block.code)
        saved = self._saved(body, names)
        return Found(saved, unsaved=self._unsaved(names, saved))

    def snapshot(self, body: Body) -> dict[str, Any]:
        frame = body.frame_of(self.block.code)
        return self._saved(body, frame.f_locals if frame is not None else {})

    def _saved(self, body: Body, names: Mapping[str, Any]) -> dict[str, Any]:
        """The saved values among the block's names, the values from outside, and the attributes that it has set on objects from outside.

        A container from outside comes back if the block has changed it and it holds a saved value, and one that the block made if all
        tensors in it were saved.
        """
        outside, saves = self._outside(), body.saves
        if not saves:
            return {}
        made = {n: v for n, v in names.items() if v is not outside.get(n) and saves.has_all_tensors_of(v)}
        filled = {n: v for n, v in outside.items() if saves.has_some_of(v) and _is_changed(body, n, v)}
        before = body.entry[1]
        bound = {n: v for n, v in self._attributes().items() if v is not before.get(n)}
        return {**made, **filled, **saves.pick({**bound, **outside, **names})}

    def _outside(self) -> dict[str, Any]:
        return {name: value for name, value in self.block.outside.items() if name not in self.injected}

    def _attributes(self) -> dict[str, Any]:
        """The attributes of the caller's objects, as `owner.name`."""
        objects = {owner: attributes_of(value) or {} for owner, value in self._outside().items()}
        return {f"{owner}.{name}": value for owner, own in objects.items() for name, value in own.items()}


def _is_changed(body: Body, name: str, value: Any) -> bool:
    """Whether a value of the caller's has been changed since the block began."""
    before, now = body.entry[0].get(name), _state(value)
    if isinstance(now, list) and isinstance(before, list):
        return len(now) != len(before) or any(a is not b or m != n for (a, m), (b, n) in zip(now, before, strict=True))
    return now is not None and now != before


def _state(value: Any) -> list[tuple[Any, int]] | int | None:
    """A state that differs once the value was changed: a container's values with their versions, a set's size, a tensor's version."""
    kind = type(value)  # isinstance might run the object's own code
    if is_container(value):
        return [(each, _version(each)) for each in contents(value)]
    if issubclass(kind, set):
        return set.__len__(value)
    if issubclass(kind, np.ndarray) and not value.dtype.hasobject and value.nbytes <= _HASHED_BYTES:
        return hash(value.tobytes())
    return _version(value) if issubclass(kind, torch.Tensor) else None


def _version(value: Any) -> int:
    """A tensor's version; 0 for anything else, and for a parameter that may be trained, which is the caller's own on `LanguageModel`."""
    if not issubclass(type(value), torch.Tensor) or value.is_inference():
        return 0
    return 0 if value.requires_grad and value.is_leaf else value._version


@dataclass
class Failure:
    """An exception of a body, in a form that can be sent.

    Attributes:
        error: the exception itself if it is midstream's and can be pickled.
        bases: the names of its builtin base classes, nearest first.
        frames: (file, line, function, text) of the user's own frames.
        secondary: whether it only says that another pipeline stage failed.
    """

    error: BaseException | None
    type_name: str
    bases: list[str]
    message: str
    frames: list[tuple[str, int, str, str]]
    secondary: bool = False

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        own = isinstance(error, MidstreamError)
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not _internal(f.filename)]
        builtin = [b.__name__ for b in type(error).__mro__ if b.__module__ == "builtins" and b is not object]
        return cls(
            error=error if own and _picklable(error) else None,
            type_name=type(error).__name__,
            bases=builtin,
            message=text_of(error) + _hint(error),
            frames=[(f.filename, f.lineno or 0, f.name, f.line or "") for f in frames],
            secondary=isinstance(error, StageFailedError),
        )

    def text(self) -> str:
        """A traceback with the user's own lines only."""
        lines = ["Traceback (most recent call last), in the trace:"]
        for filename, number, name, line in self.frames:
            lines.append(f'  File "{filename}", line {number}, in {name}')
            if shown := line or linecache.getline(filename, number).strip():
                lines.append(f"    {shown}")
        return "\n".join([*lines, f"{self.type_name}: {self.message}"])

    def exception(self) -> MidstreamError:
        """The exception to raise at the client: midstream's own error, or an InterventionError for any other."""
        if isinstance(self.error, MidstreamError):
            self.error.add_note(self.text())
            return self.error
        return _mixed_with(self.bases, f"{self.type_name}: {self.message}\n\n{self.text()}")


# Builtin exceptions with a meaning for the interpreter, generators or event loops.
_SPECIAL = ("StopIteration", "StopAsyncIteration", "GeneratorExit", "KeyboardInterrupt", "SystemExit")


def _mixed_with(bases: list[str], text: str) -> InterventionError:
    for name in bases:
        base = getattr(builtins, name, None)
        if name in ("BaseException", "Exception", *_SPECIAL) or base is None:
            break
        try:
            mixed: Any = type(
                f"Intervention{name}", (InterventionError, base), {"__module__": InterventionError.__module__}
            )
            return mixed(text)  # type: ignore[no-any-return]
        except TypeError:  # a builtin whose memory layout does not mix with others, or one that takes more than a text
            continue
    return InterventionError(text)


# Parts of an error's text -> what to write.
_HINTS = {
    "'tuple' object has no attribute": " A module's output may be a tuple, a layer's on vLLM that of its hidden states and the residual "
    "stream: `model.layers_output[3]` is one tensor on every model.",
    "LMHead's weights should be used in the sampler": " Write `model.project_on_vocab(h)`, which has the final norm, or "
    "`h @ model.lm_head.weight.T`.",
}


def _hint(error: BaseException) -> str:
    if isinstance(error, AttributeError) and error.name == "save":
        return ". `.save()` works only in a with-block: write `midstream.save(value)` in a function."
    text = text_of(error)
    return next((hint for said, hint in _HINTS.items() if said in text), "")


def _internal(filename: str) -> bool:
    return f"{__name__.split('.')[0]}/trace/" in filename.replace("\\", "/") or "/site-packages/" in filename


def _picklable(error: BaseException) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:
        return False


@dataclass
class Outcome(Found):
    """The result of one request's trace.

    Attributes:
        stopped: whether the body called `tracer.stop()`.
        order: counts the outcomes of an engine, so that the last of several is known.
        name: of the body.
        steps: how many steps the body took part in.
        saved: whether it has saved anything, if only a value that has no name to come back under.
    """

    failure: Failure | None = None
    stopped: bool = False
    order: int = 0
    name: str = ""
    steps: int = 0
    saved: bool = False


def outcome(body: Body, program: Program) -> Outcome:
    """The result of `body`, which is done."""
    error = body.failure
    found = (body.result or Found()) if error is None else program.recover(error, body)
    failure = Failure.of(body.error) if body.error is not None else None
    _give_callers_classes(found.values)
    return Outcome(
        **vars(found),
        failure=failure,
        stopped=isinstance(error, StopTrace),
        name=body.name,
        steps=body.now + 1,
        saved=bool(body.saves),
    )


def _give_callers_classes(values: Any) -> None:
    """Make objects of a copied class objects of the class itself, at any depth: where code runs on copies, its classes are copies, too."""
    if not _ORIGINALS:
        return
    seen, rest = set[int](), [values]
    while rest:
        value = rest.pop()
        kind = type(value)
        if (original := _ORIGINALS.get(kind)) is not None:
            with contextlib.suppress(TypeError):  # of a class with a memory layout of its own
                object.__setattr__(value, "__class__", original)
        if id(value) in seen or issubclass(kind, (str, bytes, int, float, torch.Tensor)):
            continue
        seen.add(id(value))
        if issubclass(kind, dict):
            rest += [*dict.keys(value), *dict.values(value)]
        elif issubclass(kind, (list, tuple, set, frozenset, deque)):
            rest += kind.__iter__(value)
        rest += (attributes_of(value) or {}).values()
        if original is not None:
            slots = getattr(original, "__slots__", ())
            rest += [getattr(value, name, None) for name in ([slots] if isinstance(slots, str) else slots)]


def put_results(outcomes: Iterable[Outcome], output: Any) -> MidstreamError | None:
    """Put the request's output in place of `tracer.result` in saved values. Returns the error for a part that the output lacks."""
    failed: list[MidstreamError] = []

    def found(result: Result) -> Any:
        try:
            return result.of(output)
        except MidstreamError as error:
            failed.append(error)
            return None

    for each in outcomes:
        each.values = map_objects(each.values, Result, found)
    return failed[0] if failed else None


def _reference(value: Any) -> Any:
    """What of the running model the caller's value stands for in a trace; None if it is an ordinary value."""
    refers = getattr(type(value), "__midstream_reference__", None)
    return refers(value) if refers is not None else None


# Sending. Everything goes by value, except the model's own objects, which the worker replaces by its own.


OUT_OF_BAND = pickle.PickleBuffer(bytearray())  # stands in a pickle for a tensor, whose bytes may lie on a device


def itself(value: Any) -> Any:
    """The argument: what a pickle makes of a value that is a part of it already, or an out-of-band buffer."""
    return value


class _Pickler(cloudpickle.Pickler):
    """Pickles code; `weights` takes its tensors and arrays, in the order of the out-of-band buffers that stand for them."""

    def __init__(self, buffer: io.BytesIO, weights: Weights) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL, buffer_callback=lambda each: each is not OUT_OF_BAND)
        self._weights = weights

    def persistent_id(self, obj: Any) -> Any:
        return _reference(obj)

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)  # isinstance might run the object's own code
        if self._weights.takes(obj):
            self._weights.take(obj)
            return itself, (OUT_OF_BAND,)
        if issubclass(kind, torch.Tensor) and (there := movable(obj)) is not obj:
            return there.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if issubclass(kind, _LruCache) and not _is_imported(obj):
            return _cached_here, (obj.__wrapped__, obj.cache_parameters())
        if kind is FunctionType and obj.__code__ is _DISPATCHER and not _is_imported(obj):
            return _dispatching_here, (obj.__wrapped__, [*obj.registry.items()])  # type: ignore[attr-defined]
        if kind is functools.cached_property:  # it has a lock in Python 3.11
            return functools.cached_property, (obj.func,), {"attrname": obj.attrname, "__doc__": obj.__doc__}
        if kind is FunctionType:
            _note_class_bodies(obj.__code__)
        reduced = super().reducer_override(obj)
        if issubclass(kind, type) and isinstance(reduced, tuple) and len(reduced) == 6:  # a class that goes by value
            maker, args, state, *_, fill = reduced
            _SENT[args[-2]] = obj
            if vars(obj).get("__slots__") and not issubclass(obj, (enum.Enum, tuple)):  # cloudpickle leaves them out
                args = (*args[:3], {**args[3], "__slots__": obj.__slots__}, *args[4:])
            return _class_here, (maker, args), (args[-2], fill, state), None, None, _fill_class
        return reduced


_LruCache = type(functools.lru_cache(_reference))
_DISPATCHER = functools.singledispatch(_reference).__code__  # type: ignore[attr-defined]
_SENT: WeakValueDictionary[str, type] = WeakValueDictionary()  # cloudpickle's id of a class -> this process's own class
_ORIGINALS: WeakKeyDictionary[type, type] = WeakKeyDictionary()  # copy of such a class -> the class


def _note_class_bodies(code: CodeType) -> dict[str, Any]:
    """Have cloudpickle send the globals that only the body of a class in the code uses. It looks for them in functions alone."""
    names: dict[str, Any] = _extract_code_globals(code)  # what it keeps for this code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            names.update(_note_class_bodies(const))
            if not const.co_flags & inspect.CO_OPTIMIZED:  # a class body
                names.update(dict.fromkeys(const.co_names))
    return names


def is_sent(kind: type) -> bool:
    """Whether it is a class of this process, which has gone by value with code."""
    return any(kind is each for each in _SENT.values())


def _cached_here(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _dispatching_here(default: Any, registry: list[tuple[type, Any]]) -> Any:
    made = functools.singledispatch(default)
    for kind, function in registry:
        made.register(kind, function)
    return made


def _class_here(maker: Callable[..., type], args: tuple[Any, ...]) -> type:
    """A class that came by value; in the process that sent it, a copy. (cloudpickle would put copied methods into the class itself.)"""
    original = _SENT.get(args[-2])
    if original is None:
        return maker(*args)
    if issubclass(original, enum.Enum):  # members are compared by identity
        return original
    made = maker(*args[:-2], None, args[-1])
    _ORIGINALS[made] = original
    return made


def _fill_class(made: type, state: tuple[str, Callable[..., Any], Any]) -> None:
    name, fill, attributes = state
    if _SENT.get(name) is not made:
        fill(made, attributes)


def _is_imported(function: Any) -> bool:
    """Whether the engine imports a function, or what a decorator has made of it, by name."""
    by_value = cloudpickle.list_registry_pickle_by_value()
    module = function.__module__ or ""
    return is_imported(function) and not any(module == name or module.startswith(f"{name}.") for name in by_value)


class _Copier(_Pickler):
    """Pickles code for this process. Some objects stay the caller's own: those of models, those for which `keeps` returns True, and those
    that cannot be pickled.

    Attributes:
        kept: these objects.
    """

    def __init__(self, buffer: io.BytesIO, weights: Weights, keeps: Callable[[Any], bool]) -> None:
        super().__init__(buffer, weights)
        self._keeps = keeps
        self._places: dict[int, int] = {}
        self.kept: list[Any] = []

    def persistent_id(self, obj: Any) -> Any:
        if id(obj) in self._places or super().persistent_id(obj) is not None or self._keeps(obj):
            return self._place(obj)
        return None

    def _place(self, obj: Any) -> int:
        if id(obj) not in self._places:
            self._places[id(obj)] = len(self.kept)
            self.kept.append(obj)
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


class _Unpickler(pickle.Unpickler):
    def __init__(self, source: io.BytesIO, resolve: Callable[[Any], Any], values: Mapping[int, Any]) -> None:
        super().__init__(source, buffers=map(values.__getitem__, count()))
        self._resolve = resolve

    def persistent_load(self, pid: Any) -> Any:
        return self._resolve(pid)


@dataclass(frozen=True)
class ShippedCode:
    """The code of several requests.

    Attributes:
        programs: the programs of each request, pickled, behind a table of the tensors and arrays that they use.
        bodies: how many programs each request has: standing edits, then its own.
        weights: what the workers must hold, by digest.
        is_whole: whether it has the user's own modules, too, and not their names.
    """

    programs: bytes
    bodies: list[int]
    weights: Mapping[str, Weight] = field(default_factory=dict)
    is_whole: bool = True


def ship(programs: list[list[Program]], elsewhere: bool = False) -> ShippedCode:
    """The programs of each request, with the user's own modules; objects that they share stay shared.

    Args:
        elsewhere: whether they run on a machine that has installed packages alone. All tensors then go with the code.

    Raises:
        TraceError: names what cannot be sent.
    """
    try:
        return _shipped(programs, _by_value(_own_modules), not elsewhere)
    except Exception as error:
        if not elsewhere:  # something in a module of the user's, which the engine can import
            with contextlib.suppress(Exception):
                return replace(_shipped(programs, contextlib.nullcontext(), True), is_whole=False)
        names = [name for each in programs for program in each for name in _unsendable(program)]
        what = f", {names[0]}," if names else ""
        raise TraceError(f"The trace uses a value{what} that cannot be sent to the engine: {error}") from error


def _shipped(
    programs: list[list[Program]], modules: contextlib.AbstractContextManager[None], apart: bool
) -> ShippedCode:
    buffer, weights = io.BytesIO(), Weights(apart=apart)
    with modules:
        _Pickler(buffer, weights).dump(programs)
    head, needed = weights.table(functools.partial(_name_of, programs))
    data = b"".join((bytes(sys.version_info[:2]), pickle.dumps(head), buffer.getbuffer()))
    return ShippedCode(data, [len(each) for each in programs], needed)


def copies(programs: Sequence[Program], keeps: Callable[[Any], bool]) -> list[Program]:
    """Copies of the programs with the values of their variables, also of functions that could be imported, to run in this process.

    Gradients reach the caller's tensors: `Weights.copies` says which of them are copied. What cannot be copied stays the caller's own, and
    so does what `keeps` returns True for. Raises TraceError if a copy cannot be built.
    """
    functions = [_plain(program.fn) for program in programs if isinstance(program, FunctionProgram)]
    homes = {sys.modules.get(getattr(fn, "__module__", None) or "__main__") for fn in functions}
    buffer, weights = io.BytesIO(), Weights()
    pickler = _Copier(buffer, weights, keeps)
    try:
        with _by_value(lambda: [module for module in homes if module is not None and _is_own(module)]):
            pickler.dump(list(programs))
        with torch.inference_mode(False):
            values = weights.copies()
        buffer.seek(0)
        found: list[Program] = _Unpickler(buffer, pickler.kept.__getitem__, values).load()
    except MidstreamError:
        raise
    except Exception as error:
        raise TraceError(f"The trace uses a value that cannot be copied: {type(error).__name__}: {error}") from error
    return found


def _plain(fn: Any) -> Any:
    """The function of a partial."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


@contextlib.contextmanager
def _by_value(modules: Callable[[], Iterable[ModuleType]]) -> Iterator[None]:
    """Functions and classes of these modules are pickled by value. One thread at a time: it changes cloudpickle."""
    with _CHANGING_CLOUDPICKLE:
        own = [each for each in modules() if each.__name__ not in cloudpickle.list_registry_pickle_by_value()]
        for module in own:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in own:
                cloudpickle.unregister_pickle_by_value(module)


_LOOKED_AT: dict[str, tuple[Any, bool]] = {}  # of each module that was imported, by name: whether it is the user's own
_imported: tuple[list[Any], list[ModuleType]] = [], []  # all modules when it was last asked, and the user's own


def _own_modules() -> list[ModuleType]:
    """The modules that are neither installed nor midstream's."""
    global _imported
    before, own = _imported
    now = list(sys.modules.values())
    if len(now) == len(before) and all(map(operator.is_, now, before)):
        return own
    for name, module in list(sys.modules.items()):
        if _LOOKED_AT.get(name, (None,))[0] is not module:
            _LOOKED_AT[name] = module, _is_own(module) and name == module.__name__
    own = [
        sys.modules[name] for name, (module, is_own) in _LOOKED_AT.items() if is_own and sys.modules.get(name) is module
    ]
    _imported = now, own
    return own


def _is_own(module: Any) -> bool:
    """Whether a module is the user's own. The main one is not: what it defines always goes by value."""
    file, name = getattr(module, "__file__", None), getattr(module, "__name__", "")
    return (
        file is not None
        and not is_installed(file)
        and name.partition(".")[0] not in (__name__.partition(".")[0], "__main__")
    )


def _unsendable(program: Program) -> Iterator[str]:
    """The names of captured values that cannot be pickled."""
    if not isinstance(program, BlockProgram):
        return
    for name, value in program.block.captured.items():
        if name not in program.injected:
            try:
                _Pickler(io.BytesIO(), Weights()).dump(value)
            except Exception:
                yield name


def _name_of(programs: Sequence[Sequence[Program]], value: Any) -> str | None:
    """The name of an object among the variables of programs."""
    for program in chain.from_iterable(programs):
        for name, held in _variables(program).items():
            if held is value:
                return name
    return None


def _variables(program: Program) -> Mapping[str, Any]:
    """The values from outside that a program uses, by name."""
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
) -> list[list[Program]]:
    """The programs, with references resolved by `resolve`, and tensors on `device`. `weights` are those that this process holds.

    Raises TraceError if another minor version of Python has sent them: code travels as bytecode.
    """
    check_python(data)
    source = io.BytesIO(data)
    source.seek(2)
    with torch.inference_mode(False):
        values = values_of(pickle.load(source), weights or {}, device)
        programs: Any = _Unpickler(source, resolve, values).load()
    if type(programs) is not list or not all(isinstance(each, Program) for every in programs for each in every):
        raise TraceError("The trace's code is not what `ship` has made.")
    return programs
