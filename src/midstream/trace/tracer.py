"""The functions for a trace's body: `backward`, and `tracer` with its steps, early stop, cache and barriers."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import Any, NoReturn

import torch

from midstream.arch.aliases import resolved
from midstream.errors import NeverReachedError, ShapeError, TraceError, UnknownModuleError
from midstream.trace.body import Body, StopTrace, current_body, save
from midstream.trace.visit import Visit, first_argument
from midstream.tree import Opaque, map_tensors

_numbers = itertools.count()


class backward:
    """`with backward(loss) as grad: g = grad[h]` gives the gradient of the loss at `h`; `grad[h] = 0` replaces it.

    In a trace's block, `with loss.backward(): g = h.grad` is compiled to this. `h` may be any tensor of the trace that the loss depends on.
    If you replace a gradient, or change it in place, the new gradient flows on to the tensors from which `h` was computed: those read later
    in the block, and leaves and parameters. `loss.backward(...)` runs at the block's end, and sets the `.grad` of leaves. The model's
    parameters keep theirs only if the model is trained: in training mode, with gradients of only some parameters, or with earlier ones.

    Raises:
        TraceError: gradients are not recorded (engines compute in inference mode), or the loss does not depend on `h`.
        ShapeError: a gradient was replaced by a tensor that does not broadcast to its shape.
    """

    def __init__(
        self, loss: torch.Tensor, gradient: torch.Tensor | None = None, retain_graph: bool = False, **rest: Any
    ) -> None:
        if not loss.requires_grad:
            raise TraceError(
                "backward() needs gradients: trace on LanguageModel (vLLM computes without them), outside torch.no_grad()."
            )
        self._loss = loss
        self._gradient = gradient
        self._rest = {"retain_graph": retain_graph, **rest}
        # Tensor, its gradient, the gradient's version then.
        self._read: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        self._replaced: dict[int, Any] = {}  # id of a tensor -> the hook that replaces its gradient

    def __enter__(self) -> backward:
        return self

    def __getitem__(self, value: torch.Tensor) -> torch.Tensor:
        self._take_changes()
        if not value.requires_grad:
            raise TraceError(f"The tensor {list(value.shape)} has no gradient: it was computed without recording.")
        (grad,) = torch.autograd.grad(self._loss, value, self._gradient, retain_graph=True, allow_unused=True)
        if grad is None:
            raise TraceError(
                f"The loss does not depend on the tensor {list(value.shape)}. Read it before the values that the loss is computed from."
            )
        grad = grad.clone()  # autograd may hand out a view or a shared tensor, and this one can be changed
        self._read.append((value, grad, grad._version))
        return grad

    __call__ = __getitem__

    def __setitem__(self, value: torch.Tensor, grad: Any) -> None:
        self._take_changes()
        if grad is None or (value.is_leaf and not value.requires_grad):  # not a gradient of this loss
            value.grad = grad
            return
        current = self[value]
        try:
            self._replace(value, torch.as_tensor(grad).to(current).expand_as(current))
        except RuntimeError:
            raise ShapeError(
                f"The gradient is {list(current.shape)}; {list(grad.shape)} was written to it. Write a tensor of that shape, or one that "
                "broadcasts to it."
            ) from None

    def _replace(self, value: torch.Tensor, grad: torch.Tensor) -> None:
        if (before := self._replaced.pop(id(value), None)) is not None:
            before.remove()
        grad = grad.detach().clone()
        self._replaced[id(value)] = value.register_hook(lambda _: grad)

    def _take_changes(self) -> None:
        """Replace the gradients that the trace has changed in place."""
        read, self._read = self._read, []
        for value, grad, version in read:
            if grad._version != version:
                self._replace(value, grad)
            self._read.append((value, grad, grad._version))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if kind is None:
                self._take_changes()
                self._loss.backward(self._gradient, **self._rest)
        finally:
            for hook in self._replaced.values():
                hook.remove()


@dataclass(frozen=True)
class Barrier:
    """A meeting point of invokes: `barrier = tracer.barrier(2)` above the invokes, `barrier()` in each of them."""

    parties: int
    name: str = field(default_factory=lambda: f"{os.getpid()}-{next(_numbers)}")

    def __call__(self) -> None:
        current_body().wait_at_barrier(self)


@dataclass(frozen=True)
class Result(Opaque):
    """Stands for the request's final output, or a part of it. The output does not exist while the body runs.

    `tracer.result.outputs[0].text` is looked up in the output.

    Attributes:
        looks: the parts to look up: names of attributes, and keys in tuples of one.
    """

    looks: tuple[str | tuple[Any], ...] = ()

    def __getattr__(self, name: str) -> Result:
        if name.startswith("_"):
            raise AttributeError(name)
        return Result((*self.looks, name))

    def __getitem__(self, key: Any) -> Result:
        return Result((*self.looks, (key,)))

    def of(self, output: Any) -> Any:
        """The part of the output that it stands for. Raises TraceError if the output has no such part."""
        try:
            for look in self.looks:
                output = getattr(output, look) if isinstance(look, str) else output[look[0]]
        except (AttributeError, LookupError, TypeError) as error:
            raise TraceError(
                f"tracer.result of this request is a {type(output).__name__}, which has no such part: {error}"
            ) from error
        return output


def steps(body: Body, chosen: slice | int | list[int]) -> Iterator[int]:
    """The steps of a generation. Each is yielded when the forward begins it.

    A slice ends with the request. Steps asked for by number raise NeverReachedError if the request ends before them.
    """
    if isinstance(chosen, slice):
        index, stride = chosen.start or 0, chosen.step or 1
        if index < 0 or stride < 0 or (chosen.stop is not None and chosen.stop < 0):
            raise TraceError("Steps count from 0 upwards: how many there will be is not known in advance.")
        while (chosen.stop is None or index < chosen.stop) and body.wait_for_step(index):
            yield index
            index += stride
        return
    body.asks_by_number = True
    for index in [chosen] if isinstance(chosen, int) else chosen:
        if not body.wait_for_step(index):
            raise NeverReachedError(f"step {index} was never reached: the request ended after step {body.now}.")
        yield index


class Loop(Iterator[int]):
    """An iterator over steps. In a trace's block, `with` iterates over it too: it is compiled to `for`."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self._numbers = numbers

    def __next__(self) -> int:
        return next(self._numbers)

    def __enter__(self) -> NoReturn:
        raise TraceError(
            "In a function, write `for step in tracer.iter[:]:`. `with tracer.iter[:]:` works only in a trace's block."
        )

    def __exit__(self, *_: object) -> None:
        """Never called."""


def steps_of(given: Any) -> Loop:
    """The steps that `with tracer.iter[:]:` iterates over. Raises TraceError if `given` is not the tracer's."""
    if not isinstance(given, Loop):
        raise TraceError(
            "In a trace, `with x.all():` and `with x.iter[...]:` are loops over the tracer's steps. For another context manager write "
            "`manager = x.all()` and `with manager:`."
        )
    return given


class Steps:
    """`tracer.iter`: `for step in tracer.iter[:]`, `tracer.iter[2:5]`, `tracer.iter[0]`, `tracer.iter[[0, 3]]`."""

    def __getitem__(self, chosen: slice | int | list[int]) -> Loop:
        body = current_body()
        body.has_iterated = True
        return Loop(steps(body, chosen))


class CacheEntry:
    """One module's output and inputs in a cache; lists of them if the request ran several steps.

    `entry[i]` is the entry of one call of the module, and `len(entry)` the number of calls.

    Args:
        calls: "output" or "inputs" -> the step and the value of each call.
    """

    def __init__(self, calls: Mapping[str, Sequence[tuple[int, Any]]] | None = None) -> None:
        self.calls = {name: [*own] for name, own in (calls or {}).items() if own}

    def add(self, name: str, value: Any, step: int) -> None:
        self.calls.setdefault(name, []).append((step, value))

    def _values(self, name: str, of: Callable[[Any], Any] = lambda value: value) -> Any:
        values = [of(value) for _, value in self.calls.get(name, ())]
        return values if len(values) > 1 else values[0] if values else None

    @property
    def output(self) -> Any:
        """The call's return value; a list if the request ran several steps."""
        return self._values("output")

    @property
    def inputs(self) -> Any:
        """The call's arguments, `(args, kwargs)`; a list if the request ran several steps."""
        return self._values("inputs")

    @property
    def input(self) -> Any:
        """The first argument; a list if the request ran several steps."""
        if "inputs" not in self.calls:
            raise TraceError("The cache has no inputs; make it by tracer.cache(include_inputs=True).")
        return self._values("inputs", first_argument)

    def __len__(self) -> int:
        return max(map(len, self.calls.values()), default=0)

    def __getitem__(self, index: int) -> CacheEntry:
        place = range(len(self))[index]
        return CacheEntry({name: own[place : place + 1] for name, own in self.calls.items()})

    def until(self, step: int) -> CacheEntry:
        """The entry with the values of the steps before `step` only."""
        return CacheEntry({name: [call for call in own if call[0] < step] for name, own in self.calls.items()})

    def __repr__(self) -> str:
        return f"CacheEntry(output={self.output!r}, inputs={self.inputs!r})"


class Cache(dict[str, CacheEntry], Opaque):
    """Activations by module path: `cache["model.layers.3"].output`, or `cache.model.layers[3].output`.

    Paths may begin with `model.` for the model itself, as in nnsight: `cache["model.model.layers.3"]`. The user's other names of
    modules work, too.
    """

    _aliases: Mapping[tuple[str, str], str] = MappingProxyType({})  # from `Aliases.table`

    def __missing__(self, path: str) -> CacheEntry:
        found = self.get(path)
        if found is None:
            raise UnknownModuleError(f"the cache holds nothing of {path}; it has {', '.join(list(self)[:8])} ...")
        return found

    def __contains__(self, path: object) -> bool:
        return self.get(str(path)) is not None

    def get(self, path: str, default: Any = None) -> Any:
        return dict.get(self, _path_of(path, self.keys(), self._aliases), default)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _CachePath(self, name)

    def __midstream_until__(self, step: int) -> Cache:
        """The cache with the values of the steps before `step` only."""
        entries = {path: entry.until(step) for path, entry in self.items()}
        cache = Cache({path: entry for path, entry in entries.items() if entry.calls})
        cache._aliases = self._aliases
        return cache


class _CachePath:
    def __init__(self, cache: Cache, path: str) -> None:
        self._cache = cache
        self._path = path

    def __getattr__(self, name: str) -> Any:
        if name in ("output", "inputs", "input"):
            return getattr(self._cache[self._path], name)
        return _CachePath(self._cache, f"{self._path}.{name}")

    def __getitem__(self, index: int) -> Any:
        return _CachePath(self._cache, f"{self._path}.{index}")


def _path_of(module: Any, tree: Collection[str], aliases: Mapping[tuple[str, str], str]) -> Any:
    """The path in `tree` of a module or a path. A path may use the user's names, and begin with `model.` for the model, as in nnsight."""
    path = getattr(module, "_path", module)
    if not isinstance(path, str):
        return path
    short = path.removeprefix("model.")
    spelled = (path, short, resolved(path, aliases), resolved(short, aliases))
    return next((each for each in spelled if each in tree), path)


class BodyTracer:
    """The tracer inside a trace's body."""

    iter = Steps()

    @property
    def result(self) -> Result:
        """The request's final output, once the trace has run: save it, or a part of it."""
        current_body().wants_result = True
        return Result()

    def all(self) -> Loop:
        """Every step of the generation, as `iter[:]`."""
        return self.iter[:]

    def next(self, count: int = 1) -> int:
        """Move on to the next step, or by `count` steps. Later reads are of that step."""
        body = current_body()
        body.has_iterated = True
        for step in steps(body, [body.step + count]):
            return step
        raise AssertionError("steps() yields a step asked for by number, or raises")

    def stop(self) -> None:
        """End the request after this step. Values saved so far come back; the rest of the code does not run."""
        current_body().stopped = True
        raise StopTrace

    def barrier(self, parties: int) -> Barrier:
        raise TraceError(
            "Make the barrier outside of the invokes that meet at it: write `barrier = tracer.barrier(2)` above them."
        )

    def invoke(self, *_: Any, **__: Any) -> None:
        raise TraceError(
            "An invoke cannot be inside another invoke, nor inside a trace with a prompt. Give model.trace() no prompt."
        )

    def cache(
        self,
        modules: Iterable[Any] | None = None,
        include_output: bool = True,
        include_inputs: bool = False,
        device: torch.device | str | None = "cpu",
        dtype: torch.dtype | None = None,
        detach: bool = True,
        non_blocking: bool = False,
    ) -> Cache:
        """Keep the modules' outputs during the rest of this trace, after all edits.

        Args:
            modules: modules or paths; None for every module of the tree.
            include_output, include_inputs: which of each module's values to keep.
            device, dtype: of the tensors in the cache; None leaves them unchanged.
            detach: whether to leave gradients out. Only `LanguageModel` has any.
            non_blocking: accepted for code written for nnsight. The values are complete when the trace ends in any case.

        Returns:
            A saved cache, which fills up during the forward.
        """
        body = current_body()
        # An impossible device or dtype raises here, and not in the middle of the forward.
        torch.empty(0).to(device, dtype)
        forward = body.forward
        tree = forward.stage.modules
        aliases = forward.aliases.table(tree)
        paths = [p for p in tree if p] if modules is None else [_path_of(m, tree, aliases) for m in modules]
        cache = Cache()
        cache._aliases = aliases

        def keep(path: str, field_name: str) -> Any:
            def watch(visit: Visit) -> None:
                value = map_tensors(
                    visit.raw(), lambda _, t: (t.detach() if detach else t).to(device, dtype, copy=True)
                )
                cache.setdefault(path, CacheEntry()).add(field_name, value, visit.step)

            return watch

        for path in paths:
            if path not in tree:
                raise UnknownModuleError(f"cache: the model has no module {path!r}; print(model) shows the tree.")
            if include_output and forward.stage.has((path, "output")):
                forward.watch(body.name, (path, "output"), keep(path, "output"))
            if include_inputs and forward.stage.has((path, "input")):
                forward.watch(body.name, (path, "input"), keep(path, "inputs"))
        return save(cache)
