"""A trace's code, a with-block or a function: the sites that it uses, how it is sent to the engine, and the values that come back."""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import inspect
import io
import linecache
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle
import numpy as np
import torch

from midstream.errors import InterventionError, MidstreamError, StageFailedError, TraceError, text_of
from midstream.trace.block import Block, locals_at
from midstream.trace.body import Body, StopTrace, current_body
from midstream.trace.rewrite import function_tree
from midstream.trace.saves import attributes_of, contents, is_container, is_installed, variables_of
from midstream.trace.tracer import BodyTracer, Result, backward, save, steps_of
from midstream.trace.tree import as_bytes, is_raw, map_objects, map_tensors, movable
from midstream.trace.weights import Weight, Weights, on_device, tensors_of

RETURNED = "return"
_CHANGING_CLOUDPICKLE = threading.Lock()
_HASHED_BYTES = 1 << 24  # of the largest array that is looked at for changes


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
        body = current_body()
        arguments = (model, BodyTracer()) if self._takes_tracer else (model,)
        returned = self.fn(*arguments)
        return Found({RETURNED: map_tensors(returned, lambda _, t: body.save(t))})

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
        return Found(body.saves.pick(locals_at(error, _code_of(self.fn))))


def _code_of(fn: Any) -> CodeType | None:
    """The code of a function, a method, a partial or a callable object."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = inspect.unwrap(fn)
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
    return value._version if issubclass(type(value), torch.Tensor) and not value.is_inference() else 0


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


def _hint(error: BaseException) -> str:
    if isinstance(error, AttributeError) and error.name == "save":
        return ". `.save()` works only in a with-block: write `midstream.save(value)` in a function."
    return ""


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
    return Outcome(
        **vars(found),
        failure=failure,
        stopped=isinstance(error, StopTrace),
        name=body.name,
        steps=body.now + 1,
        saved=bool(body.saves),
    )


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


def unrun(program: Program) -> Outcome:
    """The outcome of a program that only writes to the model, if a plan did it."""
    if isinstance(program, BlockProgram):
        captured = program.block.captured
        return Outcome(unsaved=sorted(name for name in program.block.assigned if name not in captured))
    return Outcome({RETURNED: None})


# Whether a program needs uncompiled steps.

_MODEL_USES = frozenset(
    {"layers_output", "resid_post", "logits", "samples", "next_token_probs", "steer", "project_on_vocab"}
    | {"num_layers", "hidden_size", "tokenizer"}
)
_TRACER_USES = frozenset({"iter", "all", "next", "stop", "result"})
_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, torch.Tensor, torch.dtype, torch.device, torch.Size)
_KNOWN_PACKAGES = frozenset("torch numpy math operator itertools functools collections builtins".split())
REACHING = frozenset({"eval", "exec", "globals", "locals", "vars"})  # functions that may find it under another name
_KNOWN_CODE = (*_KNOWN_PACKAGES, "midstream.trace.tracer")


def keeps_to_graph_sites(program: Program) -> bool:
    """Whether `program` reads and writes only `layers_output`, `logits` and `samples`.

    Read off its source. In doubt the answer is no: without a source, for any use of the model other than the attributes in
    `_MODEL_USES`, and for any captured object whose code might reach the model by another way.
    """
    code: Sequence[ast.AST]
    if isinstance(program, BlockProgram):
        code, values, defaults = program.block.compiled.statements, program.block.captured, ()
        uses = {name: _TRACER_USES for name in program.injected}
    elif isinstance(program, FunctionProgram) and isinstance(fn := program.fn, FunctionType):
        tree = function_tree(fn.__code__)
        code, values, defaults = (() if tree is None else tree.body), dict(variables_of(fn)), fn.__defaults__ or ()
        required = [name for name, each in inspect.signature(fn).parameters.items() if each.default is each.empty]
        uses = dict(zip(required, (_MODEL_USES, _TRACER_USES), strict=False))
    else:
        return False
    uses |= {name: _MODEL_USES for name, value in values.items() if is_model(value)}
    uses |= {name: frozenset({"save"}) for name, value in values.items() if is_package(value)}
    others = [value for name, value in values.items() if name not in uses]
    return bool(code) and all(map(harmless, [*others, *defaults])) and _uses_only(code, uses)


def reaches_no_model(module: str) -> bool:
    """Whether the module of this name is PyTorch's, NumPy's, or one of Python's own that reach no model."""
    return module.partition(".")[0] in _KNOWN_PACKAGES


def is_package(value: Any) -> bool:
    """Whether it is the module `midstream`, of which traces use `save`."""
    return isinstance(value, ModuleType) and value.__name__ == "midstream"


def _reference(value: Any) -> Any:
    """What of the running model the caller's value stands for in a trace; None if it is an ordinary value."""
    refers = getattr(type(value), "__midstream_reference__", None)
    return refers(value) if refers is not None else None


def is_model(value: Any) -> bool:
    """Whether it is the caller's model, which stands for the running one in a trace."""
    return _reference(value) == ("model",)


def module_path(value: Any) -> str | None:
    """The path of the module that the caller's value stands for in a trace; None if it stands for none."""
    match _reference(value):
        case ("module", str(path)):
            return path
    return None


def harmless(value: Any) -> bool:
    """Whether `value` cannot reach the model."""
    if isinstance(value, _PLAIN):
        return True
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(harmless, value))
    if isinstance(value, Mapping) and type(value) is dict:
        return all(map(harmless, value.keys())) and all(map(harmless, value.values()))
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] in _KNOWN_CODE
    if isinstance(value, (FunctionType, BuiltinFunctionType, type)):
        home = value.__module__ or "builtins"
        return any(home == known or home.startswith(known + ".") for known in _KNOWN_CODE)
    return False


def _uses_only(code: Sequence[ast.AST], uses: Mapping[str, frozenset[str]]) -> bool:
    """Whether the code has names in `uses` only to use the attributes listed there, and reaches no model by another way."""
    nodes = [node for part in code for node in ast.walk(part)]
    allowed = {
        id(node.value)
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.attr in uses.get(node.value.id, ())
    }
    for node in nodes:
        match node:
            case ast.Name(id=name) if name in REACHING or (name in uses and id(node) not in allowed):
                return False
            case ast.Attribute(attr=name) if name in REACHING:
                return False
            case ast.Import(names=names) if not all(reaches_no_model(each.name) for each in names):
                return False
            case ast.ImportFrom(module=module, level=level) if level or not reaches_no_model(module or ""):
                return False
    return True


# Sending. Everything goes by value, except the model's own objects, which the worker replaces by its own.


class _Pickler(cloudpickle.Pickler):
    def __init__(self, buffer: io.BytesIO, weights: Weights | None = None) -> None:
        super().__init__(buffer)
        self._weights = weights

    def persistent_id(self, obj: Any) -> Any:
        return _reference(obj)

    def reducer_override(self, obj: Any) -> Any:
        if self._weights is not None and self._weights.takes(obj):
            return _weight_here, (self._weights.take(obj),)
        if is_raw(obj):
            return _tensor_here, (bytes(as_bytes(obj).cpu().numpy()), obj.dtype, tuple(obj.shape))
        if isinstance(obj, torch.Tensor) and (there := movable(obj)) is not obj:
            return there.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(obj)


_DEVICE: ContextVar[torch.device | None] = ContextVar("midstream_device", default=None)
_WEIGHTS: ContextVar[Mapping[int, torch.Tensor]] = ContextVar("midstream_weights")


def _tensor_here(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Put a tensor of the client's on the model's device, so that `model.layers_output[3] += v` works."""
    return on_device(data, _DEVICE.get()).view(dtype).reshape(shape)


def _weight_here(number: int) -> torch.Tensor:
    return _WEIGHTS.get()[number]


class _Unpickler(pickle.Unpickler):
    def __init__(self, source: io.BytesIO, resolve: Callable[[Any], Any]) -> None:
        super().__init__(source)
        self._resolve = resolve

    def persistent_load(self, pid: Any) -> Any:
        return self._resolve(pid)


@dataclass(frozen=True)
class ShippedCode:
    """The code of several requests.

    Attributes:
        programs: the programs of each request, pickled, behind a table of the weights that they use.
        bodies: how many programs each request has: standing edits, then its own.
        graph_sites: for each request, whether its code keeps to sites that may be built into the compiled forward.
        weights: what the workers must hold, by digest.
    """

    programs: bytes
    bodies: list[int]
    graph_sites: list[bool]
    weights: Mapping[str, Weight] = field(default_factory=dict)


def ship(programs: list[list[Program]], elsewhere: bool = False) -> ShippedCode:
    """The programs of each request; objects that they share stay shared. Raises TraceError, which names what cannot be sent.

    `elsewhere`: whether they run on a machine that has installed packages alone, so that the user's own modules are sent, too, and all
    tensors with the code.
    """
    buffer, weights = io.BytesIO(), Weights()
    try:
        with _by_value(_own_modules) if elsewhere else contextlib.nullcontext():
            _Pickler(buffer, None if elsewhere else weights).dump(programs)
    except Exception as error:
        names = [name for each in programs for program in each for name in _unsendable(program)]
        what = f", {names[0]}," if names else ""
        raise TraceError(f"The trace uses a value{what} that cannot be sent to the engine: {error}") from error
    known: dict[int, bool] = {}  # many requests may share a program

    def keeps(program: Program) -> bool:
        if id(program) not in known:
            known[id(program)] = keeps_to_graph_sites(program)
        return known[id(program)]

    graph_sites = [all(map(keeps, each)) for each in programs]
    head, needed = weights.table()
    data = b"".join((bytes(sys.version_info[:2]), pickle.dumps(head), buffer.getbuffer()))
    return ShippedCode(data, [len(each) for each in programs], graph_sites, needed)


def copies(programs: Sequence[Program], resolve: Callable[[Any], Any]) -> list[Program]:
    """Copies of the programs with the values of their variables, also of functions that could be imported. `resolve`: as of `unship`."""
    functions = [program.fn for program in programs if isinstance(program, FunctionProgram)]
    homes = {getattr(fn, "__module__", None) for fn in functions} - {"__main__", None}
    buffer = io.BytesIO()
    with _by_value(lambda: [sys.modules[name] for name in homes if name in sys.modules]):
        _Pickler(buffer).dump(list(programs))
    buffer.seek(0)
    found: list[Program] = _Unpickler(buffer, resolve).load()
    return found


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


def _own_modules() -> list[ModuleType]:
    """The modules that are neither installed nor midstream's."""
    return [
        module
        for name, module in list(sys.modules.items())
        if (file := getattr(module, "__file__", None)) is not None
        and not is_installed(file)
        and name.partition(".")[0] not in (__name__.partition(".")[0], "__main__")
        and name == module.__name__
    ]


def _unsendable(program: Program) -> Iterator[str]:
    """The names of captured values that cannot be pickled."""
    if not isinstance(program, BlockProgram):
        return
    for name, value in program.block.captured.items():
        if name not in program.injected:
            try:
                _Pickler(io.BytesIO()).dump(value)
            except Exception:
                yield name


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
    tokens = _DEVICE.set(device), _WEIGHTS.set({})
    try:
        with torch.inference_mode(False):
            _WEIGHTS.set(tensors_of(pickle.load(source), weights or {}, device))
            programs: Any = _Unpickler(source, resolve).load()
    finally:
        _DEVICE.reset(tokens[0])
        _WEIGHTS.reset(tokens[1])
    if type(programs) is not list or not all(isinstance(each, Program) for every in programs for each in every):
        raise TraceError("The trace's code is not what `ship` has made.")
    return programs
