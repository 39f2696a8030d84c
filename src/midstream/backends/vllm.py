"""`VLLM`: traces on a stock vLLM engine."""

from __future__ import annotations

import asyncio
import secrets
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

import torch

from midstream.backends.async_ import Stream
from midstream.backends.model import TraceModel
from midstream.backends.submission import Requests, Submission
from midstream.backends.tracer import Invoke, Prompt
from midstream.engine import launch
from midstream.engine.request import TraceRequest, requests_of
from midstream.engine.results import Mailbox, Receiver
from midstream.engine.settings import Settings
from midstream.errors import EngineClosedError, MidstreamError, PromptError, TraceError, UnknownModuleError
from midstream.sites import ACCESSORS
from midstream.trace.analysis import keeps_to_graph_sites
from midstream.trace.envoy import nearest
from midstream.trace.program import Program, ship
from midstream.trace.show import show_tree


class ModuleHandle:
    """A module of the engine's model, named outside of a trace. Inside one it is the module."""

    def __init__(self, path: str, paths: frozenset[str]) -> None:
        self._path = path
        self._paths = paths

    def __midstream_reference__(self) -> Any:
        return ("module", self._path)

    def _child(self, name: str) -> ModuleHandle:
        path = f"{self._path}.{name}" if self._path else name
        if path not in self._paths:
            if name in ("output", "input", "inputs", "source"):
                raise TraceError(
                    f"{self._path}.{name} exists only in a trace: `with model.trace(prompt):` or `model.run(fn, prompt)`."
                )
            siblings = [p.rpartition(".")[2] for p in self._paths if p.rpartition(".")[0] == self._path]
            raise UnknownModuleError(f"{self._path or 'the model'} has no module {name}{nearest(name, siblings)}")
        return ModuleHandle(path, self._paths)

    def __getattr__(self, name: str) -> ModuleHandle:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._child(name)

    def __getitem__(self, index: int) -> ModuleHandle:
        return self._child(str(index))

    def __repr__(self) -> str:
        return f"<{self._path}>"


class VLLM(TraceModel):
    """A vLLM engine with traces.

        model = VLLM("meta-llama/Llama-3.1-8B", tensor_parallel_size=1)
        with model.trace("The Eiffel Tower is in", temperature=0.0):
            h = model.layers_output[8].save()         # [tokens, hidden], on the CPU
            model.layers_output[10] += v

    Steps that no trace shares run as in stock vLLM, compiled and with CUDA graphs.

    Args:
        model: as for `vllm.LLM`.
        mode: `"sync"` runs traces to their end; `"async"` starts them, and `async for output in tracer.backend` follows.
        rename: names of this model's own modules for the standard ones, such as `{"blocks": "layers"}`.
        progress: whether to show vLLM's progress bar over the requests of a call, if there are several.
        engine: any argument of `vllm.LLM`, or of `AsyncEngineArgs` with `mode="async"`.

    Raises:
        UnsupportedVersionError: vLLM lies outside the supported range.
        ArchitectureError: the model's structure could not be placed.
    """

    def __init__(
        self,
        model: str,
        *,
        mode: Literal["sync", "async"] = "sync",
        rename: Mapping[str, str] | None = None,
        progress: bool = False,
        **engine: Any,
    ) -> None:
        if mode not in ("sync", "async"):
            raise MidstreamError(f'mode is "sync" or "async"; {mode!r} was given.')
        settings = Settings(allow_traces=True, rename=dict(rename or {}))
        arguments = launch.engine_arguments(model, settings, engine)
        self.edits = {}
        self.mode = mode
        self.progress = progress
        self.interrupted: list[str] = []  # traces whose requests were taken off the engine
        self.streams: weakref.WeakSet[Stream] = weakref.WeakSet()  # those that are being iterated over
        self._engine: Any = (launch.start_async_llm if mode == "async" else launch.start_llm)(arguments)
        self._config = launch.config_of(self._engine)
        self._receiver: Receiver | None = Receiver()
        self._end = weakref.finalize(self, _end, self._engine, self._receiver)  # once; at the latest when Python ends
        self._described: dict[str, Any] | None = None
        self._senders: list[str] = []
        self._tokenizer: Any = None
        self._loop = _running_loop() if mode == "async" else None
        self._starting: asyncio.Task[None] | None = None
        if mode == "sync":
            self._senders = self._engine.collective_rpc("midstream_connect", args=(self._receiver.address,))

    _deferred = property(lambda self: self.mode == "async")  # type: ignore[assignment]

    def __midstream_reference__(self) -> Any:
        return ("model",)

    # The engine.

    @property
    def engine(self) -> Any:
        """The `vllm.LLM` or `AsyncLLM` underneath. Raises EngineClosedError after `close`."""
        if self._engine is None:
            raise EngineClosedError("This engine is closed; make a new VLLM(...).")
        return self._engine

    @property
    def tokenizer(self) -> Any:
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self._config.model_config.tokenizer)
        return self._tokenizer

    @property
    def is_open(self) -> bool:
        return self._engine is not None

    async def start(self) -> Self:
        """With `mode="async"`: have the workers connect. The first trace does it by itself; the module tree needs it before."""
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise MidstreamError(
                "An async engine belongs to the event loop that it was first used in; keep to one asyncio.run()."
            )
        self._loop = loop
        if self.mode == "async":
            if self._starting is None:
                self._starting = loop.create_task(self._connect())
            await asyncio.shield(self._starting)
        return self

    async def _connect(self) -> None:
        assert self._receiver is not None
        self._senders = await self.engine.collective_rpc("midstream_connect", args=(self._receiver.address,))
        self._described = (await self.engine.collective_rpc("midstream_describe"))[0]

    def close(self) -> None:
        """End the engine and its processes. Closing again does nothing."""
        for stream in list(self.streams):
            stream.fail(EngineClosedError("The engine was closed while the trace ran."))
        self._engine = self._receiver = None
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def gauges(self) -> Any:
        """What is alive on each worker: zeros when no traced request is running (`traced_steps` counts since the start).

        A list with a dict for each worker; to be awaited with `mode="async"`.
        """
        self.drop_interrupted()
        return self.engine.collective_rpc("midstream_gauges")

    def drop_interrupted(self) -> None:
        """Have the workers forget the traces that were interrupted: not at once, for a worker may be held up by the trace itself."""
        if self.interrupted:
            traces, self.interrupted = self.interrupted, []
            self.engine.collective_rpc("midstream_drop", args=(traces,))

    # The module tree, outside of traces.

    @property
    def description(self) -> dict[str, Any]:
        """The module tree, its shapes and sites, from the workers."""
        if self._described is None:
            if self.mode == "async":
                raise TraceError("With mode='async' call `await model.start()` first.")
            self._described = self.engine.collective_rpc("midstream_describe")[0]
        return self._described

    @property
    def num_layers(self) -> int:
        return self.description["num_layers"]

    @property
    def hidden_size(self) -> int:
        return self.description["hidden_size"]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "_engine" not in self.__dict__:
            raise AttributeError(name)
        if name in ACCESSORS or name in ("logits", "samples", "next_token_probs"):
            raise TraceError(
                f"model.{name} exists only in a trace: `with model.trace(prompt):` or `model.run(fn, prompt)`."
            )
        return getattr(ModuleHandle("", frozenset(self.description["modules"])), name)

    def __repr__(self) -> str:
        if self._engine is None:
            return "<VLLM, closed>"
        described = self.description
        return show_tree(described["modules"], described["shapes"], described["sites"])

    # Running.

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            ids: Any = self.tokenizer(prompt)["input_ids"]
        elif isinstance(prompt, Mapping):
            ids = prompt["input_ids"] if "input_ids" in prompt else prompt["prompt_token_ids"]
        else:
            ids = prompt
        ids = torch.as_tensor(ids)
        ids = ids[0] if ids.ndim == 2 and ids.shape[0] == 1 else ids
        if ids.ndim != 1 or not ids.numel():
            raise PromptError(f"A prompt is a text or one sequence of at least one token id; {prompt!r} was given.")
        return ids.long().tolist()

    def _start(self, invokes: list[Invoke], together: bool) -> Any:
        prompts = [self._encode(invoke.prompt) for invoke in invokes]
        programs = [self._with_edits(invoke.program) for invoke in invokes]
        traced = any(programs)
        launch.check_prompts(self._config, prompts if traced else [], together)
        requests: Sequence[TraceRequest | None] = [None] * len(invokes)
        if traced:
            keep = [all(map(keeps_to_graph_sites, each)) for each in programs]
            samples = [invoke.params.get("n", 1) for invoke in invokes]
            requests = requests_of(ship(programs), keep, samples, together, self._deferred)
        engine_prompts = [launch.engine_prompt(ids, secrets.token_hex(8) if traced else None) for ids in prompts]
        plain = {id(i.params): launch.sampling_params(i.params, None) for i in invokes} if not traced else {}
        params = [
            plain.get(id(i.params)) or launch.sampling_params(i.params, r)
            for i, r in zip(invokes, requests, strict=True)
        ]
        return (Stream if self._deferred else Submission)(self, Requests(engine_prompts, params, requests))

    def expect(self, traces: Sequence[TraceRequest | None]) -> list[Mailbox | None]:
        """A mailbox for the results of each traced request."""
        receiver = self._receiver
        if receiver is None:
            raise EngineClosedError("This engine is closed; make a new VLLM(...).")
        return [receiver.expect((t.trace, t.index), self._senders) if t is not None else None for t in traces]

    def _with_edits(self, program: Program | None) -> list[Program]:
        return [*self.edits.values(), *([program] if program is not None else [])]

    def _outputs(self, prompts: list[Prompt], params: dict[str, Any] | list[dict[str, Any]]) -> Any:
        each = params if isinstance(params, list) else [params] * len(prompts)
        submission = self._start([Invoke(p, None, q) for p, q in zip(prompts, each, strict=True)], False)
        return submission if self._deferred else [ran.output for ran in submission.wait()]


def _end(engine: Any, receiver: Receiver) -> None:
    receiver.close()
    launch.shut_down(engine)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
