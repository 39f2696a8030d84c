"""A running vLLM engine: its workers, the vectors, runs and weights in them, and the channel for their results.

A `vllm.LLM` has no event loop. `Stepper` runs the coroutines of its requests. It makes a step of the engine when all coroutines wait, when
the engine has sent outputs, and when the last step ended more than `_PATIENCE` seconds ago.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import secrets
import selectors
import threading
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from midstream.capture.sinks import Sinks
from midstream.engine import launch
from midstream.engine.admission import on_a_thread
from midstream.errors import EngineClosedError, MidstreamError, TraceError
from midstream.lowering.client_traces import Ending
from midstream.plan.probes import Probe, ScoreChunk
from midstream.requests.arguments import Answers
from midstream.requests.invokes import PreparedPlan, runs_of
from midstream.requests.vectors_and_runs import HeldWeights, LoadedAdapters, Runs, Vectors, finish_cleanup
from midstream.runtime.request import PlanRequest, TraceRequest
from midstream.settings import NAME, Settings
from midstream.sweeps.sweep_run import SweepTurns
from midstream.trace.weights import Weight
from midstream.transport.receiver import Mailbox, Receiver
from midstream.vllm.row_receiver import RowReceiver

_DROP_SECONDS = 10.0  # a trace that is being abandoned may block a worker
_PATIENCE = 0.05  # seconds that coroutines may work without a step. vLLM's process begins no step while requests come without a pause
_YOUNG_OBJECTS = 50_000  # about as many as 500 running requests have
_CLOSED = "This engine is closed; make a new VLLM(...)."


@dataclass(frozen=True)
class EngineRequest:
    """A request to submit.

    Attributes:
        prompt: as vLLM takes it.
        params: its SamplingParams, which carry the plan and the trace.
        trace: its trace, if the engine runs the trace's code.
        rows: receives captured rows.
        ending: makes the outcome of its trace, if the engine does not run the trace's code.
        weights: the weights that its trace and plan need in the workers, by digest.
        adapter: its LoRARequest. None for the requests of `VLLM.planned`: vLLM's server passes their adapters to the engine.
    """

    prompt: dict[str, Any]
    params: Any
    trace: TraceRequest | None
    plan: PreparedPlan | None
    rows: RowReceiver | None
    answers: Answers
    ending: Ending | None = None
    weights: Mapping[str, Weight] = field(default_factory=dict)
    adapter: Any = None


class EngineConnection:
    """The client's connection to a running engine.

    Args:
        engine: a `vllm.LLM`, or an `AsyncLLM` if `is_async`.
        sinks: take captured rows. They are closed with the engine.
        is_ours: whether `close` also ends the engine.

    Attributes:
        config: the engine's VllmConfig.
        stages: the number of pipeline stages.
        vectors, runs: the named vectors and recorded runs in the workers.
        weights: large tensors in the workers, for traces and plans.
        adapters: the adapters that requests have named.
        receiver: receives results; None after the engine was closed.
        has_died: whether the engine is known to be dead. Calls to its workers may never return.
        sweep_turns: the turns of the sweeps on the engine.
        streams: the streams that are being iterated over.
    """

    _is_servers = False  # whether its requests are those of a server's clients

    def __init__(self, engine: Any, sinks: Sinks, is_async: bool, is_ours: bool = True) -> None:
        self._engine: Any = engine
        self._is_servers = not is_ours
        self._stepper = None if is_async else Stepper(engine)
        self.config = launch.config_of(engine)
        self.stages: int = self.config.parallel_config.pipeline_parallel_size
        self.has_died = False
        self.streams: weakref.WeakSet[Any] = weakref.WeakSet()
        self.receiver: Receiver | None = Receiver(launch.address_for_workers(self.config))
        ours = engine if is_ours else None
        # Called by `close`, or when this object is collected, or at the latest when Python ends.
        self._end = weakref.finalize(self, _end, ours, self._stepper, self.receiver, sinks)
        self._description: dict[str, Any] | None = None
        self._senders: list[str] = []
        self._interrupted: list[str] = []  # ids of traces
        self.vectors = Vectors()
        self.runs = Runs(partial(self.call_workers, "midstream_runs"), None if is_async else self.finish)
        self.weights = HeldWeights(
            Settings.of(self.config).weight_bytes, partial(self.call_workers, "midstream_set_weights")
        )
        self.adapters = LoadedAdapters(self._load_adapter if is_ours else None)
        self._sending = asyncio.Lock()
        # Probes that run in every request for the engine's operator; and the function that takes their new scores, and the name of the
        # probe that has ended a sample.
        self.watched: Sequence[Probe] = ()
        self.note_scores: Callable[[Sequence[ScoreChunk], str | None], object] = lambda scores, ended_by: None
        self.sweep_turns = SweepTurns(self.config.scheduler_config.max_num_batched_tokens)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting: asyncio.Task[None] | None = None
        if self._stepper is None:
            with contextlib.suppress(RuntimeError):  # made outside of an event loop
                self._loop = asyncio.get_running_loop()
        else:
            if not launch.is_in_process(engine):
                self.receiver.when_gone = lambda _: launch.wake_waiting_callers(engine)
            self.finish(self.start())

    @property
    def engine(self) -> Any:
        """The `vllm.LLM` or `AsyncLLM`. Raises EngineClosedError if the engine is closed or dead."""
        if self._engine is None:
            raise EngineClosedError(_CLOSED)
        if self.has_died:
            raise launch.died_error(self._engine)
        return self._engine

    @property
    def is_async(self) -> bool:
        return self._stepper is None

    @property
    def is_closed(self) -> bool:
        return self._engine is None

    @property
    def is_open(self) -> bool:
        """Whether the engine is neither closed nor known to be dead."""
        return self._engine is not None and not self.has_died

    def note_failure(self, error: BaseException) -> None:
        """Note an error. An EngineClosedError means that the engine is dead; the log's path is added to it. A KeyboardInterrupt means that
        the user has interrupted the engine: `close` will kill its processes at once.
        """
        if isinstance(error, KeyboardInterrupt):
            launch.end_quickly(self._engine)
        if isinstance(error, EngineClosedError):
            self.has_died = True
            launch.keep_log(self._engine, error)

    def finish(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine and return its result; on an async engine, return it for the user to await. Raises EngineClosedError."""
        if self._stepper is None:
            return coroutine
        if self.is_closed:
            coroutine.close()
            raise EngineClosedError(_CLOSED)
        try:
            return self._stepper.finish(coroutine)
        except BaseException as error:
            self.note_failure(error)
            raise

    def generate(self, request: EngineRequest) -> AsyncGenerator[Any]:
        """vLLM's outputs of a request; on a `vllm.LLM` only the last one. Closing the generator aborts the request."""
        if self._stepper is None:
            name = secrets.token_hex(8)
            return self.engine.generate(request.prompt, request.params, name, lora_request=request.adapter)  # type: ignore[no-any-return]
        return self._stepper.generate(request.prompt, request.params, request.adapter)

    def follow(self, rows: RowReceiver, box: Mailbox, pool: Executor) -> asyncio.Future[None]:
        """Take captured rows as they arrive, until all have come."""
        if self._stepper is None:
            return asyncio.ensure_future(rows.follow(box, pool))
        following = rows.follow(box)
        return self._stepper.follow(following) if rows.has_sinks else asyncio.ensure_future(following)

    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        """Call a method of each worker. Returns the list of their results."""
        results = launch.call_workers(self.engine, method, *args)
        return await results if self.is_async else results

    async def _load_adapter(self, adapter: Any) -> None:
        answers = await self.call_workers(*launch.loading(adapter))
        launch.check_loaded(getattr(self.engine, "llm_engine", self.engine), adapter, answers)

    async def start(self) -> None:
        """Connect the workers. To be called before the first request."""
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise MidstreamError(
                "An async engine belongs to the event loop that it was first used in; use it in one asyncio.run() only."
            )
        self._loop = loop
        if self._starting is None:
            self._starting = loop.create_task(self._connect())
        await asyncio.shield(self._starting)

    async def _connect(self) -> None:
        assert self.receiver is not None
        names = await self.call_workers("midstream_connect", self.receiver.address)
        self._senders = [name for name in names if name is not None]  # one worker of each stage sends results
        self._description, *_ = await self.call_workers("midstream_describe")

    def close(self) -> None:
        """End the engine and its processes. Closing again does nothing."""
        for stream in list(self.streams):
            stream.fail(EngineClosedError("The engine was closed while the trace ran."))
        self._engine = self.receiver = None
        self._end()

    @property
    def is_described(self) -> bool:
        """Whether the workers have described the model: always on a sync engine, after `start` on an async one."""
        return self._description is not None

    @property
    def description(self) -> dict[str, Any]:
        """The model's module tree, shapes and sites, from the workers."""
        if self._description is None:
            raise TraceError("With mode='async' call `await model.start()` first.")
        return self._description

    async def gauges(self) -> list[dict[str, int]]:
        """The gauges of each worker."""
        await self._drop_interrupted()
        return await self.call_workers("midstream_gauges")

    async def drop(self, requests: Sequence[EngineRequest]) -> None:
        """Have the workers forget the traces of requests that did not end normally.

        On a `vllm.LLM` the workers are told by the next call: the user has interrupted this one, and a trace may still block a worker.
        """
        traces = sorted({request.trace.trace for request in requests if request.trace is not None})
        if not traces or not self.is_open:
            return
        if self._stepper is not None:
            self._interrupted += traces
            return
        with contextlib.suppress(Exception):  # a dead engine has dropped them
            await asyncio.wait_for(self.call_workers("midstream_drop", traces), _DROP_SECONDS)

    async def _drop_interrupted(self) -> None:
        if self._interrupted:
            traces, self._interrupted = self._interrupted, []
            await self.call_workers("midstream_drop", traces)

    @contextlib.asynccontextmanager
    async def ready(
        self, requests: Sequence[EngineRequest]
    ) -> AsyncIterator[list[tuple[Mailbox | None, Mailbox | None]]]:
        """A block in which `requests` may run: the workers have the vectors, weights and adapters that the requests need, and keep the
        recorded runs that their plans read.

        Yields for each request a mailbox for its trace's results and one for its captured rows. Each is None if no message will come. At
        the end of the block, rows that were not read are dropped.

        Raises PlanError if the workers lack a run, ParameterError if an adapter cannot be loaded.
        """
        if self._is_servers:
            await self._as_strangers([request for request in requests if request.plan is not None])
        async with AsyncExitStack() as stack:
            await self._drop_interrupted()
            await self.adapters.load([request.adapter for request in requests])
            await self.send_vectors()
            if runs := runs_of([request.plan for request in requests]):
                lease = asyncio.ensure_future(self.runs.lease(runs))
                stack.push_async_callback(lambda: finish_cleanup(_release(self.runs, runs, lease)))
                await asyncio.shield(lease)
            weights = {digest: weight for request in requests for digest, weight in request.weights.items()}
            await stack.enter_async_context(self.weights.used(weights))
            yield [self._mailboxes(request, stack) for request in requests]

    async def _as_strangers(self, requests: Sequence[EngineRequest]) -> None:
        """Mark requests as those of a server's clients, and make the `ScheduledPlan` of each plan on a thread.

        Otherwise admission would make it on the event loop, which serves all clients.
        """
        payloads = dict[tuple[bytes, int], PlanRequest]()
        for request in requests:
            request.params.extra_args[NAME]["shares"] = True
            payload, prepared = PlanRequest.of(request.params), request.plan
            assert payload is not None and prepared is not None
            payloads[payload.wire, len(prepared.prompt)] = payload

        def make() -> None:
            for (_, length), payload in payloads.items():
                payload.for_scheduler(length, payload.num_layers, self.config.device_config.device_type)

        if payloads:
            await on_a_thread(sum(len(wire) for wire, _ in payloads), make)

    def _mailboxes(self, request: EngineRequest, stack: AsyncExitStack) -> tuple[Mailbox | None, Mailbox | None]:
        if (receiver := self.receiver) is None:
            raise EngineClosedError(_CLOSED)

        def opened(key: tuple[str, int], paced: bool = False) -> Mailbox:
            box = receiver.expect(key, senders=self._senders, paced=paced)
            stack.callback(box.close)
            return box

        trace, rows = request.trace, request.rows
        if rows is not None:
            stack.callback(rows.discard)
        return (
            opened((trace.trace, trace.index)) if trace is not None else None,
            opened(rows.key, rows.has_sinks) if rows is not None else None,
        )

    async def send_vectors(self) -> None:
        """Send changed vectors to the workers."""
        async with self._sending:
            put, gone = changes = self.vectors.take_changes()
            try:
                if gone:
                    await self.call_workers("midstream_vectors", "delete", gone)
                if put:
                    data = {name: (vector.data.tobytes(), vector.digest) for name, vector in put.items()}
                    await self.call_workers("midstream_vectors", "set", data)
            except BaseException:
                self.vectors.put_back(changes)
                raise


def _end(engine: Any, stepper: Stepper | None, receiver: Receiver, sinks: Sinks) -> None:
    receiver.close()
    if engine is not None:
        launch.shut_down(engine)
    if stepper is not None:
        stepper.close()
    sinks.close()


async def _release(runs: Runs, ids: list[str], lease: Awaitable[Any]) -> None:
    """Release leases after `lease` has ended. The task that waited for `lease` may have been cancelled."""
    with contextlib.suppress(Exception):  # a lease that failed has nothing to release, and a dead engine holds none
        await lease
        await runs.release(ids)


@dataclass(eq=False)
class _Submission:
    """A submitted request. `output` gets its last output."""

    prompt: dict[str, Any]
    params: Any
    adapter: Any
    output: asyncio.Future[Any]
    name: str = ""  # vLLM's id, after it was submitted


class Stepper:
    """Runs coroutines on the thread of a caller that has no event loop, and the requests of these coroutines on a `vllm.LLM`."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._lock = threading.RLock()
        self._loop = asyncio.SelectorEventLoop(_Selector(self._step))
        self._rows = asyncio.new_event_loop()  # on a thread of its own
        self._thread = threading.Thread(target=self._rows.run_forever, name="midstream-rows", daemon=True)
        self._thread.start()
        self._new: list[_Submission] = []
        self._running: dict[str, _Submission] = {}  # by name
        self._is_interrupted = False
        self._stepped = 0.0  # when the last step ended, or when the first of the running requests was submitted

    def finish(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """The coroutine's result. Calls from several threads run one after the other."""
        with self._lock, _no_running_loop(), _few_collections():
            task = self._loop.create_task(coroutine)
            try:
                return self._loop.run_until_complete(task)
            except BaseException:
                if not task.done():  # the user has interrupted it, perhaps because a trace does not end
                    task.cancel()
                    self._is_interrupted = True
                    with contextlib.suppress(asyncio.CancelledError):
                        self._loop.run_until_complete(task)
                raise
            finally:
                self._is_interrupted = False

    def follow(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        """Run a coroutine on another thread, so that it continues during steps. The engine may wait for it in a step."""
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._rows), loop=self._loop)

    async def generate(self, prompt: dict[str, Any], params: Any, adapter: Any = None) -> AsyncGenerator[Any]:
        """The last output of a request. Closing the generator aborts it. `adapter`: its LoRARequest."""
        request = _Submission(prompt, params, adapter, self._loop.create_future())
        if not self._new:  # requests that are made together are submitted together
            self._loop.call_soon(self._submit)
        self._new.append(request)
        try:
            yield await request.output
        finally:
            if self._running.pop(request.name, None) is not None:
                launch.abort(self._llm, [request.name])

    def _submit(self) -> None:
        requests, self._new = [each for each in self._new if not each.output.done()], []
        try:
            parts = zip(*((each.prompt, each.params, each.adapter) for each in requests), strict=True)
            names = launch.submit(self._llm, *map(list, parts)) if requests else []
        except Exception as error:
            _fail(requests, error)
        else:
            if not self._running:
                self._stepped = time.monotonic()
            for name, request in zip(names, requests, strict=True):
                request.name = name
                self._running[name] = request

    def _step(self, waits: bool) -> bool:
        """Make a step if it is time for one. Returns whether it did. `waits`: whether all coroutines wait."""
        if not self._running or self._is_interrupted:
            return False
        is_late = time.monotonic() - self._stepped > _PATIENCE
        if not (waits or is_late or launch.has_outputs(self._llm)):
            return False
        try:
            outputs = launch.step(self._llm)
        except Exception as error:
            requests, self._running = list(self._running.values()), {}
            _fail(requests, error)
        else:
            for output in outputs:
                request = self._running.pop(output.request_id, None)
                if request is not None and not request.output.done():
                    request.output.set_result(output)
        self._stepped = time.monotonic()
        return True

    def close(self) -> None:
        """End the threads."""
        self._rows.call_soon_threadsafe(self._rows.stop)
        self._thread.join()
        self._rows.close()
        self._loop.close()


class _Selector(selectors.DefaultSelector):
    """A selector that may make a step whenever the event loop asks it for events.

    Args:
        step: returns whether it made a step. Its argument is True if the loop asks the selector to wait, because all coroutines wait.
    """

    def __init__(self, step: Callable[[bool], bool]) -> None:
        super().__init__()
        self._step = step

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """As in `selectors`, with a step of the engine in place of waiting."""
        if self._step(timeout is None or timeout > 0):
            timeout = 0
        return super().select(timeout)


@contextlib.contextmanager
def _few_collections() -> Iterator[None]:
    """A block in which Python collects garbage only after `_YOUNG_OBJECTS` new objects.

    A running request has about a hundred objects. With Python's threshold of 700, they survive two collections, and then count as old.
    Each time the number of old objects has grown by a quarter, Python searches all objects of the process. The search takes half a second
    if PyTorch and vLLM are imported.
    """
    before = gc.get_threshold()
    if 0 < before[0] < _YOUNG_OBJECTS:
        gc.set_threshold(_YOUNG_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextlib.contextmanager
def _no_running_loop() -> Iterator[None]:
    """A block in which this thread has no running event loop, so that another loop can run. A notebook, for example, runs one."""
    loop = asyncio._get_running_loop()
    task = asyncio.current_task(loop) if loop is not None else None
    if loop is not None and task is not None:
        asyncio.tasks._leave_task(loop, task)
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)
        if loop is not None and task is not None:
            asyncio.tasks._enter_task(loop, task)


def _fail(requests: list[_Submission], error: Exception) -> None:
    for request in requests:
        if not request.output.done():
            request.output.set_exception(error)
