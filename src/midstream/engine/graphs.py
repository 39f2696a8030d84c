"""How steps run (with CUDA graphs, compiled without them, or uncompiled), and the sites inside compiled code.

A forward hook at each built-in site calls one opaque custom op, which Dynamo traces into the compiled graph. In a step without plans and
traces, the op returns at once, and the graphs that vLLM records do not contain it. `recording` records graphs with the plans' kernel; steps
in which a plan acts replay them. In a step with traces that use only built-in sites, the op hands the residual stream to the interleaver
from compiled code. Such a step runs compiled, without full graphs.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._library.opaque_object import get_opaque_type_name
from vllm.config import CompilationMode
from vllm.model_executor.custom_op import CustomOp
from vllm.platforms import current_platform
from vllm.utils.torch_utils import LayerName

from midstream import hooks
from midstream.arch import Architecture
from midstream.engine.plugin import Replacement
from midstream.sites import Binding, Point
from midstream.trace.body import is_in_body
from midstream.tree import follow

Fire = Callable[[int, torch.Tensor, torch.Tensor | None], None]


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
    if is_in_body():  # a trace's code calls a layer on a value of its own
        return
    if SiteOp.seen is not None:
        SiteOp.seen.add(int(point.value))
    if SiteOp.edit is not None:
        SiteOp.edit(int(point.value), hidden, residual)
    if SiteOp.fire is not None:
        SiteOp.fire(int(point.value), hidden, residual)


@functools.cache
def _register() -> torch.library.Library:  # kept by the cache: the op lives as long
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
