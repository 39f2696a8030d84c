"""How steps run (with CUDA graphs, compiled without them, or uncompiled), the sites inside compiled code, and CUDA graphs with the plans'
kernel.

A forward hook at each built-in site calls one opaque custom op, which Dynamo traces into the compiled graph. In a step without plans and
traces, the op returns at once, and the graphs that vLLM records do not contain it. In a step with traces that use only built-in sites, the
op hands the residual stream to the interleaver from compiled code. Such a step runs compiled, without full graphs.

vLLM records its graphs when the engine starts, without midstream's kernel. A step in which plans act needs graphs with the kernel at the
sites at which they act, and at no other site, since every launch costs time. midstream records such graphs when they are needed: one batch
size at a time, by vLLM's own code, between two steps. `ActingGraphs` keeps them, up to a number of bytes.

Until the graph for a step is recorded, the step runs without full graphs. In mixed batches, and in such steps, vLLM replays a
separate graph for each piece of the forward between two attention calls. A piece in which a plan acts, or in which a trace waits, then runs
from its compiled code, which calls the site op: see `PiecewiseGraphs`. Splitting the forward at each site as well would cost every mixed
batch a tenth of a millisecond a layer, also without plans and traces.

All ranks make the same decisions without communication: they decide by the scheduler's messages, and by numbers that the ranks agreed on at
the start. The size of a graph is such a number; the driver's report would differ between ranks.

The graphs lie in vLLM's own memory pool. They are recorded on the streams on which vLLM recorded its graphs, since PyTorch reuses memory of
a pool on the same stream only. Graphs are replayed one after another, so all of them share the memory for activations. A graph takes only
the memory that the driver keeps for it, which is free again as soon as the graph is dropped.

All graphs of a stream also share the workspace in which cuBLAS keeps intermediate results. PyTorch frees it when any of them is dropped,
though the others still write to it: see `keep_workspace`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from torch._library.opaque_object import get_opaque_type_name
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import CustomOp
from vllm.platforms import current_platform
from vllm.utils.torch_utils import LayerName

from midstream import hooks
from midstream.arch import Architecture
from midstream.engine.plugin import Replacement
from midstream.memory import without_collections
from midstream.sites import Binding, Point
from midstream.tree import follow

_log = logging.getLogger(__name__)

Fire = Callable[[int, torch.Tensor, torch.Tensor | None], None]
Acting = frozenset[Hashable]  # the sites and programs that act in a step: names of sites, and `InGraph`s
GraphKey = tuple[Acting, str, Hashable]  # the sites that act, the name of a CUDAGraphMode, and the batch's descriptor
AnyFunction = Callable[..., Any]
ENTRIES = "vllm.compilation.cuda_graph.CUDAGraphWrapper.concrete_cudagraph_entries"
NOTHING: Acting = frozenset()
_PATIENCE = 2  # a batch that comes once is not worth a recording, which takes as long as some steps
_REMEMBERED = 4096  # batches whose number of steps is remembered
_MOST_DUE = 64  # how many graphs may wait to be recorded
_STRANGERS_PAUSE = 64  # steps between two recordings for plans from HTTP
_STRANGERS_OPERATIONS = 512  # plans from HTTP get no graph if their programs have more operations in a forward
_SMALLEST = 1 << 20  # bytes; the driver keeps at least this for a graph


class StepMode:
    """The mode of the step that is being prepared, for the replaced functions of vLLM. All flags are False in steps without traces.

    Attributes:
        no_full_graph: no full CUDA graph is replayed; piecewise graphs may be.
        no_graphs: no CUDA graph is replayed.
        uncompiled: no compiled code runs.
        may_replay: whether a V2 runner's step may replay what vLLM chose, `(graph manager, kind of graph, batch descriptor) -> bool`;
            None if it may. The adapter of the runner sets it.
    """

    no_full_graph = False
    no_graphs = False
    uncompiled = False
    may_replay: Callable[[Any, str, Any], bool] | None = None

    @classmethod
    def set(cls, no_full_graph: bool = False, no_graphs: bool = False, uncompiled: bool = False) -> None:
        """Set the mode; without arguments, that of a plain step."""
        cls.no_full_graph, cls.no_graphs, cls.uncompiled = no_full_graph, no_graphs, uncompiled


def running_uncompiled(original: Callable[..., Any]) -> Callable[..., Any]:
    """A `create_forward_context` that has vLLM skip compiled code in steps that run uncompiled."""

    def create_forward_context(*args: Any, **kwargs: Any) -> Any:
        context = original(*args, **kwargs)
        if StepMode.uncompiled:
            context.skip_compiled = True
        return context

    return create_forward_context


class EagerKernels:
    """Switches a model's modules to vLLM's kernels and back. Only for CUDA and the CPU; it does nothing elsewhere.

    An engine that compiles leaves norms and activations to the compiler. Their modules have plain PyTorch code: many small kernels each,
    or one that `torch.compile` makes at its first call and again for other shapes. An uncompiled step uses vLLM's kernels instead, as an
    eager engine does.
    """

    def __init__(self, model: nn.Module, vllm_config: Any) -> None:
        self._kernels: list[Replacement] = []
        self._priority: Any = None
        kernel = "forward_cuda" if current_platform.is_cuda() else "forward_cpu" if current_platform.is_cpu() else None
        if kernel is None or vllm_config.compilation_config.mode == CompilationMode.NONE:
            return
        for module in model.modules():
            if isinstance(module, CustomOp) and module._forward_method != getattr(module, kernel):
                method = "vllm.model_executor.custom_op.CustomOp._forward_method"
                self._kernels.append(Replacement(method, module, getattr(module, kernel)))
        if hasattr(current_platform, "get_default_ir_op_priority"):
            compilation = copy.copy(vllm_config.compilation_config)
            compilation.mode = CompilationMode.NONE
            eager = copy.copy(vllm_config)
            eager.compilation_config = compilation
            self._priority = current_platform.get_default_ir_op_priority(eager)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Use the kernels in the block."""
        for kernel in self._kernels:
            kernel.switch(True)
        try:
            with self._priority.set_priority() if self._priority is not None else contextlib.nullcontext():
                yield
        finally:
            for kernel in self._kernels:
                kernel.switch(False)


class SiteOp:
    """The functions that the op calls with a point's index, the hidden states and the residual.

    Attributes:
        edit: applies plans; None unless a plan acts in the step.
        fire: resumes traces; None unless the step has traces that use only built-in sites.
        seen: collects the points at which the op is called; None if they are not collected.
    """

    edit: Fire | None = None
    fire: Fire | None = None
    seen: set[int] | None = None


def _site(hidden: torch.Tensor, residual: torch.Tensor | None, point: LayerName) -> None:
    if hooks.is_in_body():  # a trace's code calls a layer on a value of its own
        return
    if SiteOp.seen is not None:
        SiteOp.seen.add(int(point.value))
    if SiteOp.edit is not None:
        SiteOp.edit(int(point.value), hidden, residual)
    if SiteOp.fire is not None:
        SiteOp.fire(int(point.value), hidden, residual)


@functools.cache
def _register() -> torch.library.Library:  # the cache keeps the library, and so the op
    """Define `midstream::site`, once a process.

    The point is a LayerName, vLLM's type for values that differ from layer to layer. Compiled graphs take it as an input. With a plain
    number, vLLM would compile each layer's piece separately instead of once for all layers.
    """
    library = torch.library.Library("midstream", "FRAGMENT")
    kind = get_opaque_type_name(LayerName)
    library.define(f"site(Tensor(a!) hidden, Tensor(b!)? residual, {kind} point) -> ()")
    for backend in ("CPU", "CUDA"):
        library.impl("site", _site, backend)
    library._register_fake("site", lambda hidden, residual, point: None)
    return library


def buildable_points(arch: Architecture, sites: Sequence[str]) -> list[Point]:
    """The (site, layer) of `sites` that can be built in."""

    def is_buildable(binding: Binding, site: str) -> bool:
        """Whether the value is a full tensor of the forward, or the sum of two streams."""
        has_bias_outside = site in ("attn_out", "mlp_out") and binding.residual is not None
        return arch.shard_of(binding) is None and binding.scale == 1.0 and not has_bias_outside

    points = [(site, layer) for site in sites for layer in arch.layers if (site, layer) in arch.bindings]
    return [(site, layer) for site, layer in points if is_buildable(arch.bindings[site, layer], site)]


def build_in(model: nn.Module, arch: Architecture, points: Sequence[Point], index: Callable[[Point], int]) -> None:
    """Call the op at each of `points` with its index. Has to run before the model is compiled."""
    _register()
    for point in points:
        binding = arch.bindings[point]
        install: Any = hooks.before if binding.kind == "input" else hooks.after
        install(model.get_submodule(binding.path), _site_hook(binding, index(point)))


def _site_hook(binding: Binding, index: int) -> Callable[..., None]:
    def on_output(tree: Any) -> None:
        second = follow(tree, binding.residual) if binding.residual is not None else None
        torch.ops.midstream.site(follow(tree, binding.hidden), second, LayerName(str(index)))

    def on_input(args: Any, kwargs: Any) -> None:
        on_output((args, kwargs))

    return on_input if binding.kind == "input" else on_output


# CUDA graphs with the plans' kernel.


class Kernel(NamedTuple):
    """The functions that the site op calls while graphs are recorded. They may refer to memory that must live as long as the graphs.

    Attributes:
        fire: called while a graph is recorded.
        warm_up: called in the forwards that vLLM runs before it records. It changes nothing.
        operations: how many operations programs add to the forward.
    """

    fire: Fire
    warm_up: Fire = lambda point, hidden, residual: None
    operations: float = 0


class PiecewiseGraphs:
    """The piecewise CUDA graphs of one model. It decides which pieces run from their compiled code in the step, and not from their graph.

    Attributes:
        expects: whether a trace of the step waits at a point; None if the step has no such traces.
    """

    def __init__(self) -> None:
        self.expects: Callable[[int], bool] | None = None
        self._acts: Callable[[int], bool] | None = None
        self._points: dict[CUDAGraphWrapper, set[int]] = {}  # the sites in each piece that has run from its code
        self._calling: Replacement | None = None

    @contextlib.contextmanager
    def stopping_at(self, expects: Callable[[int], bool]) -> Iterator[None]:
        """Run a piece from its compiled code, which calls the site op, if a trace waits at one of its points.

        If such blocks are nested, pieces stop for both.
        """
        outer = self.expects
        self.expects = expects if outer is None else lambda point: outer(point) or expects(point)
        self._call_by_us()
        try:
            yield
        finally:
            self.expects = outer
            self.end_step()

    def stop_where(self, acts: Callable[[int], bool]) -> None:
        """Until `end_step`: run a piece from its compiled code if a plan acts at one of its points."""
        self._acts = acts
        self._call_by_us()

    def end_step(self) -> None:
        """To be called when the forward is queued."""
        self._acts = None
        if self._calling is not None and self.expects is None:
            self._calling.switch(False)
            self._calling = None

    def _call_by_us(self) -> None:
        if self._calling is None:
            self._calling = calling_pieces_by(self._call)
            self._calling.switch(True)

    def _call(self, vllms: AnyFunction, piece: CUDAGraphWrapper, *args: Any, **kwargs: Any) -> Any:
        points = self._points.get(piece)
        if points is not None and not any(map(self._stops, points)):
            return vllms(piece, *args, **kwargs)
        before, SiteOp.seen = SiteOp.seen, (seen := set[int]())
        try:
            output = _run(piece, *args, **kwargs)
        finally:
            SiteOp.seen = before
        self._points[piece] = seen
        return output

    def _stops(self, point: int) -> bool:
        expects, acts = self.expects, self._acts
        return (expects is not None and expects(point)) or (acts is not None and acts(point))


def _run(piece: CUDAGraphWrapper, *args: Any, **kwargs: Any) -> Any:
    """Run the piece's compiled code, and copy its output to where its graph would write it: the next piece's graph reads it there."""
    output, context = piece.runnable(*args, **kwargs), get_forward_context()
    if context.cudagraph_runtime_mode != piece.runtime_mode:
        return output
    expected = piece.concrete_cudagraph_entries[context.batch_descriptor].output
    for to, value in zip(_tensors(expected), _tensors(output), strict=True):
        to.copy_(value)
    return expected


def _tensors(output: Any) -> list[torch.Tensor]:
    return [value for value in (output if isinstance(output, (tuple, list)) else [output]) if torch.is_tensor(value)]


def calling_pieces_by(call: AnyFunction) -> Replacement:
    """Replaces calls of pieces by `call(vLLM's __call__, piece, *args, **kwargs)`, while it is switched on."""
    vllms = CUDAGraphWrapper.__call__

    def called(wrapper: CUDAGraphWrapper, *args: Any, **kwargs: Any) -> Any:
        if wrapper.runtime_mode != CUDAGraphMode.PIECEWISE:
            return vllms(wrapper, *args, **kwargs)
        return call(vllms, wrapper, *args, **kwargs)

    return Replacement("vllm.compilation.cuda_graph.CUDAGraphWrapper.__call__", CUDAGraphWrapper, called)


class SetOfGraphs:
    """The graphs of the steps in which the same sites and programs act: one dictionary for each object of vLLM's that holds graphs.

    Such an object is a piece, or the holder of the full graphs. While the set is switched on, its dictionaries replace vLLM's.

    Attributes:
        kernel: the functions that the site op called while the graphs were recorded.
    """

    def __init__(self) -> None:
        self.kernel: Kernel | None = None
        self._graphs: dict[Any, dict[Any, Any]] = {}
        self._switches: dict[Any, Replacement] = {}
        self._on = False

    def recorded_with(self, kernel: Kernel | None) -> Kernel:
        """The functions that the site op calls while the graphs are recorded: the first `kernel` that was given."""
        self.kernel = self.kernel or kernel
        assert self.kernel is not None
        return self.kernel

    def add(self, target: str, owner: Any) -> None:
        """Hold the graphs of `owner`, whose attribute `target` names, if they are not held yet.

        To be called while no other set is switched on: the owner's dictionary is then vLLM's own, and `switch(False)` restores it.
        """
        if owner not in self._graphs:
            self._graphs[owner] = {}
            self._switches[owner] = Replacement(target, owner, self._graphs[owner])
            self._switches[owner].switch(self._on)

    def switch(self, on: bool) -> None:
        """Have vLLM use these graphs, or its own."""
        self._on = on
        for switch in self._switches.values():
            switch.switch(on)

    def held(self) -> set[tuple[Any, Any]]:
        """(object, batch descriptor) of each graph."""
        return {(owner, descriptor) for owner, graphs in self._graphs.items() for descriptor in graphs}

    def drop(self, held: set[tuple[Any, Any]]) -> None:
        """Forget some of the graphs, which gives the driver its memory back."""
        for owner, descriptor in held:
            del self._graphs[owner][descriptor]
        if _CaptureAtStart.given is not None:
            keep_workspace(_CaptureAtStart.given)


class ActingGraphs:
    """The graphs of one worker, by the sites that act: recorded when they are needed, and dropped to make room for others.

    Args:
        limit: how many bytes of graphs are kept.
        kernel: the kernel for a graph in which these sites act; None if there can be no such graph.
        acts: whether a plan acts at a point in the step that is running.
        record: has vLLM record its graph of a kind and a batch descriptor.
        full: the attribute and the object in which vLLM looks for full graphs; None if it has none.
        piecewise: the piecewise graphs of the model.
        fixed: the sites of the only set of graphs, which is recorded when the engine starts; None if graphs are recorded later.

    Attributes:
        acting: the sites that act in the coming step.
        bytes_each: the size that each graph is counted with; the same on all ranks.
    """

    def __init__(
        self,
        limit: int,
        kernel: Callable[[Acting], Kernel | None],
        acts: Callable[[int], bool],
        record: Callable[[str, Any], None],
        full: tuple[str, Any] | None,
        piecewise: PiecewiseGraphs,
        fixed: Acting | None = None,
    ) -> None:
        self.acting = NOTHING
        self.bytes_each = _SMALLEST
        self.fixed = fixed
        self.recordings = 0
        self._limit, self._kernel, self._acts, self._record = limit, kernel, acts, record
        self._full, self._piecewise = full, piecewise
        self._sets: dict[Acting, SetOfGraphs] = {}
        self._recorded: OrderedDict[GraphKey, set[tuple[Any, Any]]] = OrderedDict()  # the least recently used first
        self._missed: OrderedDict[GraphKey, int] = OrderedDict()  # how many steps ran without the graph
        self._patience: dict[GraphKey, int] = {}  # of batches whose graph was dropped before
        self._due: list[GraphKey] = []
        self._impossible: set[GraphKey] = set()
        self._used: Acting = NOTHING
        self._has_missed = False
        self._has_strangers = False  # among the requests of the coming step
        self._pause = 0  # steps in which nothing is recorded for strangers

    # Steps.

    def begin_step(self, acting: Acting, has_strangers: bool = False) -> bool:
        """Plans act at `acting` in the coming step. Returns whether a graph for it is to be recorded before it.

        Args:
            has_strangers: whether some of the plans come from HTTP. All requests wait for a recording, so such plans get a graph only once
                in many steps, and none if its programs are long.
        """
        self.acting, self._has_missed, self._has_strangers = acting, False, has_strangers
        self._pause = max(self._pause - 1, 0)
        if not acting:
            self._use(NOTHING)
        return not (has_strangers and self._pause) and any(key[0] == acting for key in self._due)

    def choose(self, kind: str, descriptor: Any) -> bool:
        """vLLM chose a kind of graph for the step. Returns whether it may replay it; `kind` names a `CUDAGraphMode`.

        A step whose piecewise graphs are not recorded replays vLLM's, and runs pieces in which a plan acts from their code.
        """
        if not self.acting or kind == CUDAGraphMode.NONE.name:
            return True
        is_fixed = self.fixed is not None and self.acting <= self.fixed
        key = (self.fixed if is_fixed and self.fixed is not None else self.acting, kind, descriptor)
        if is_fixed or key in self._recorded:
            if not is_fixed:
                self._recorded.move_to_end(key)
            self._use(key[0])
            return True
        self._use(NOTHING)
        self._miss(key)
        if kind == CUDAGraphMode.PIECEWISE.name:
            self._piecewise.stop_where(self._acts)
        return False

    def end_step(self) -> None:
        """To be called when the forward is queued."""
        self._piecewise.end_step()

    def _use(self, acting: Acting) -> None:
        if acting != self._used:
            for each, on in ((self._used, False), (acting, True)):
                if each in self._sets:
                    self._sets[each].switch(on)
            self._used = acting

    def _miss(self, key: GraphKey) -> None:
        """The step runs without a graph. Only the first graph that it would have used counts; after some such steps it is recorded."""
        if self._has_missed or key in self._impossible or self.bytes_each > self._limit or self.fixed is not None:
            return
        kernel = self._kernel(key[0])
        if kernel is None or (self._has_strangers and kernel.operations > _STRANGERS_OPERATIONS):
            return
        self._has_missed = True
        count = self._missed.pop(key, 0) + 1
        self._missed[key] = count
        if len(self._missed) > _REMEMBERED:
            self._missed.popitem(last=False)
        if count >= self._patience.get(key, _PATIENCE) and key not in self._due:
            self._due = [*self._due[1 - _MOST_DUE :], key]

    # Recording.

    def measure(self, taken: int, count: int) -> None:
        """vLLM has recorded `count` graphs, which took so many bytes."""
        self.bytes_each = max(_SMALLEST, taken // max(count, 1))
        if 0 < self._limit < self.bytes_each and self.fixed is None:
            _log.warning(
                "While vLLM recorded %d CUDA graphs, the device's free memory became less by %d MiB, which is more for each than "
                "graph_bytes allows. So steps with plans and traces run without full graphs. Raise graph_bytes, or start the engine while "
                "no other process takes memory of the device.", count, taken >> 20,
            )  # fmt: skip

    def agree(self, exchange: Callable[[Any], list[Any]]) -> None:
        """Make all ranks of a group use the largest size. `exchange` returns the values that all ranks passed."""
        self.bytes_each = max(exchange(self.bytes_each))

    def record_due(self) -> None:
        """Record the graphs that the coming step is likely to need. To be called between two steps, after `begin_step`."""
        due = [key for key in self._due if key[0] == self.acting][: 1 if self._has_strangers else None]
        self._due = [key for key in self._due if key not in due]
        self._pause = _STRANGERS_PAUSE
        for key in due:
            self._missed.pop(key, None)
            while (len(self._recorded) + 1) * self.bytes_each > self._limit:
                self._drop(next(iter(self._recorded)))
            self._record_one(key)

    def _record_one(self, key: GraphKey) -> None:
        acting, kind, descriptor = key
        graphs = self._sets.setdefault(acting, SetOfGraphs())
        before = graphs.held()
        try:
            with self.recording(acting):
                self._record(kind, descriptor)
            if graphs.held() == before:
                raise RuntimeError("vLLM recorded no graph.")
        except BaseException as error:
            graphs.drop(graphs.held() - before)
            self._drop_if_empty(acting)
            if not isinstance(error, Exception):
                raise
            _log.warning(
                "The CUDA graph of plans at %s for %s could not be recorded; such steps run without it.",
                ", ".join(map(str, sorted(acting, key=str))), descriptor, exc_info=True,
            )  # fmt: skip
            self._impossible.add(key)
            return
        self._recorded[key] = graphs.held() - before
        self.recordings += 1

    @contextlib.contextmanager
    def recording(self, acting: Acting) -> Iterator[None]:
        """Graphs that vLLM records in the block are graphs for `acting`."""
        graphs = self._sets.setdefault(acting, SetOfGraphs())
        self._use(NOTHING)  # the last step's set would be taken for vLLM's own
        if self._full is not None:
            graphs.add(*self._full)
        kernel = graphs.recorded_with(self._kernel(acting))

        def edit(point: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
            # vLLM also runs the forward to warm up. The tables are then the last step's, and the kernel would write to its rows.
            (kernel.fire if is_capturing() else kernel.warm_up)(point, hidden, residual)

        def call(vllms: AnyFunction, piece: CUDAGraphWrapper, *args: Any, **kwargs: Any) -> Any:
            graphs.add(ENTRIES, piece)
            return vllms(piece, *args, **kwargs)

        with calling_pieces_by(call), alone_on_this_thread():
            SiteOp.edit = edit
            try:
                self._use(acting)
                yield
            finally:
                SiteOp.edit = None
                self._use(NOTHING)

    def _drop(self, key: GraphKey) -> None:
        """Forget a graph. It is recorded again only after twice as many misses: more batches take turns than there is room for."""
        self._sets[key[0]].drop(self._recorded.pop(key))
        if len(self._patience) < _REMEMBERED:
            self._patience[key] = 2 * self._patience.get(key, _PATIENCE)
        self._drop_if_empty(key[0])

    def _drop_if_empty(self, acting: Acting) -> None:
        if all(other[0] != acting for other in self._recorded):
            if acting == self._used:
                self._use(NOTHING)
            del self._sets[acting]

    def gauges(self) -> dict[str, int]:
        """Counts of the graphs. The piecewise graphs of one batch count as one."""
        held = len(self._recorded)
        if self.fixed in self._sets:
            held = len({descriptor for _, descriptor in self._sets[self.fixed].held()})
        counts = {"graph_recordings": self.recordings, "recording_failures": len(self._impossible)}
        return {"graphs": held, "graph_bytes": held * self.bytes_each, **counts}


def is_capturing() -> bool:
    """Whether this thread's launches are recorded and not run."""
    return torch.cuda.is_current_stream_capturing()


@functools.cache
def _workspaces() -> Any:
    """The pool of the workspaces of graphs. It lives as long as the process, and nothing else is allocated from it."""
    return torch.cuda.MemPool()


def keep_workspace(stream: torch.cuda.Stream) -> None:
    """Make cuBLAS use a workspace on this stream that is never given back.

    The recorded products of matrices write to the workspace that the stream had during the recording. From PyTorch 2.14 on, at least,
    dropping one graph frees the workspace of its stream, also if other graphs of that stream use it. So the workspace comes from a pool of
    its own. The pool keeps a freed block, and hands out the same block at the next call. To be called before graphs are recorded on the
    stream, and after one is dropped.
    """
    with torch.cuda.stream(stream), torch.cuda.use_mem_pool(_workspaces()):
        one = torch.ones(1, 1, device=stream.device)
        torch.mm(one, one)


class _CaptureAtStart(torch.cuda.graph):
    """`torch.cuda.graph` that remembers the stream that it was given.

    Attributes:
        given: that stream; None if `torch.cuda.graph` used its default stream.
    """

    given: Any = None

    def __init__(self, cuda_graph: torch.cuda.CUDAGraph, pool: Any = None, stream: Any = None, **options: Any) -> None:
        super().__init__(cuda_graph, pool, stream, **options)
        if stream is not None and stream != _CaptureAtStart.given:
            _CaptureAtStart.given = stream
            torch.cuda.synchronize()
            torch._C._cuda_clearCublasWorkspaces()  # vLLM's first forward there took one from the common pool
            keep_workspace(stream)


class _ThreadLocalCapture(_CaptureAtStart):
    """`torch.cuda.graph` for a process in which other threads use the device during the recording.

    midstream's sender copies captured rows to the host on its own stream. By default PyTorch forbids that in all threads while one thread
    records. It also frees all cached memory first, which would make the steps after a recording slow.
    """

    def __init__(self, cuda_graph: torch.cuda.CUDAGraph, pool: Any = None, stream: Any = None, **options: Any) -> None:
        stream = stream and (_CaptureAtStart.given or stream)
        super().__init__(cuda_graph, pool, stream, **{**options, "capture_error_mode": "thread_local"})

    def __enter__(self) -> None:
        torch.cuda.synchronize()
        self.stream_ctx.__enter__()
        pool = self.pool[0] if self.pool else None
        self.cuda_graph.capture_begin(pool, capture_error_mode="thread_local")


def remembering_streams() -> contextlib.AbstractContextManager[Any]:
    """A block in which vLLM records its graphs. `alone_on_this_thread` uses the same stream later."""
    return mock.patch.object(torch.cuda, "graph", _CaptureAtStart)


@contextlib.contextmanager
def alone_on_this_thread() -> Iterator[None]:
    """A block that records graphs. The device is idle before and after it."""
    torch.cuda.synchronize()
    try:
        # A collection would free memory and events while a graph is recorded.
        with without_collections(), mock.patch.object(torch.cuda, "graph", _ThreadLocalCapture):
            yield
    finally:
        torch.cuda.synchronize()
