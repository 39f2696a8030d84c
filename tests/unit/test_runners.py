"""The adapters to vLLM's model runners: in a plain step the runner's methods are its own, for it is not even watched. Rows C13, F5, L5."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from vllm.compilation.cuda_graph import CUDAGraphEntry, CUDAGraphOptions, CUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.forward_context import override_forward_context
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from midstream.engine import graphs as recording_module
from midstream.engine import launch
from midstream.engine import runners as runners_module
from midstream.engine.graphs import Kernel, SiteOp, StepMode
from midstream.engine.plugin import ProcessEnd
from midstream.engine.runners import V1Runner, V2Runner, Watch, keeping_from_graphs
from midstream.engine.scheduler import _Rules
from midstream.engine.seams import Role
from midstream.errors import EngineClosedError, TraceError
from midstream.runtime.request import RequestEnd, StepEnds, TraceRequest
from midstream.runtime.trace_host import TracedGroup, TraceHost
from midstream.settings import NAME
from midstream.trace.batch_rows import BatchLayout


class Model:
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


FULL = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=1, dtype=torch.float32)
SLIDING = SlidingWindowSpec(block_size=16, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=8)


class Dispatcher:
    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        return CUDAGraphMode.PIECEWISE, "dispatched"


class ModelRunner:
    """What the adapter touches of vLLM's V1 runner."""

    def __init__(self, model: Any) -> None:
        self.model, self.cudagraph_dispatcher = model, Dispatcher()
        self.sampler = SimpleNamespace(gather_specific_token_logprobs=None)
        self.input_batch = SimpleNamespace(req_ids=["a"], num_computed_tokens_cpu=torch.zeros(1).numpy())

    def get_model(self) -> Any:
        return self.model

    def _determine_batch_execution_and_padding(self, **kwargs: Any) -> tuple[str, Any]:
        return "mode", SimpleNamespace(num_tokens=4)

    def _sample(self) -> Any:
        return SimpleNamespace(sampled_token_ids=torch.zeros(1, 1))


class Host:
    step_is_traced = True

    def __init__(self, known: tuple[list[str], int] | None = None) -> None:
        self.seen: list[str] = []
        self.known = known

    def is_prepared(self, request_ids: list[str], total: int) -> bool:
        return (request_ids, total) == self.known

    def begin_step(self, view: BatchLayout) -> None:
        self.seen.append("step")

    def see_logits(self, logits: torch.Tensor) -> torch.Tensor:
        self.seen.append("logits")
        return logits

    def see_samples(self, samples: torch.Tensor) -> torch.Tensor:
        self.seen.append("samples")
        return samples


def run_step(runner: ModelRunner) -> None:
    runner._determine_batch_execution_and_padding(num_scheduled_tokens_np=torch.ones(1).numpy())
    runner.cudagraph_dispatcher.dispatch()
    runner.model.compute_logits(torch.zeros(1))
    runner._sample()


def test_the_host_sees_steps_while_it_watches_and_nothing_of_it_stays() -> None:
    vllms, host = ModelRunner(Model()), Host()
    objects = (vllms, vllms.model, vllms.cudagraph_dispatcher)
    before = [dict(vars(each)) for each in objects]
    runner = V1Runner(vllms)
    runner.connect(host)
    for what in (Watch.NOTHING, Watch.ALL, Watch.ROWS, Watch.ALL, Watch.NOTHING, Watch.ROWS, Watch.NOTHING):
        runner.watch(what)
        run_step(vllms)
        assert host.seen == ["step", "logits", "samples"][: [0, 1, 3][what]]
        host.seen.clear()
        assert ([vars(each) for each in objects] == before) == (what is Watch.NOTHING)


class GraphManager:
    """What the adapter touches of the V2 runner's manager of graphs."""

    def __init__(self) -> None:
        self.graphs: dict[str, str] = {}
        self._capture_descs = {CUDAGraphMode.PIECEWISE: ["small"], CUDAGraphMode.FULL: ["large", "small"]}
        self.given: list[Any] = []

    def capture(self, *args: Any, **kwargs: Any) -> None:
        self.given.append((args, kwargs, shows_progress()))
        for descriptor in self._capture_descs.get(CUDAGraphMode.FULL, []):
            self.graphs[descriptor] = "with the kernel" if SiteOp.edit is not None else "vLLM's"


def shows_progress() -> bool:
    return bool(CUDAGRAPH_UTILS.is_global_first_rank())


CUDAGRAPH_UTILS = SimpleNamespace(is_global_first_rank=lambda: True)  # the CPU's build cannot import the module


class V2ModelRunner:
    """What the adapter touches of vLLM's V2 runner."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cudagraph_manager = GraphManager()

    def get_model(self) -> Any:
        return self.model

    def capture_model(self) -> int:
        self.cudagraph_manager.capture(self.model, lora=None)
        return 30 << 20

    def prepare_inputs(self) -> Any:
        ones = torch.ones(1).numpy()
        return SimpleNamespace(
            req_ids=["a"],
            num_reqs=1,
            num_scheduled_tokens=ones,
            num_computed_tokens_np=ones,
            num_tokens_after_padding=4,
        )

    def sample(self) -> Any:
        return SimpleNamespace(sampled_token_ids=torch.zeros(1, 1)), None, None


def v2_runner(monkeypatch: pytest.MonkeyPatch, vllms: V2ModelRunner) -> V2Runner:
    monkeypatch.setattr(
        runners_module, "apply_replacements", lambda role: None
    )  # the CPU's build cannot import the V2 runner
    monkeypatch.setattr(runners_module.importlib, "import_module", lambda name: CUDAGRAPH_UTILS)
    monkeypatch.setattr(runners_module, "remembering_streams", nullcontext)
    monkeypatch.setattr(recording_module, "alone_on_this_thread", nullcontext)
    return V2Runner(vllms)


def test_the_v2_runner_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[Role] = []
    monkeypatch.setattr(
        runners_module, "apply_replacements", applied.append
    )  # the CPU's build cannot import the V2 runner
    vllms, host = V2ModelRunner(Model()), Host()
    before = dict(vars(vllms))
    runner = V2Runner(vllms)
    runner.connect(host)
    for what in (Watch.ALL, Watch.ROWS, Watch.NOTHING):
        runner.watch(what)
        vllms.prepare_inputs()
        vllms.model.compute_logits(torch.zeros(1))
        vllms.sample()
        assert host.seen == ["step", "logits", "samples"][: [0, 1, 3][what]]
        host.seen.clear()
    assert vars(vllms) == before and not vars(vllms.model) and applied == [Role.V2_WORKER]


def held(runner: Any, at_start: Any = frozenset()) -> None:
    """Have the adapter hold graphs, and vLLM record its own."""
    runner.hold_graphs(1 << 30, lambda acting: Kernel(lambda *call: None), lambda point: True, at_start=at_start)
    runner.runner.capture_model()


def test_the_v2_runner_records_one_graph_as_vllm_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same arguments, no other graph, and no progress bar. A graph of vLLM's counts for what one took on average."""
    vllms = V2ModelRunner(Model())
    runner, manager = v2_runner(monkeypatch, vllms), vllms.cudagraph_manager
    held(runner)
    own, descriptors = manager.graphs, manager._capture_descs
    assert own == {"large": "vLLM's", "small": "vLLM's"} and runner.gauges()["graphs"] == 0
    acts = frozenset(["mlp_out"])
    for count in range(4):
        runner.prepare(Watch.ROWS, acts)
        assert StepMode.may_replay is not None
        assert StepMode.may_replay("a speculator's", "FULL", "small")  # it has no sites
        assert StepMode.may_replay(manager, "FULL", "small") == (count >= 2)
        runner.end_step()
    assert manager.graphs == {"small": "with the kernel"} and manager._capture_descs is descriptors
    assert manager.given == [((vllms.model,), {"lora": None}, True), ((vllms.model,), {"lora": None}, False)]
    assert runner.gauges() == {"graphs": 1, "graph_bytes": 10 << 20, "graph_recordings": 1, "recording_failures": 0}
    runner.prepare(Watch.NOTHING)
    assert manager.graphs is own and StepMode.may_replay is None and shows_progress()


def test_where_none_is_recorded_later_the_v2_runner_records_twice_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vllms = V2ModelRunner(Model())
    runner, manager = v2_runner(monkeypatch, vllms), vllms.cudagraph_manager
    held(runner, at_start=frozenset(["mlp_out", "resid_post"]))
    assert manager.graphs == {"large": "vLLM's", "small": "vLLM's"} and len(manager.given) == 2
    runner.prepare(Watch.ROWS, frozenset(["mlp_out"]))
    assert StepMode.may_replay is not None and StepMode.may_replay(manager, "FULL", "small")
    assert manager.graphs == {"large": "with the kernel", "small": "with the kernel"} and len(manager.given) == 2
    assert runner.gauges() == {"graphs": 2, "graph_bytes": 10 << 20, "graph_recordings": 0, "recording_failures": 0}
    runner.prepare(Watch.NOTHING)


class RecordingDispatcher(Dispatcher):
    descriptor = "small"

    def dispatch(self, *args: Any, invalid_modes: Any = (), **kwargs: Any) -> Any:
        full = CUDAGraphMode.FULL not in invalid_modes
        return (CUDAGraphMode.FULL if full else CUDAGraphMode.PIECEWISE), self.descriptor

    def get_capture_descs(self) -> Any:
        return [(CUDAGraphMode.FULL, ["large", "small"])]


class RecordingRunner(ModelRunner):
    """A V1 runner that records graphs, in vLLM's own wrapper."""

    def __init__(self) -> None:
        super().__init__(wrapper := CUDAGraphWrapper.__new__(CUDAGraphWrapper))
        wrapper.runnable, wrapper.runtime_mode, wrapper.is_debugging_mode = Model(), CUDAGraphMode.FULL, False
        wrapper.cudagraph_options, wrapper.concrete_cudagraph_entries = CUDAGraphOptions(debug_log_enable=False), {}
        self.replayed: list[tuple[str, bool]] = []  # the batch, and whether the graph has the kernel
        self.cudagraph_dispatcher = RecordingDispatcher()
        self.device, self.seen = "device", list[Any]()
        table = SimpleNamespace(get_device_tensor=lambda rows: self.block_ids[:rows])
        self.block_ids = torch.ones(4, 2)
        self.input_batch = SimpleNamespace(
            req_ids=["a"],
            num_computed_tokens_cpu=torch.ones(1).numpy(),
            num_computed_tokens_cpu_tensor=torch.ones(4),
            num_prompt_tokens_cpu_tensor=torch.ones(4),
            block_table=Tables(table),
            other=5,
        )

    def get_model(self) -> Any:
        return self.model.runnable

    def capture_model(self) -> int:
        for descriptor in ("large", "small"):
            self._add_graph(descriptor)
        return 8 << 20

    def _add_graph(self, descriptor: Any) -> None:
        replayed = descriptor, SiteOp.edit is not None
        graph: Any = SimpleNamespace(replay=lambda: self.replayed.append(replayed))
        self.model.concrete_cudagraph_entries[descriptor] = CUDAGraphEntry(descriptor, graph)

    def execute_model(self) -> CUDAGraphMode:
        """Choose a graph, and call the model as a step does."""
        mode, descriptor = self.cudagraph_dispatcher.dispatch()
        context: Any = SimpleNamespace(batch_descriptor=descriptor, cudagraph_runtime_mode=mode)
        if mode == CUDAGraphMode.FULL:
            with override_forward_context(context):
                self.model()
        return mode

    def _capture_cudagraphs(self, *args: Any) -> None:
        self.seen.append(args)

    def _warmup_and_capture(self, descriptor: Any, mode: Any) -> None:
        from vllm.compilation import monitor

        batch = self.input_batch
        assert monitor.cudagraph_capturing_enabled and self.watched is False
        assert batch.req_ids == [] and batch.other == 5
        assert not batch.num_computed_tokens_cpu_tensor.any() and not batch.num_prompt_tokens_cpu_tensor.any()
        batch.block_table.commit_block_table(3)
        assert batch.block_table[0] is self.input_batch.block_table[0] and batch.block_table.groups == 1
        assert self.block_ids.tolist() == [[0, 0]] * 3 + [[1, 1]]
        self.seen.append((descriptor, mode))
        self._add_graph(descriptor)

    @property
    def watched(self) -> bool:
        return "_sample" in vars(self)


class Tables:
    """What the adapter touches of a block table."""

    groups = 1

    def __init__(self, table: Any) -> None:
        self.block_tables = [table]

    def commit_block_table(self, rows: int) -> None:
        raise AssertionError("the requests' own blocks")

    def __getitem__(self, group: int) -> Any:
        return self.block_tables[group]


def recording_v1_runner(monkeypatch: pytest.MonkeyPatch) -> tuple[V1Runner, RecordingRunner]:
    """After the engine's start: vLLM forbids to record."""
    from vllm.compilation import monitor

    monkeypatch.setattr(monitor, "cudagraph_capturing_enabled", False)
    monkeypatch.setattr(runners_module, "graph_capture", lambda device: nullcontext())
    monkeypatch.setattr(runners_module, "remembering_streams", nullcontext)
    monkeypatch.setattr(recording_module, "alone_on_this_thread", nullcontext)
    vllms = RecordingRunner()
    runner = V1Runner(vllms)
    runner.connect(Host())
    held(runner)
    return runner, vllms


def test_the_v1_runner_records_one_graph_without_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM builds for it depends on no request that is alive, and the adapter is not called. Until then the step has the pieces."""
    from vllm.compilation import monitor

    runner, vllms = recording_v1_runner(monkeypatch)
    batch = vllms.input_batch
    dispatch = vllms.cudagraph_dispatcher.dispatch
    for acting in (frozenset(["mlp_out"]), frozenset[str]()):
        for count in range(3):
            runner.prepare(Watch.ALL, acting)
            full = count == 2 or not acting
            assert vllms.execute_model() == (CUDAGraphMode.FULL if full else CUDAGraphMode.PIECEWISE)
            runner.end_step()
    assert vllms.replayed == [("small", True)] + [("small", False)] * 3
    monkeypatch.setattr(StepMode, "no_full_graph", True)
    assert vllms.cudagraph_dispatcher.dispatch()[0] == CUDAGraphMode.PIECEWISE
    assert vllms.seen == [("small", CUDAGraphMode.FULL)] and vllms.input_batch is batch
    assert not monitor.cudagraph_capturing_enabled and vllms.watched
    assert runner.gauges() == {"graphs": 1, "graph_bytes": 4 << 20, "graph_recordings": 1, "recording_failures": 0}
    runner.prepare(Watch.NOTHING)
    assert vllms.cudagraph_dispatcher.dispatch == dispatch


@pytest.mark.parametrize("comes_next", ["plain steps beside a plan", "rest"])
def test_the_v1_runner_has_vllms_graphs_in_plain_steps_after_any_others(
    monkeypatch: pytest.MonkeyPatch, comes_next: str
) -> None:
    """On a GPU plain steps failed with "CUDA graph capturing detected at an inappropriate time", out of vLLM's wrapper.

    A set whose first graph was recorded behind a step with another set's graphs had put those in the place of vLLM's.
    """
    runner, vllms = recording_v1_runner(monkeypatch)
    a, b = frozenset(["mlp_out"]), frozenset(["mlp_out", "resid_post"])

    def step(acting: frozenset[str], descriptor: str) -> None:
        vllms.cudagraph_dispatcher.descriptor = descriptor
        runner.prepare(Watch.ALL, acting)
        vllms.execute_model()
        runner.end_step()

    for acting, descriptor in ((a, "small"), (a, "small"), (b, "large"), (b, "large"), (a, "small"), (b, "large")):
        step(acting, descriptor)
    assert vllms.replayed == [("small", True), ("large", True)]
    if comes_next == "plain steps beside a plan":
        step(frozenset(), "small")
        step(frozenset(), "large")
    else:
        runner.prepare(Watch.NOTHING)
        for descriptor in ("small", "large"):
            vllms.cudagraph_dispatcher.descriptor = descriptor
            vllms.execute_model()
    assert vllms.replayed[2:] == [("small", False), ("large", False)]


def test_where_none_is_recorded_later_the_v1_runner_records_twice_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runners_module, "remembering_streams", nullcontext)
    monkeypatch.setattr(recording_module, "alone_on_this_thread", nullcontext)
    vllms = RecordingRunner()
    runner = V1Runner(vllms)
    held(runner, at_start=frozenset(["mlp_out"]))
    vllms._capture_cudagraphs("descriptors", "mode")
    assert vllms.seen == [("descriptors", "mode")] * 2


@pytest.mark.parametrize(
    ("specs", "recurrent"),
    [([FULL], False), ([FULL, SLIDING], False), ([FULL, object()], True),
     ([SimpleNamespace(kv_cache_specs={"a": FULL, "b": SLIDING})], False),
     ([SimpleNamespace(kv_cache_specs={"a": FULL, "b": object()})], True)],
)  # fmt: skip
def test_models_with_recurrent_layers_are_known(specs: list[Any], recurrent: bool) -> None:
    vllms = ModelRunner(Model())
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    vllms.kv_cache_config = SimpleNamespace(kv_cache_groups=groups)  # type: ignore[attr-defined]
    assert V1Runner(vllms).has_recurrent_layers() is recurrent


@pytest.mark.parametrize("since_0_28", [False, True])
def test_the_v2_runner_chooses_graphs_by_the_steps_mode(monkeypatch: pytest.MonkeyPatch, since_0_28: bool) -> None:
    """0.28 and later have full graphs for short queries of different lengths, which they choose by `max_query_len`."""

    def vllms(manager: Any, requests: int, tokens: int, uniform: int | None, **kwargs: Any) -> tuple[Any, None]:
        decodes = uniform is not None or kwargs.get("max_query_len") is not None
        mode = "NONE" if kwargs["need_eager"] else "FULL" if decodes or manager == "only full" else "PIECEWISE"
        return SimpleNamespace(cg_mode=SimpleNamespace(name=mode)), None

    dispatch = keeping_from_graphs(vllms)

    def chosen(manager: str, need_eager: bool = False) -> str:
        query = {"max_query_len": 1} if since_0_28 else {}
        return dispatch(manager, 2, 2, 1, need_eager=need_eager, **query)[0].cg_mode.name  # type: ignore[no-any-return]

    assert (chosen("both"), chosen("both", need_eager=True)) == ("FULL", "NONE")
    monkeypatch.setattr(StepMode, "no_full_graph", True)
    assert (chosen("both"), chosen("only full")) == ("PIECEWISE", "NONE")
    monkeypatch.setattr(StepMode, "no_graphs", True)
    assert chosen("both") == "NONE"


@pytest.mark.parametrize(("known", "seen"), [((["a"], 4), []), ((["b"], 4), ["step"]), ((["a"], 8), ["step"])])
def test_a_batch_that_stands_as_it_is_is_not_begun(known: tuple[list[str], int], seen: list[str]) -> None:
    """E11: the host is asked with the rows' order and number; one request more or a larger graph is another batch."""
    vllms, host = ModelRunner(Model()), Host(known)
    runner = V1Runner(vllms)
    runner.connect(host)
    runner.prepare(Watch.ROWS)
    run_step(vllms)
    assert host.seen == seen


def test_a_method_of_the_objects_own_comes_back() -> None:
    """Other software replaces methods of objects, too."""
    model = Model()
    own = model.compute_logits = lambda hidden: hidden + 1  # type: ignore[method-assign]
    runner = V1Runner(ModelRunner(model))
    runner.connect(Host())
    runner.watch(Watch.ALL)
    assert model.compute_logits is not own and model.compute_logits(torch.zeros(1)).item() == 1
    runner.watch(Watch.NOTHING)
    assert model.compute_logits is own


@pytest.mark.parametrize(
    "shape", [(2, 6, 4), (6, 4), (12, 4)], ids=["pairs first", "blocks first", "two of the kernel's each"]
)
def test_layers_that_vllm_leaves_out_are_cleared_as_well(shape: tuple[int, ...]) -> None:
    """Sliding windows: vLLM clears blocks of full attention. Whatever lies in front of the blocks, and however the kernel cuts them."""
    caches = {name: SimpleNamespace(kv_cache=torch.ones(shape)) for name in ("full", "window")}
    vllms = ModelRunner(Model())
    cleared: list[list[int]] = []
    vllms.device, vllms._zero_block_ids = torch.device("cpu"), cleared.append  # type: ignore[attr-defined]
    groups = [
        SimpleNamespace(kv_cache_spec=spec, layer_names=[name]) for name, spec in (("full", FULL), ("window", SLIDING))
    ]
    vllms.kv_cache_config = SimpleNamespace(num_blocks=6, kv_cache_groups=groups)  # type: ignore[attr-defined]
    vllms.compilation_config = SimpleNamespace(static_forward_context=caches)  # type: ignore[attr-defined]
    V1Runner(vllms).prepare_clearing()
    vllms._zero_block_ids([1, 4])  # type: ignore[attr-defined]
    assert cleared == [[1, 4]] and caches["full"].kv_cache.all()
    blocks = caches["window"].kv_cache.reshape(*((2,) if shape[0] == 2 else ()), 6, -1)
    assert [bool(blocks[..., i, :].any()) for i in range(6)] == [i not in (1, 4) for i in range(6)]


def bare_worker(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[bool]]:
    """A worker without a model, and which of the platform's steps had graphs with the plans' kernel."""
    from midstream.engine import worker as module

    seen: list[bool] = []
    worker: Any = module.Worker.__new__(module.Worker)
    monkeypatch.setattr(runners_module, "remembering_streams", nullcontext)
    monkeypatch.setattr(recording_module, "alone_on_this_thread", nullcontext)
    worker._runner = runner = V1Runner(RecordingRunner())
    target, graphs = "vllm.v1.worker.gpu.cudagraph_utils.CudaGraphManager.graphs", GraphManager()
    first = graphs.graphs
    monkeypatch.setattr(runner, "_full_graphs", lambda: (target, graphs))
    held(runner, at_start=frozenset(["resid_post"]))
    assert runner.graphs is not None
    with runner.graphs.recording(frozenset(["resid_post"])):
        graphs.capture()
    for name in ("execute_model", "execute_dummy_batch"):
        monkeypatch.setattr(
            module.PlatformWorker, name, lambda self, *step: seen.append(replays_the_kernel()), raising=False
        )

    def replays_the_kernel() -> bool:
        """vLLM chooses a full graph. Returns whether that has the kernel."""
        runner._may_replay(CUDAGraphMode.FULL, "small")
        return graphs.graphs is not first

    worker.midstream = SimpleNamespace(is_idle=True, step_is_traced=False, may_have_written=False)
    worker.plans = SimpleNamespace(
        is_idle=True,
        tables=SimpleNamespace(edit=None),
        edits=False,
        step_is_planned=False,
        acting=frozenset(),
        has_strangers=False,
        repeat=lambda step: not worker.plans.is_idle,
        end_step=lambda: None,
        take_scores=lambda: None,
    )
    worker._schedule = lambda step: False
    return worker, seen


def test_an_ending_that_a_body_has_swallowed_is_raised_before_the_worker_rests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last step of a trace may have no tokens, and so nothing to sample. Seen failing without it."""
    worker, seen = bare_worker(monkeypatch)
    worker._is_awake = True
    monkeypatch.setattr(ProcessEnd, "requested", True)
    with pytest.raises(SystemExit):
        worker.execute_model(SimpleNamespace(scheduled_new_reqs=[]))
    assert not seen


def test_an_output_on_its_way_carries_the_requests_that_end_with_it() -> None:
    """It comes with the output, of which vLLM 0.33 asks more than 0.32 did. A subclass would lack that, and could not be made."""
    from vllm.v1.outputs import AsyncModelRunnerOutput

    from midstream.engine.worker import _ReportingOutput

    ends = StepEnds(["stopped"])
    output: Any = SimpleNamespace(get_output=SimpleNamespace, get_kv_connector_output=lambda: "kv")
    judged = _ReportingOutput(output, lambda: ends)
    assert isinstance(judged, AsyncModelRunnerOutput)
    assert judged.get_output().midstream is ends and judged.get_kv_connector_output() == "kv"


def test_a_request_that_its_traces_code_is_not_for_is_refused() -> None:
    """F3: it ends by itself; an IndexError would end the engine. The trace is over with its last request."""
    host: Any = TraceHost.__new__(TraceHost)
    host._allow_traces, host._groups = True, {"trace": TracedGroup([[]])}
    for index in (0, 1, -1):
        with pytest.raises(TraceError, match=f"Request {index} of a trace came with code for 1"):
            host._programs("name", TraceRequest("trace", index, 3, 1, False, None))
    assert not host._groups


@pytest.mark.parametrize(("is_traced", "off_graph"), [(False, False), (True, False), (False, True)])
def test_only_a_step_of_plans_in_the_graphs_may_be_repeated_unseen(
    monkeypatch: pytest.MonkeyPatch, is_traced: bool, off_graph: bool
) -> None:
    """F1: a trace is told of each of its steps. Seen failing without either."""
    worker, _ = bare_worker(monkeypatch)
    del worker._schedule
    remembered: list[bool] = []
    worker.midstream = SimpleNamespace(step_is_traced=is_traced, schedule=lambda *step: None)
    worker.plans.schedule = lambda *step: off_graph
    worker.plans.remember_step = lambda step, may_repeat: remembered.append(may_repeat)
    cached = SimpleNamespace(req_ids=["a"], num_computed_tokens=[4])
    step = SimpleNamespace(
        scheduled_new_reqs=[], scheduled_cached_reqs=cached, num_scheduled_tokens={"a": 1}, finished_req_ids=set()
    )
    assert worker._schedule(step) == off_graph and remembered == [not (is_traced or off_graph)]


@pytest.mark.parametrize("may_have_written", [False, True])
def test_a_trace_that_is_over_and_has_only_read_leaves_later_steps_to_vllm(
    monkeypatch: pytest.MonkeyPatch, may_have_written: bool
) -> None:
    """I1: a small model's step would take a tenth longer. Rows are watched while a request lives that a trace may have changed.

    Seen failing while every trace that is over was watched, and while none was.
    """
    worker, _ = bare_worker(monkeypatch)
    worker._is_awake, worker.plans.is_idle = True, False
    worker.midstream.is_idle, worker.midstream.may_have_written = False, may_have_written
    rows: list[Any] = []
    worker._check_of = rows.append
    worker.execute_model(SimpleNamespace(scheduled_new_reqs=[]))
    assert worker._runner.watched is (Watch.ROWS if may_have_written else Watch.NOTHING)
    assert len(rows) == may_have_written


def test_graphs_with_the_kernel_are_for_steps_in_which_a_plan_acts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay until another step comes, and a replay of them without a step's tables would write where older tables say.

    Seen failing without each of the places that take them back.
    """
    worker, seen = bare_worker(monkeypatch)
    plans = worker.plans
    begins = SimpleNamespace(sampling_params=SimpleNamespace(extra_args={NAME: {}}))

    def run(is_idle: bool, step_is_planned: bool) -> bool:
        plans.is_idle, plans.step_is_planned = is_idle, step_is_planned
        plans.acting = frozenset(["resid_post"] if step_is_planned else [])
        new = [] if is_idle or worker._is_awake else [begins]
        worker.execute_model(SimpleNamespace(scheduled_new_reqs=new))
        return seen.pop()

    acts, waits, idles = (False, True), (False, False), (True, False)
    assert [run(*state) for state in (idles, acts, acts, waits, acts, idles, acts)] == [
        False, True, True, False, True, False, True,
    ]  # fmt: skip
    worker.execute_dummy_batch()
    assert seen == [False]


class Vllms:
    """What the rules touch of vLLM's scheduler."""

    def __init__(self) -> None:
        self.vllm_config = SimpleNamespace(
            additional_config={}, parallel_config=SimpleNamespace(distributed_executor_backend=None)
        )
        self.kv_cache_manager = SimpleNamespace(block_pool=SimpleNamespace())
        self.requests: dict[str, Any] = {}
        self.new: list[Any] = []
        self.freed: set[str] = set()

    def add_request(self, request: Any) -> None:
        self.requests[request.request_id] = request
        self.new.append(
            SimpleNamespace(req_id=request.request_id, sampling_params=request.sampling_params, block_ids=([],))
        )

    def schedule(self) -> Any:
        freed, self.freed, new, self.new = self.freed, set(), self.new, []
        cached = SimpleNamespace(req_ids=[], new_block_ids=[])
        return SimpleNamespace(finished_req_ids=freed, scheduled_new_reqs=new, scheduled_cached_reqs=cached)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> None: ...

    def _free_request(self, request: Any) -> None:
        del self.requests[request.request_id]
        self.freed.add(request.request_id)


class Scheduler(_Rules, Vllms):
    pass


def request(name: str, carried: Any) -> Any:
    params = SimpleNamespace(extra_args=carried and {NAME: carried})
    return SimpleNamespace(
        request_id=name, sampling_params=params, num_tokens=len(name), prompt_token_ids=list(range(len(name)))
    )


def test_the_scheduler_is_vllms_own_while_nobody_has_a_trace_or_a_plan() -> None:
    """And from the step on in which the workers are told of the last such request's end, with its length."""
    scheduler = Scheduler()
    bare = set(vars(scheduler))
    plain, planned, other = request("plain", None), request("planned", {"plan": b""}), request("other", {"plan": b""})
    scheduler.add_request(plain)
    assert vars(scheduler).keys() == bare and not hasattr(scheduler.schedule(), "midstream_finished")
    scheduler.add_request(planned)
    scheduler.add_request(other)
    assert vars(scheduler).keys() == bare | {"schedule", "update_from_output"}
    scheduler._free_request(planned)
    assert scheduler.schedule().midstream_finished == {"planned": RequestEnd(7)} and "schedule" in vars(scheduler)
    scheduler._free_request(other)
    scheduler._free_request(plain)
    assert "schedule" in vars(scheduler) and scheduler.has_ends_to_tell
    assert scheduler.schedule().midstream_finished == {"other": RequestEnd(5)}
    assert vars(scheduler).keys() == bare and not scheduler.has_ends_to_tell


def test_what_ends_a_session_leaves_the_scheduler_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM ends a session of streaming input by a request of its name, with its parameters, that is never one."""
    scheduler = Scheduler()
    bare = set(vars(scheduler))
    monkeypatch.setattr(Vllms, "add_request", lambda self, request: None)
    scheduler.add_request(request("session", {"plan": b""}))
    assert vars(scheduler).keys() == bare and not scheduler._states and not any(scheduler._counts.values())


@pytest.mark.parametrize("method", ["midstream_gauges", "midstream_drop"])
def test_a_call_to_the_workers_of_a_dead_engine_is_told_in_midstreams_words(method: str) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    def dead(*args: Any, **kwargs: Any) -> Any:
        raise EngineDeadError

    async def dead_later(*args: Any, **kwargs: Any) -> Any:
        raise EngineDeadError

    with pytest.raises(EngineClosedError, match="died"):
        launch.call_workers(SimpleNamespace(collective_rpc=dead), method)
    with pytest.raises(EngineClosedError, match="died"):
        asyncio.run(launch.call_workers(SimpleNamespace(collective_rpc=dead_later), method))
