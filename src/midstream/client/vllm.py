"""`VLLM`: traces and plans on a stock vLLM engine."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

from midstream.arch.detect import show_tree
from midstream.capture.sinks import Sinks
from midstream.client.model import TraceModel
from midstream.client.requests import Invoke, InvokeResult, Planner, Prompt, encode, raise_failures, refuse_multimodal
from midstream.client.vllm_async import OutputStream
from midstream.client.vllm_engine import EngineConnection, run_requests
from midstream.client.vllm_requests import EngineRequests, RecordAs, make_requests, take_plan
from midstream.engine import launch
from midstream.errors import MidstreamError, TraceError, UnknownModuleError
from midstream.plan.checks import ModelFacts
from midstream.plan.values import Plan, RecordedRun
from midstream.settings import RECORD_BYTES, Settings
from midstream.sites import ACCESSORS, LAYER_SITES
from midstream.trace.envoy import nearest

_IN_TRACES = ("logits", "samples", "next_token_probs", "project_on_vocab", "steer", "skip_layers")
_HELD = ("weight", "bias", "parameters", "state_dict", "forward")


class ModuleHandle:
    """Refers to a module of the engine's model outside of a trace. Inside a trace it is the module."""

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
            if name in _HELD:
                raise TraceError(
                    f"Read the contents of modules in a trace: `model.run(lambda m: m.{self._path}.{name}, prompt)`. Outside of one the "
                    "model is only the tree of its modules."
                )
            siblings = [p.rpartition(".")[2] for p in self._paths if p.rpartition(".")[0] == self._path]
            siblings += [] if self._path else [*ACCESSORS, *LAYER_SITES, *_IN_TRACES]
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
    """A vLLM engine with traces and plans.

        model = VLLM("meta-llama/Llama-3.1-8B", tensor_parallel_size=1)
        outputs = model.generate(prompts, plan=Steer("resid_post", layers=14, vector=v, scale=4.0), max_tokens=64)
        with model.trace("The Eiffel Tower is in", temperature=0.0):
            h = model.layers_output[8].save()         # [tokens, hidden], on the CPU
            model.layers_output[10] += v

    Steps without traces run as in stock vLLM, compiled and with CUDA graphs.

    Args:
        model: as for `vllm.LLM`.
        mode: `"sync"` runs traces to their end; `"async"` starts them, and `async for output in tracer.backend` follows.
        rename: names of this model's own modules for the standard ones, such as `{"blocks": "layers"}`.
        graph_sites: sites that are built into the compiled forward and its CUDA graphs; a plan or trace at another site runs its
            steps uncompiled.
        record_bytes: how many bytes of each worker's memory recorded runs may take.
        progress: whether to show vLLM's progress bar if a call has several requests.
        engine: any argument of `vllm.LLM`, or of `AsyncEngineArgs` with `mode="async"`.

    Raises:
        UnsupportedVersionError: the vLLM version is not supported.
        ArchitectureError: the model's sites could not be found.
        UnknownSiteError: `graph_sites` has a site that cannot be built in.
    """

    _ships = True

    def __init__(
        self,
        model: str,
        *,
        mode: Literal["sync", "async"] = "sync",
        rename: Mapping[str, str] | None = None,
        graph_sites: Sequence[str] = ("resid_post",),
        record_bytes: int = RECORD_BYTES,
        progress: bool = False,
        **engine: Any,
    ) -> None:
        if mode not in ("sync", "async"):
            raise MidstreamError(f'mode is "sync" or "async"; {mode!r} was given.')
        settings = Settings(
            allow_traces=True, rename=dict(rename or {}), graph_sites=tuple(graph_sites), record_bytes=record_bytes
        )
        arguments = launch.llm_arguments(model, settings, engine)
        self.edits = {}
        self.mode, self.model_name = mode, model
        self.progress = progress
        self.sinks = Sinks()
        started: Any = (launch.start_async_llm if mode == "async" else launch.start_llm)(arguments)
        self._connection = EngineConnection(started, self.sinks, mode == "async")
        self.config = self._connection.config
        self.vectors, self.runs = self._connection.vectors, self._connection.runs
        self._planner: tuple[Any, Planner] | None = None
        self._tokenizer: Any = None

    _is_async = property(lambda self: self.mode == "async")  # type: ignore[assignment]

    def __midstream_reference__(self) -> Any:
        return ("model",)

    # The engine.

    @property
    def engine(self) -> Any:
        """The `vllm.LLM` or `AsyncLLM` underneath. Raises EngineClosedError if the engine is closed or dead."""
        return self._connection.engine

    @property
    def is_open(self) -> bool:
        """Whether the engine is neither closed nor known to be dead."""
        return self._connection.is_open

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, from transformers."""
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self.config.model_config.tokenizer)
        return self._tokenizer

    async def start(self) -> Self:
        """Connect the workers of an async engine. The first trace calls it; call it yourself to use the module tree before."""
        await self._connection.start()
        return self

    def close(self) -> None:
        """End the engine and its processes. Closing again does nothing."""
        self._connection.close()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def gauges(self) -> Any:
        """Counts of what each worker holds: zeros when no traced request is running (`traced_steps` counts since the start).

        A list with a dict for each worker; awaitable with `mode="async"`.
        """
        self._connection.drop_interrupted()
        return self._connection.ask("midstream_gauges")

    # The module tree, outside of traces.

    @property
    def description(self) -> dict[str, Any]:
        """The module tree, its shapes and sites, from the workers."""
        return self._connection.description

    @property
    def facts(self) -> ModelFacts:
        """The facts about the model that plans are checked against."""
        described = self.description
        points = ((*point.split("/"), width) for point, width in described["widths"].items())
        return ModelFacts(
            described["num_layers"], {(site, int(layer)): width for site, layer, width in points}, described["dtype"]
        )

    @property
    def planner(self) -> Planner:
        """Prepares plans for this engine, with the vectors and runs that exist now."""
        known = (self.vectors.digests, [run.id for run in self.runs.handles])
        if self._planner is None or self._planner[0] != known:
            self._planner = known, Planner(self.facts, lambda: self.tokenizer, self.vectors, self.runs)
        return self._planner[1]

    @property
    def longest_prompt(self) -> int:
        return self.config.model_config.max_model_len - 1

    @property
    def num_layers(self) -> int:
        """Of all pipeline stages together."""
        return self.description["num_layers"]

    @property
    def hidden_size(self) -> int:
        """The width of the residual stream."""
        return self.description["hidden_size"]

    @property
    def _text_config(self) -> Any:
        return self.config.model_config.hf_text_config

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "_connection" not in self.__dict__:
            raise AttributeError(name)
        if name in ACCESSORS or name in _IN_TRACES:
            raise TraceError(
                f"model.{name} exists only in a trace: `with model.trace(prompt):` or `model.run(fn, prompt)`."
            )
        return getattr(ModuleHandle("", frozenset(self.description["modules"])), name)

    def __repr__(self) -> str:
        if self._connection.is_closed:
            return "<VLLM, closed>"
        described = self.description
        return show_tree(described["modules"], described["shapes"], described["sites"])

    # Running.

    def _prepare(
        self, invokes: list[Invoke], together: bool = False, record: RecordAs | None = None
    ) -> Callable[[], EngineRequests]:
        """Encode the prompts. The returned function checks the plans and makes the requests; the engine has to be started."""
        for invoke in invokes:
            refuse_multimodal(invoke.plan, invoke.prompt)
        prompts = [encode(invoke.prompt, lambda: self.tokenizer) for invoke in invokes]
        return lambda: make_requests(
            invokes,
            prompts,
            together,
            self.config,
            edits=list(self.edits.values()),
            planner=lambda: self.planner,
            sinks=self.sinks,
            stream=self._is_async,
            record=record,
        )

    def _composed(self, invokes: list[Invoke]) -> list[Invoke]:
        """The invokes with all their plans: the model's own, and those in `extra_args`."""
        return self._with_plan([take_plan(invoke) for invoke in invokes])

    def _run(self, invokes: list[Invoke], together: bool = False) -> list[InvokeResult]:
        requests = self._prepare(self._composed(invokes), together)()
        return run_requests(self._connection, requests, self.progress)

    def _stream(self, invokes: list[Invoke], together: bool = False) -> OutputStream:
        return self._streamed(self._composed(invokes), together)

    def _streamed(self, invokes: list[Invoke], together: bool = False, record: RecordAs | None = None) -> OutputStream:
        prepare = self._prepare(invokes, together, record)
        if not self._connection.is_described and any(invoke.plan for invoke in invokes):
            return OutputStream(self._connection, prepare)  # plans are checked once the engine has started
        requests = prepare()
        return OutputStream(self._connection, lambda: requests)

    def _record(self, prompt: Prompt, plan: Plan, name: str) -> Any:
        run_id = uuid.uuid4().hex
        invoke = Invoke(prompt, None, {"max_tokens": 1, "temperature": 0.0}, plan)
        if self._is_async:
            return self._recorded_later(self._streamed([invoke], record=(run_id, name)), name, run_id)
        requests = self._prepare([invoke], record=(run_id, name))()
        raise_failures(run_requests(self._connection, requests))
        return self.runs.add(_recorded_run(requests, name, run_id))

    async def _recorded_later(self, stream: OutputStream, name: str, run_id: str) -> RecordedRun:
        await stream
        assert stream.requests is not None
        return await self.runs.add(_recorded_run(stream.requests, name, run_id))


def _recorded_run(requests: EngineRequests, name: str, run_id: str) -> RecordedRun:
    (plan,) = requests.plans
    assert plan is not None
    return plan.recorded_run(name, run_id)
