"""Tells from a trace's bytecode whether it uses only sites that are built into the compiled forward, and so needs no uncompiled step.

In doubt the answer is no: for any use of the model other than the attributes in a short list, and for any captured object whose code might
reach the model by another way.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch

from midstream.trace.program import BlockProgram, FunctionProgram, Program
from midstream.trace.saves import variables_of

_MODEL = frozenset(
    {"layers_output", "resid_post", "logits", "samples", "next_token_probs", "steer", "project_on_vocab"}
    | {"num_layers", "hidden_size", "tokenizer"}
)
_TRACER = frozenset({"iter", "all", "next", "stop", "result"})
_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, torch.Tensor, torch.dtype, torch.device, torch.Size)
_KNOWN_CODE = (*"torch numpy math operator itertools functools collections builtins".split(), "midstream.trace.tracer")


def keeps_to_graph_sites(program: Program) -> bool:
    """Whether `program` reads and writes only `layers_output`, `logits` and `samples`."""
    if isinstance(program, BlockProgram):
        return _block(program)
    return isinstance(program, FunctionProgram) and _function(program.fn)


def _block(program: BlockProgram) -> bool:
    captured = program.block.captured
    uses = {name: _TRACER for name in program.injected}
    uses |= {name: _MODEL for name, value in captured.items() if _is_model(value)}
    others = [value for name, value in captured.items() if name not in uses]
    return all(map(_harmless, others)) and _uses_only(program.block.code, uses)


def _function(fn: Any) -> bool:
    if not isinstance(fn, FunctionType):
        return False
    names = list(inspect.signature(fn).parameters)
    uses: dict[str, frozenset[str]] = dict(zip(names, (_MODEL, _TRACER), strict=False))
    values = dict(variables_of(fn))
    uses |= {name: _MODEL for name, value in values.items() if _is_model(value)}
    others = [value for name, value in values.items() if name not in uses]
    return all(map(_harmless, [*others, *(fn.__defaults__ or ())])) and _uses_only(fn.__code__, uses)


def _is_model(value: Any) -> bool:
    refers = getattr(type(value), "__midstream_reference__", None)
    return refers is not None and refers(value) == ("model",)


def _harmless(value: Any) -> bool:
    """Whether `value` cannot reach the model."""
    if isinstance(value, _PLAIN):
        return True
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_harmless, value))
    if isinstance(value, Mapping) and type(value) is dict:
        return all(map(_harmless, value.keys())) and all(map(_harmless, value.values()))
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] in _KNOWN_CODE
    if isinstance(value, (FunctionType, BuiltinFunctionType, type)):
        home = value.__module__ or "builtins"
        return any(home == known or home.startswith(known + ".") for known in _KNOWN_CODE)
    return False


def _uses_only(code: CodeType, uses: Mapping[str, frozenset[str]]) -> bool:
    """Whether the code loads names in `uses` only to use the attributes listed there."""
    instructions = [
        i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "COPY", "PUSH_NULL", "EXTENDED_ARG")
    ]
    for instruction, following in zip(instructions, [*instructions[1:], None], strict=True):
        names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        touched = [name for name in names if isinstance(name, str) and name in uses]
        if not touched or instruction.opname in ("MAKE_CELL", "LOAD_CLOSURE", "COPY_FREE_VARS", "LOAD_CONST"):
            continue
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR"):  # an attribute with the same name
            continue
        loads = len(names) == 1 and instruction.opname.startswith("LOAD_")
        attribute = following is not None and following.opname in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR")
        if not (loads and attribute and following is not None and following.argval in uses[touched[0]]):
            return False
    return all(
        _uses_only(inner, uses) for inner in code.co_consts if isinstance(inner, CodeType)
    ) and not _reaches_frames(code)


def _reaches_frames(code: CodeType) -> bool:
    """Whether the code calls functions that could find the model under another name."""
    return bool({"eval", "exec", "globals", "locals", "vars"} & set(code.co_names))
