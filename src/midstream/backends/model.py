"""What both backends have in common: `trace`, `run`, `generate`, `edit`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Protocol

from midstream.backends.tracer import Invoke, Prompt, Ran, Tracer, _Context, in_with_header, raise_failures
from midstream.errors import PromptError, TraceError
from midstream.trace.block import Block
from midstream.trace.body import current_body, steps
from midstream.trace.program import RETURNED, BlockProgram, FunctionProgram, Program
from midstream.trace.tracer import BodyTracer


class Running(Protocol):
    """A trace on its way."""

    def wait(self) -> list[Ran]: ...


class Edit(Program):
    """A program that runs again in every step of every request."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def run(self, model: Any, shared: dict[str, Any]) -> dict[str, Any]:
        for _ in steps(current_body(), slice(None)):
            self.program.run(model, {})
        return {}

    def recover(self, error: BaseException, body: Any) -> dict[str, Any]:
        return {}


class EditContext(_Context):
    """`with model.edit("name"):`, a block left on the model for every request."""

    def __init__(self, model: TraceModel, name: str) -> None:
        super().__init__()
        self._model = model
        self._name = name

    def _taken(self, block: Block, frame: FrameType) -> None:
        injected = {block.target: BodyTracer()} if block.target else {}
        self._model.edits[self._name] = Edit(BlockProgram(block, injected))


def sampling(params: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    """Sampling parameters under vLLM's names; `max_new_tokens` is taken for `max_tokens`."""
    params = dict(params)
    if "max_new_tokens" in params:
        params["max_tokens"] = params.pop("max_new_tokens")
    return {"max_tokens": max_tokens, **params}


class TraceModel:
    """A model that traces run on."""

    edits: dict[str, Edit]
    _deferred = False

    def _start(self, invokes: list[Invoke], together: bool) -> Any:
        """Begin to run `invokes`, `together` if they must be in the same steps: a Running, or a Stream if `_deferred`."""
        raise NotImplementedError

    def _outputs(self, prompts: list[Prompt], params: dict[str, Any] | list[dict[str, Any]]) -> Any:
        raise NotImplementedError

    def trace(self, prompt: Prompt | None = None, **params: Any) -> Tracer:
        """`with model.trace(prompt) as tracer:` runs the block inside the model's forward pass on `prompt`.

        Args:
            prompt: text, token ids, or a tokenizer's output; None if the block has invokes with prompts of their own.
            params: sampling parameters, `max_tokens` (1 if not given), `temperature` and so on.

        Raises:
            PromptError: an empty prompt, or one longer than a step may be.
            InterventionError: the block raised; also an instance of the builtin class that was raised.
            OutOfOrderError, NeverReachedError, ShapeError, UnknownModuleError, UnknownSiteError: what the block asked for
                cannot be had.
        """
        return Tracer(self, prompt, sampling(params, 1))

    def run(self, fn: Callable[..., Any], prompt: Prompt | list[str] | list[list[int]], **params: Any) -> Any:
        """Run `fn(model)` or `fn(model, tracer)` inside the forward pass on `prompt`; the primitive under the with-block.

        Args:
            fn: returns what to bring back: tensors, or containers of them.
            prompt: one prompt, or a list of them, each with a run of `fn` of its own in one batch.
            params: as of `trace`.

        Returns:
            What `fn` returned, tensors on the CPU; a list for a list of prompts. To be awaited with `mode="async"`.
        """
        many = isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt)
        prompts: list[Any] = prompt if many else [prompt]  # type: ignore[assignment]
        if many and not prompts:
            raise PromptError("run needs at least one prompt.")
        program = FunctionProgram(fn)
        ran = self._start([Invoke(p, program, sampling(params, 1)) for p in prompts], False)
        if self._deferred:
            return _returned_later(ran, many)
        done = ran.wait()
        raise_failures([outcome for request in done for outcome in request.outcomes])
        return _values(done, many)

    def generate(self, prompts: Prompt | Sequence[Prompt] | None = None, **params: Any) -> Any:
        """Generate from prompts with the model's edits on; or, entered by `with`, a trace over a generation.

        Args:
            prompts: one prompt or several.
            params: sampling parameters; `max_tokens` is 16 if not given.

        Returns:
            A list of outputs, one a prompt; with `mode="async"` what to await for it, or to iterate over the outputs as they
            come. As `with model.generate(prompt, max_tokens=8) as tracer:` it is `model.trace`.
        """
        if in_with_header(sys._getframe(1)):
            return Tracer(self, prompts, sampling(params, 16))  # type: ignore[arg-type]
        if prompts is None:
            raise PromptError("generate needs a prompt.")
        single = (
            isinstance(prompts, str) or hasattr(prompts, "keys") or all(isinstance(token, int) for token in prompts)
        )
        return self._outputs([prompts] if single else list(prompts), sampling(params, 16))  # type: ignore[list-item,arg-type]

    def edit(self, name: str = "default") -> EditContext:
        """`with model.edit("name"):` leaves the block on the model: it runs in every step of every later request."""
        return EditContext(self, name)

    def clear_edits(self, name: str | None = None) -> None:
        """Take an edit away, or all of them."""
        if name is not None and name not in self.edits:
            raise TraceError(f"There is no edit {name!r}; there are: {', '.join(self.edits) or 'none'}.")
        for gone in [name] if name is not None else list(self.edits):
            del self.edits[gone]


async def _returned_later(stream: Any, many: bool) -> Any:
    await stream
    return _values(stream.ran, many)


def _values(done: list[Ran], many: bool) -> Any:
    values = [_returned(request) for request in done]
    return values if many else values[0]


def _returned(request: Ran) -> Any:
    values = [outcome.values.get(RETURNED) for outcome in request.outcomes]
    return values[0] if len(values) == 1 else values
