"""`VLLM`: traces and plans on a stock vLLM engine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
import weakref
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

from midstream.capture.sinks import Sinks
from midstream.client.async_ import Stream
from midstream.client.capturing import Capturing
from midstream.client.carried import make_requests, take_plan
from midstream.client.model import TraceModel
from midstream.client.planned import Planner, recorded_run, refuse_multimodal
from midstream.client.prompts import Prompt, encode
from midstream.client.runs import Runs
from midstream.client.submission import Requests, Submission
from midstream.client.tracer import Invoke, raise_failures
from midstream.client.vectors import Changes, Vectors
from midstream.engine import launch
from midstream.errors import EngineClosedError, MidstreamError, TraceError, UnknownModuleError
from midstream.plan.checks import ModelFacts
from midstream.plan.runs import RecordedRun
from midstream.plan.values import Plan
from midstream.ranks.merge import merged_description
from midstream.settings import RECORD_BYTES, Settings
from midstream.sites import ACCESSORS, LAYER_SITES
from midstream.trace.envoy import nearest
from midstream.trace.show import show_tree
from midstream.transport.results import Mailbox, Receiver

_IN_TRACES = ("logits", "samples", "next_token_probs", "project_on_vocab", "steer", "skip_layers")
_HELD = ("weight", "bias", "parameters", "state_dict", "forward")


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
            if name in _HELD:
                raise TraceError(
                    f"What modules hold is read in a trace: `model.run(lambda m: m.{self._path}.{name}, prompt)`. Outside of one the "
                    "model is the tree of its modules."
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

    Steps that no trace shares run as in stock vLLM, compiled and with CUDA graphs.

    Args:
        model: as for `vllm.LLM`.
        mode: `"sync"` runs traces to their end; `"async"` starts them, and `async for output in tracer.backend` follows.
        rename: names of this model's own modules for the standard ones, such as `{"blocks": "layers"}`.
        graph_sites: sites that are built into the compiled forward and its CUDA graphs; a plan or trace at another one runs its
            steps uncompiled.
        record_bytes: how much of each worker's memory recorded runs may take.
        progress: whether to show vLLM's progress bar over the requests of a call, if there are several.
        engine: any argument of `vllm.LLM`, or of `AsyncEngineArgs` with `mode="async"`.

    Raises:
        UnsupportedVersionError: vLLM lies outside the supported range.
        ArchitectureError: the model's structure could not be placed.
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
        self.has_died = False  # for all that has been heard: a call to the workers of a dead engine may wait for ever
        self.interrupted: list[str] = []  # traces whose requests were taken off the engine
        self.streams: weakref.WeakSet[Stream] = weakref.WeakSet()  # those that are being iterated over
        self._engine: Any = (launch.start_async_llm if mode == "async" else launch.start_llm)(arguments)
        self.config = launch.config_of(self._engine)
        self.stages: int = self.config.parallel_config.pipeline_parallel_size
        self.sinks = Sinks()
        self._receiver: Receiver | None = Receiver(launch.address_for_workers(self.config))
        # Once; at the latest when Python ends.
        self._end = weakref.finalize(self, _end, self._engine, self._receiver, self.sinks)
        self._described: dict[str, Any] | None = None
        self._planner: tuple[Any, Planner] | None = None
        self.lock = threading.RLock()  # a vllm.LLM is for one thread at a time
        self._senders: list[str] = []
        self._tokenizer: Any = None
        self.vectors = Vectors(self._send_vectors_now if mode == "sync" else lambda: None)
        self.runs = Runs(self._ask_runs, mode == "async")
        self._sending = asyncio.Lock()
        self._loop = _running_loop() if mode == "async" else None
        self._starting: asyncio.Task[None] | None = None
        if mode == "sync":
            if not launch.is_in_process(self._engine):
                self._receiver.when_gone = partial(launch.wake_waiting_callers, self._engine)
            self._senders = _that_send(launch.ask(self._engine, "midstream_connect", self._receiver.address))

    _deferred = property(lambda self: self.mode == "async")  # type: ignore[assignment]

    def __midstream_reference__(self) -> Any:
        return ("model",)

    # The engine.

    @property
    def engine(self) -> Any:
        """The `vllm.LLM` or `AsyncLLM` underneath. Raises EngineClosedError after `close`, and when it has died."""
        if self._engine is None:
            raise EngineClosedError("This engine is closed; make a new VLLM(...).")
        if self.has_died:
            raise EngineClosedError(launch.DIED)
        return self._engine

    @property
    def tokenizer(self) -> Any:
        """The model's, of transformers."""
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self.config.model_config.tokenizer)
        return self._tokenizer

    @property
    def is_open(self) -> bool:
        return self._engine is not None and not self.has_died

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
        self._senders = _that_send(await launch.ask(self.engine, "midstream_connect", self._receiver.address))
        self._described = merged_description(await launch.ask(self.engine, "midstream_describe"))

    def close(self) -> None:
        """End the engine and its processes. Closing again does nothing."""
        for stream in list(self.streams):
            stream.fail(EngineClosedError("The engine was closed while the trace ran."))
        self._engine = self._receiver = None
        self._end()

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
        return launch.ask(self.engine, "midstream_gauges")

    def drop_interrupted(self) -> None:
        """Have the workers forget the traces that were interrupted: not at once, for a worker may be held up by the trace itself."""
        if self.interrupted:
            traces, self.interrupted = self.interrupted, []
            launch.ask(self.engine, "midstream_drop", traces)

    # The module tree, outside of traces.

    @property
    def description(self) -> dict[str, Any]:
        """The module tree, its shapes and sites, from the workers."""
        if self._described is None:
            if self.mode == "async":
                raise TraceError("With mode='async' call `await model.start()` first.")
            self._described = merged_description(launch.ask(self.engine, "midstream_describe"))
        return self._described

    @property
    def facts(self) -> ModelFacts:
        """What plans are checked against."""
        described = self.description
        points = ((*point.split("/"), width) for point, width in described["widths"].items())
        return ModelFacts(
            described["num_layers"], {(site, int(layer)): width for site, layer, width in points}, described["dtype"]
        )

    @property
    def planner(self) -> Planner:
        """Makes plans ready for this engine, with the vectors and runs that there are now."""
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
        if name.startswith("_") or "_engine" not in self.__dict__:
            raise AttributeError(name)
        if name in ACCESSORS or name in _IN_TRACES:
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

    def _start(self, invokes: list[Invoke], together: bool) -> Any:
        return self._submit(self._with_plan([take_plan(invoke) for invoke in invokes]), together)

    def _submit(self, invokes: list[Invoke], together: bool, record: tuple[str, str] | None = None) -> Any:
        for invoke in invokes:
            refuse_multimodal(invoke.plan, invoke.prompt)
        prompts = [encode(invoke.prompt, lambda: self.tokenizer) for invoke in invokes]
        if not self._deferred:
            return Submission(self, make_requests(self, invokes, prompts, together, record))
        if self._described is None and any(
            invoke.plan for invoke in invokes
        ):  # the model is not known before it has started
            return Stream(self, lambda: make_requests(self, invokes, prompts, together, record))
        requests = make_requests(self, invokes, prompts, together, record)
        return Stream(self, lambda: requests)

    def expect(self, requests: Requests, together: bool = False) -> list[Mailbox | None]:
        """A mailbox for what comes of each trace, and then for the captured rows of each request, or None if nothing will.

        `together`: rows that nobody waits for before all requests have ended have one mailbox, which is there for each of them.
        """
        receiver = self._receiver
        if receiver is None:
            raise EngineClosedError("This engine is closed; make a new VLLM(...).")
        traces = [
            receiver.expect((trace.trace, trace.index), self._senders) if trace is not None else None
            for trace in requests.traces
        ]
        late = [rows.key for rows in requests.capturing if rows is not None and not rows.has_sinks] if together else []
        shared = receiver.expect_all(late, self._senders) if late else None

        def box_for(rows: Capturing) -> Mailbox:
            if shared is not None and not rows.has_sinks:
                return shared
            return receiver.expect(rows.key, self._senders, paced=rows.has_sinks)

        return traces + [box_for(rows) if rows is not None else None for rows in requests.capturing]

    def _outputs(self, invokes: list[Invoke]) -> Any:
        started = self._start(invokes, False)
        if self._deferred:
            return started
        done = started.wait()
        raise_failures(done)
        return [ran.output for ran in done]

    # What plans refer to.

    def _record(self, prompt: Prompt, plan: Plan, name: str) -> Any:
        run_id = uuid.uuid4().hex
        invoke = Invoke(prompt, None, {"max_tokens": 1, "temperature": 0.0}, plan)
        started = self._submit([invoke], False, (run_id, name))
        if self._deferred:
            return self._recorded_later(started, name, run_id)
        raise_failures(started.wait())
        return self.runs.add(recorded_run(started.requests.planned[0], name, run_id))

    async def _recorded_later(self, stream: Stream, name: str, run_id: str) -> RecordedRun:
        await stream
        assert stream.requests is not None
        return await self.runs.add(recorded_run(stream.requests.planned[0], name, run_id))

    def _ask_runs(self, what: str, *args: Any) -> Any:
        return launch.ask(self.engine, f"midstream_{what}_runs", *args)

    def release_runs(self, ids: list[str]) -> None:
        """Take back the leases of requests that have ended."""
        with contextlib.suppress(Exception):  # a dead engine holds nothing
            self.runs.lease(ids, -1)

    async def release_runs_later(self, ids: list[str], lease: Awaitable[Any]) -> None:
        """The same on an async engine, once `lease` is through: who waited for it may have been cancelled."""
        with contextlib.suppress(Exception):  # what was not leased has nothing to release
            await lease
            await self.runs.lease(ids, -1)

    def _send_vectors_now(self) -> None:
        changes = self.vectors.take_changes()
        try:
            for name, args in _vector_calls(changes):
                launch.ask(self.engine, name, *args)
        except BaseException:
            self.vectors.put_back(changes)
            raise

    async def send_vectors(self) -> None:
        """With `mode="async"`: have the workers know the vectors as they are now."""
        async with self._sending:
            changes = self.vectors.take_changes()
            try:
                for name, args in _vector_calls(changes):
                    await launch.ask(self.engine, name, *args)
            except BaseException:
                self.vectors.put_back(changes)
                raise


def _vector_calls(changes: Changes) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """What to call on the workers."""
    put, gone = changes
    if gone:
        yield "midstream_delete_vectors", (gone,)
    if put:
        yield "midstream_set_vectors", ({name: (vector.data.tobytes(), vector.digest) for name, vector in put.items()},)


def _that_send(names: Sequence[str | None]) -> list[str]:
    """The workers that send results: one for each pipeline stage."""
    return [name for name in names if name is not None]


def _end(engine: Any, receiver: Receiver, sinks: Sinks) -> None:
    receiver.close()
    launch.shut_down(engine)
    sinks.close()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
