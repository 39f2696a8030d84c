"""`with model.trace(...)`: takes the block, lets the model run it, and binds the saved values in the caller's frame."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from types import FrameType, TracebackType
from typing import Any, NoReturn

from midstream.errors import TraceError
from midstream.plan.values import Plan
from midstream.requests.arguments import Prompt, prompt_in, prompts_of, sampling
from midstream.requests.invokes import Invoke, InvokeResult, raise_failures
from midstream.trace.block import Block, capture, in_place_of, link, push, skip, skipped
from midstream.trace.body import SAVE_ABOVE
from midstream.trace.code import LEFT, BlockProgram, FunctionProgram, StandingEdit, TraceProgram, code_of, without_left
from midstream.trace.containers import put_back
from midstream.trace.saves import refuse
from midstream.trace.tracer import Barrier, BodyTracer, backward, steps_of

_EDITS = count(1)  # numbers of edits without a name
_MUTATED_IN_ENGINE = (
    "This trace put values into {names} and did not save them. On VLLM a trace works on copies, so they stay in the engine. Save the "
    "values, `x.save()`: a list or dict comes back with the saved values in it. Or save all of it, `{name}.save()` in the trace."
)
_MUTATED_BY_FUNCTION = (
    "{function} put values into {names} and did not return them. It works on copies of its variables, so the values stay there: return "
    "them, or write a with-block and save them."
)
_REBOUND = (
    "A trace has variables of its own: outside of it, {names} did not change. To go on with the trace's value, save it there: "
    "`{name}.save()` after the last change."
)
_NOTHING_SAVED = (
    "No saved value of this trace has come back. A saved value comes back under a name, `h = model.layers_output[3].save()`, in a list or "
    "dict that the trace puts it into, or as an attribute of an object of yours; not in a module's variables."
)
_NO_PROMPT = "A trace needs a prompt, `model.trace(prompt)`, or invokes: `with tracer.invoke(prompt):` in its block."
_NOT_YET = (
    "{name} is set in an invoke, and invokes run after the trace's block. Use {name} in an invoke, or save it there and use it "
    "after the trace."
)


class _MisplacedError(TraceError):
    """Code that belongs into an invoke's block is in the block around the invokes."""


class BlockContext:
    """A with-statement whose block is captured as a program, and does not run in place."""

    def __init__(self) -> None:
        self._frame: FrameType | None = None
        self._block: Block | None = None

    def __enter__(self) -> Any:
        frame = sys._getframe(1)
        self._block = capture(frame)
        self._frame = frame
        skip(frame, self._block.target, self._bound(self._block))
        return self

    def _bound(self, block: Block) -> Any:
        """The value for the target of the with-statement."""
        if isinstance(block.target, tuple):
            raise TraceError(f"The target of a trace's `as` has to be a plain name; it is {', '.join(block.target)}.")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> bool:
        if error is not None and not skipped(error):
            return False
        assert self._block is not None and self._frame is not None
        frame, self._frame = self._frame, None
        try:
            self._captured(self._block, frame)
        except BaseException as raised:
            if raised.__context__ is error and error is not None:  # hide `SkipBlock`, which ended the block
                raised.__context__ = error.__context__
            raise
        return True

    async def __aenter__(self) -> NoReturn:
        raise TraceError(
            "Write `with`, not `async with`: the block is sent with the requests, and only these are awaited."
        )

    async def __aexit__(self, *_: object) -> None:
        """Never called."""

    def _captured(self, block: Block, frame: FrameType) -> None:
        """Handle the block of the with-statement in `frame`."""
        raise NotImplementedError


class Session(BlockContext):
    """`with model.session():`, a block with several traces, which runs in place. `.save()` outside of the traces returns the value
    itself.
    """

    def _captured(self, block: Block, frame: FrameType) -> None:
        target = {block.target: self} if isinstance(block.target, str) else {}
        token = SAVE_ABOVE.set(_itself)
        try:
            names = block.function()({"__save__": _itself, "__backward__": backward, "__steps__": steps_of, **target})
        finally:
            SAVE_ABOVE.reset(token)
        push(frame, names)


def _itself(value: Any) -> Any:
    refuse(value)
    return value


class InvokeContext(BlockContext):
    """`with tracer.invoke(prompt):`, one request of the trace."""

    def __init__(self, tracer: Tracer, invoke: Invoke) -> None:
        super().__init__()
        self._tracer = tracer
        self._invoke = invoke

    def _captured(self, block: Block, frame: FrameType) -> None:
        self._invoke.is_elsewhere = not self._tracer.is_run_by(frame)
        self._tracer.add(self._invoke, block)


class EditContext(BlockContext):
    """`with model.edit() as edited:`, a block that runs for every request of the view `edited`, or of the model if `inplace`."""

    def __init__(self, model: Any, name: str | None, inplace: bool) -> None:
        super().__init__()
        self._model, self._inplace = model, inplace
        self._name, self._has_name = name or f"edit-{next(_EDITS)}", name is not None
        self._view = model._edited_view(self._name)

    def _bound(self, block: Block) -> Any:
        if isinstance(block.target, tuple):
            if len(block.target) != 2:
                raise TraceError("The target of an edit is one name, or two: `with model.edit() as (tracer, edited):`.")
            self._inplace = self._inplace or self._model.has_engine
            return BodyTracer(), self._view
        if block.target is None and not self._inplace:
            raise TraceError(
                "model.edit() makes an edited view of the model: write `with model.edit() as edited:` and use `edited`; or "
                "`with model.edit(inplace=True):` to edit the model itself."
            )
        return BodyTracer() if self._inplace else self._view

    def _captured(self, block: Block, frame: FrameType) -> None:
        names = (block.target,) if isinstance(block.target, str) else block.target or ()
        bound = self._bound(block)
        injected = dict(zip(names, bound if isinstance(bound, tuple) else (bound,), strict=False))
        edit = StandingEdit(BlockProgram(block, injected), self._has_name)
        if self._name in self._model.edits:
            text = f"This edit takes the place of the one called {self._name!r}. Give it another name to have both."
            warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno)
        for model in (self._view, self._model) if self._inplace else (self._view,):
            model.edits[self._name] = edit


class Tracer(BlockContext):
    """`with model.trace(...) as tracer:`.

    Attributes:
        outputs: the final output of every invoke, in order, once the trace has run.
        result: the output, if there is one invoke; else a list of them.
        backend: with `mode="async"`, the stream of outputs: `async for output in tracer.backend`.
    """

    def __init__(
        self,
        model: Any,  # a `TraceModel`, whose module imports this one
        prompt: Prompt | Sequence[Prompt] | None,
        params: dict[str, Any],
        max_tokens: int = 1,
        plan: Any = None,
        edits: Sequence[TraceProgram] | None = None,
        progress: bool | None = None,
    ) -> None:
        super().__init__()
        self._model, self._progress = model, progress
        self._edits = edits
        self._prompt = prompt
        self._adapter, self._params = model.adapter_in(params)
        self._max_tokens = max_tokens
        sampling(self._params, max_tokens)  # raises for an invalid parameter
        self._plan = Plan.of(plan)
        self._saved: dict[int, Any] = {}
        self._collecting = False
        self._has_barrier = False
        self._outer: frozenset[str] = frozenset()  # names that the block around the invokes bound
        self.invokes: list[Invoke] = []
        self.outputs: list[Any] = []
        self._result: Any = None
        self.backend: Any = None

    def __midstream_reference__(self) -> Any:
        return ("tracer",)

    @property
    def result(self) -> Any:
        if not self.outputs:
            raise TraceError("tracer.result exists only after the trace has run.")
        if self._result is not None:
            return self._result
        return self.outputs[0] if len(self.outputs) == 1 else self.outputs

    def __getattr__(self, name: str) -> Any:
        if name in ("iter", "all", "next", "stop", "cache"):
            raise _MisplacedError(
                f"tracer.{name} belongs into the code of a request: into an invoke's block, or a trace's that has a prompt."
            )
        raise AttributeError(f"a trace has no {name}", name=name, obj=self)

    def invoke(
        self, prompt: Prompt | Sequence[Prompt] | None = None, *, plan: Any = None, edits: Any = None, **params: Any
    ) -> InvokeContext:
        """One request of this trace.

        Args:
            prompt: as in `trace`. None runs the block on the whole batch, on `LanguageModel`.
            plan, edits: for this request, replacing the trace's.
            params: sampling parameters and the adapter of this request; the trace's are the defaults.
        """
        if not self._collecting:
            raise TraceError("Give model.trace() no prompt to have invokes in it: `with model.trace() as tracer:`.")
        prompt, params = prompt_in(prompt, params)
        if prompt is None and self._model.has_engine:
            raise TraceError(
                "tracer.invoke() without a prompt is for the batch of a LanguageModel. On vLLM each request has its own tokens: write "
                "an invoke for each prompt, or tracer.invoke([a, b])."
            )
        own = self._plan if plan is None else Plan.of(plan)
        chosen = self._edits if edits is None else self._model.chosen_edits(edits)
        adapter, params = self._model.adapter_in(params, self._adapter)
        params = sampling({**self._params, **params}, self._max_tokens, self._model._generation)
        return InvokeContext(self, Invoke(prompt, None, params, own, edits=chosen, adapter=adapter))

    def add(self, invoke: Invoke, block: Block) -> None:
        """Add an invoke with its block; on an engine, one for each of its prompts."""
        prompts = [None] if invoke.prompt is None else prompts_of(invoke.prompt)[0]
        if len(prompts) == 1 or not self._model.has_engine:
            prompts = [prompts[0] if len(prompts) == 1 else prompts]
        for prompt, adapter in zip(prompts, self._model.adapters_of(invoke.adapter, len(prompts)), strict=True):
            own = block if len(prompts) == 1 else replace(block)
            self.invokes.append(replace(invoke, prompt=prompt, program=self.program_of(own), adapter=adapter))

    def barrier(self, parties: int) -> Barrier:
        """A point where `parties` invokes wait for each other. Call it in each of them."""
        self._has_barrier = True
        return Barrier(parties)

    def save(self, value: Any) -> Any:
        refuse(value)
        self._saved[id(value)] = value
        return value

    def is_run_by(self, frame: FrameType) -> bool:
        """Whether the frame runs the trace's own block."""
        return self._block is not None and frame.f_code is self._block.code

    def program_of(self, block: Block) -> BlockProgram:
        """The program of a block. In the block's variables, a `BodyTracer` replaces this tracer."""
        injected = {name: BodyTracer() for name, value in block.captured.items() if value is self}
        if self._prompt is not None and isinstance(block.target, str):
            injected[block.target] = BodyTracer()
        saved = [name for name, value in block.captured.items() if id(value) in self._saved]
        return BlockProgram(block, injected, saved)

    def _captured(self, block: Block, frame: FrameType) -> None:
        outer: dict[str, Any] = {}
        if self._prompt is not None:
            params = sampling(self._params, self._max_tokens, self._model._generation)
            invoke = Invoke(self._prompt, None, params, self._plan, edits=self._edits, adapter=self._adapter)
            self.add(invoke, block)
        else:
            outer = self._collect(block)
            self._outer = frozenset(outer)
        together = link(self._blocks())
        if together and any(invoke.params.get("n", 1) > 1 for invoke in self.invokes):
            raise TraceError(
                "Invokes that use each other's variables are one request each, so n > 1 is not possible with them: add an invoke for each "
                "sample."
            )
        together = together or self._has_barrier
        place = frame.f_code.co_filename, frame.f_lineno, frame.f_globals
        running = self._model._run_with_bar(self.invokes, together, progress=self._progress)
        if self._model._is_async:
            self.backend = running
            self.outputs = self.backend.outputs
            self.backend.gives_one = len(self.invokes) == 1
            self.backend.when_done = lambda results: _warn(place, self._mutation_warnings(results))
            return
        results: list[InvokeResult] = self._model._finish(running.gathered())
        self.outputs = [
            output
            for invoke, result in zip(self.invokes, results, strict=True)
            if invoke.prompt is not None
            for output in getattr(result.output, "rows", [result.output])
        ]
        self._result = results[0].output if len(results) == 1 else self.outputs
        mine = [result for invoke, result in zip(self.invokes, results, strict=True) if not invoke.is_elsewhere]
        values = saved_values(outer, self._saved, self.invokes, results)
        unsaved = [*(name for name in outer if name not in block.captured), *_names(mine, "unsaved")]
        push(frame, {**in_place_of(unsaved, values, frame), **values})
        raise_failures(results)
        _warn(place, self._warnings(results, bool(values)))

    def _warnings(self, results: list[InvokeResult], has_values: bool) -> Iterator[str]:
        """Warnings about values that stayed in the trace. `has_values`: whether any value came back to the caller's variables."""
        if names := sorted({*_names(results, "rebound")}):
            yield _REBOUND.format(names=", ".join(names), name=names[0])
        yield from self._mutation_warnings(results)
        if not self._model.has_engine:
            return
        outcomes = [outcome for result in results for outcome in result.outcomes]
        if not (has_values or any(outcome.values for outcome in outcomes)) and any(
            outcome.saved for outcome in outcomes
        ):
            yield _NOTHING_SAVED

    def _mutation_warnings(self, results: list[InvokeResult]) -> Iterator[str]:
        """A warning about the caller's objects that the trace changed and did not save.

        The invokes share the objects made by the block around them, so these are exempt.
        """
        names = [name for name in _names(results, "mutated") if name.partition(".")[0] not in self._outer]
        if names := _last_parts(names):
            yield _MUTATED_IN_ENGINE.format(names=", ".join(names), name=names[0])

    def _blocks(self) -> list[Block]:
        return [invoke.block for invoke in self.invokes if invoke.block is not None]

    def _collect(self, block: Block) -> dict[str, Any]:
        """Run the block around the invokes; each invoke in it captures its own block."""
        self._collecting = True
        token = SAVE_ABOVE.set(self.save)
        target = {block.target: self} if isinstance(block.target, str) else {}
        extra = {"__save__": self.save, "__steps__": steps_of, **target}
        try:
            names = block.function()(extra, {})
        except NameError as error:
            if any(error.name in each.assigned for each in self._blocks()):
                error.add_note(_NOT_YET.format(name=error.name))
            raise
        except TraceError as error:
            if self.invokes or isinstance(error, _MisplacedError):
                raise
            raise TraceError(_NO_PROMPT) from error
        finally:
            self._collecting = False
            SAVE_ABOVE.reset(token)
        if not self.invokes:
            raise TraceError(_NO_PROMPT)
        return names


def warn_of_functions(invokes: Sequence[Invoke], results: Sequence[InvokeResult]) -> None:
    """Warn about the caller's objects that functions, such as those of `model.run`, changed and did not return."""
    by_function: dict[int, tuple[Any, list[InvokeResult]]] = {}
    for invoke, result in zip(invokes, results, strict=True):
        if isinstance(invoke.program, FunctionProgram):
            by_function.setdefault(id(invoke.program.fn), (invoke.program.fn, []))[1].append(result)
    for fn, own in by_function.values():
        code, names = code_of(fn), _last_parts(_names(own, "mutated"))
        if names and code is not None:
            text = _MUTATED_BY_FUNCTION.format(function=code.co_name, names=", ".join(names))
            _warn((code.co_filename, code.co_firstlineno, getattr(fn, "__globals__", {})), [text])


def _last_parts(names: Iterable[str]) -> list[str]:
    """The last parts of dotted names: `found` for `keep.found`."""
    return sorted({name.rpartition(".")[2] for name in names})


def _warn(place: tuple[str, int, dict[str, Any]], texts: Iterable[str]) -> None:
    """Warn at a line of a file. Python shows a warning once for each line, which it notes in the module's globals."""
    file, line, names = place
    for text in texts:
        warnings.warn_explicit(text, UserWarning, file, line, registry=names.setdefault("__warningregistry__", {}))


def _names(results: list[InvokeResult], kind: str) -> list[str]:
    """The names that the invokes' own bodies report as `mutated`, `unsaved` or `rebound`."""
    return [name for result in results for outcome in result.outcomes[:1] for name in getattr(outcome, kind)]


def saved_values(
    outer: dict[str, Any], saved: Mapping[int, Any], invokes: list[Invoke], results: list[InvokeResult]
) -> dict[str, Any]:
    """The values to bind in the caller's frame, by name. If several invokes saved a name, its value is the list of theirs, in order.

    The caller's lists and dicts, both those that invokes use by name and those `saved` in the block around them, keep their identity and
    receive the items that invokes put into them. The invokes also share them in the engine.
    """
    above = {name: value for name, value in outer.items() if id(value) in saved}
    values = dict(above)
    # Each outcome has the contents that the caller's objects had when its body ended, so the last one counts.
    every = [(outcome, invoke) for invoke, result in zip(invokes, results, strict=True) for outcome in result.outcomes]
    for outcome, invoke in sorted(every, key=lambda each: each[0].order):
        if (left := outcome.values.get(LEFT)) is not None and invoke.block is not None:
            outcome.values |= put_back(left, invoke.block.callers)
    several: dict[str, list[Any]] = {}
    for invoke, result in zip(invokes, results, strict=True):
        for name in without_left(result.outcomes[0].values) if result.outcomes else ():
            # Leave out standing edits that failed.
            samples = [o for o in result.outcomes if o.failure is None or name in o.values]
            each = [outcome.values.get(name) for outcome in samples]
            there = _callers_object(invoke, name, above)
            is_shared = there is not None and all(value is there for value in each)  # also by the samples
            if not invoke.is_elsewhere and name.isidentifier():
                if is_shared or name in above:
                    values[name] = each[-1]
                else:
                    several.setdefault(name, []).append(each[0] if len(each) == 1 else each)
    values |= {name: found if len(found) > 1 else found[0] for name, found in several.items()}
    return values


def _callers_object(invoke: Invoke, name: str, above: Mapping[str, Any]) -> Any:
    """The caller's object under a name that the invoke uses and does not bind, or the object saved in the block around the invokes."""
    block = invoke.block
    if block is not None and name not in block.assigned and name in block.captured:
        return block.captured[name]
    return above.get(name) if not invoke.is_elsewhere else None
