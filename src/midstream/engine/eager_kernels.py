"""vLLM's own kernels in uncompiled steps of an engine that compiles.

Such an engine leaves norms and activations to the compiler and has their plain PyTorch form in the modules: many small kernels each, or
one that `torch.compile` makes when it is first called, and again for other shapes. An uncompiled step takes vLLM's kernels instead, as an
eager engine does.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

from torch import nn
from vllm.config import CompilationMode
from vllm.model_executor.custom_op import CustomOp
from vllm.platforms import current_platform


class EagerKernels:
    """Switches a model's modules to vLLM's kernels and back. Does nothing but on CUDA and on the CPU."""

    def __init__(self, model: nn.Module, vllm_config: Any) -> None:
        self._modules: list[tuple[CustomOp, Any, Any]] = []  # (module, its kernel, what it has instead)
        self._priority: Any = None
        kernel = "forward_cuda" if current_platform.is_cuda() else "forward_cpu" if current_platform.is_cpu() else None
        if kernel is None or vllm_config.compilation_config.mode == CompilationMode.NONE:
            return
        for module in model.modules():
            if isinstance(module, CustomOp) and module._forward_method != getattr(module, kernel):
                self._modules.append((module, getattr(module, kernel), module._forward_method))
        if hasattr(current_platform, "get_default_ir_op_priority"):
            eager = copy.copy(vllm_config)
            eager.compilation_config = copy.copy(vllm_config.compilation_config)
            eager.compilation_config.mode = CompilationMode.NONE
            self._priority = current_platform.get_default_ir_op_priority(eager)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Use the kernels in the block."""
        for module, kernel, _ in self._modules:
            module._forward_method = kernel
        try:
            with self._priority.set_priority() if self._priority is not None else contextlib.nullcontext():
                yield
        finally:
            for module, _, plain in self._modules:
                module._forward_method = plain
