"""The names of calls and assignments in `.source`. The expected names were read off nnsight 0.8.1 for the same functions. Row J7."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from midstream.errors import SourceUnavailableError, TraceError
from midstream.trace.envoy import Source
from midstream.trace.forward import Forward, SourceHooks, forward_source


def f(*args, **kwargs):
    return args


g = f


def chained(self, x):
    return self.proj(x).view(1, -1).transpose(0, 1)


def chained_twice(self, x):
    q = self.q(x).view(1, -1).transpose(0, 1)
    return q + self.k(x).view(1, -1).transpose(0, 1)


def assigned(self, x):
    h = x + 1
    h = self.up(h)
    h: Any = h * 2
    return h


def unpacked(self, x):
    a, b = f(x)
    c, (d, e) = x, (f(x), 1)
    a, b = b, a
    first, *rest = f(x), 1
    return a, b, c, d, e, first, rest


def without_names(self, x):
    x += f(x)
    a = b = g(x)
    if (y := f(x)) is not None:
        g(x).value = y
    for each in f(x):
        a = each
    return a, b


def bound_then_called(self, x):
    attend = self.attend if x is None else f(x)
    return attend(attend(x))


def nested(self, x):
    return f(g(f(x)), f(y=g(x)))


def dotted(self, x):
    x = torch.nn.functional.softmax(x, dim=-1)
    self.kept = x
    self.rows[f(x)] = g(x)
    return self.experts[0].up(x), (x @ x.T).sum(), f(x)(x), self.rows[g(x)].sum()


def builtins_too(self, x):
    if isinstance(x, torch.Tensor) and hasattr(self, "up"):
        return getattr(self, x)(x)
    return max(len(x), int(x))


def in_comprehensions(self, x):
    pairs = [f(each) for each in g(x)]
    return list(map(lambda each: f(each), pairs))


def in_functions(self, x):
    @functools.lru_cache(maxsize=1)
    def inner(y):
        z = f(y)
        return z

    return inner(x)


NAMES = {
    chained: ["self_proj_0", "view_0", "transpose_0"],
    chained_twice: ["self_q_0", "view_0", "transpose_0", "q_0", "self_k_0", "view_1", "transpose_1"],
    assigned: ["h_0", "self_up_0", "h_1", "h_2"],
    unpacked: ["f_0", "f_1", "c_0", "d_0", "e_0", "a_0", "b_0", "f_2"],
    without_names: ["f_0", "g_0", "f_1", "g_1", "f_2", "a_0"],
    bound_then_called: ["f_0", "attend_0", "attend_1", "attend_2"],
    nested: ["f_0", "g_0", "g_1", "f_1", "f_2"],
    dotted: [
        "torch_nn_functional_softmax_0",
        "x_0",
        "self_kept_0",
        "g_0",
        "f_0",
        "self_rows_0",
        "self_experts_up_0",
        "sum_0",
        "f_1",
        "call_0",
        "g_1",
        "self_rows_sum_0",
    ],
    builtins_too: ["isinstance_0", "hasattr_0", "getattr_0", "call_0", "len_0", "int_0", "max_0"],
    in_comprehensions: ["f_0", "g_0", "pairs_0", "f_1", "map_0", "list_0"],
    in_functions: ["f_0", "z_0", "functools_lru_cache_0", "inner_0"],
}


@pytest.mark.parametrize("forward", NAMES, ids=lambda forward: forward.__name__)
def test_names_are_those_of_nnsight_0_8_1(forward: Any) -> None:
    """Chained calls go by their last name, assignments by their target, and both are counted together, in the order in which they run."""
    assert list(forward_source(forward).names) == NAMES[forward]


def plus_one(forward: Any) -> Any:
    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs) + 1

    return wrapper


def either(forward: Any) -> Any:
    def other(self: Any, x: Any) -> Any:
        return forward(self, x) * 2

    @functools.wraps(forward)
    def wrapper(self: Any, x: Any) -> Any:
        return forward(self, x) if x is None else other(self, x)

    return wrapper


def doubled(x: torch.Tensor) -> torch.Tensor:
    twice = x * 2
    return twice.relu()


class Base(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class Block(Base):
    scale = 3

    def forward(self, x: torch.Tensor, by: int = 2) -> torch.Tensor:
        double = doubled
        both, left = x * by, "double" in locals()
        hidden = double(both)
        return super().forward(hidden).mul(self.scale) + left


class Decorated(Block):
    @torch.no_grad()
    @plus_one
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x * 2
        return hidden


class OneOfSeveral(Block):
    @either
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x * 2
        return hidden


def run(module: nn.Module, writes: dict[str, Any], opened: str = "") -> tuple[torch.Tensor, dict[str, Any]]:
    """The module's output for ones with other outputs of calls, and each call's output before that."""
    seen: dict[str, Any] = {}

    def fire(key: Any, value: Any) -> Any:
        if key[3] == "input":
            return value
        seen[key[2]] = value
        return writes.get(key[2], value)

    hooks = SourceHooks({"block": module}, fire)
    hooks.install("block")
    if opened:
        hooks.open("block", opened)
    try:
        return module(torch.ones(2, requires_grad=True)), seen
    finally:
        hooks.remove()


def test_calls_and_assignments_are_reported_and_replaced() -> None:
    """Of a forward that calls `super()` and `locals()`, too."""
    out, seen = run(Block(), {})
    names = ["double_0", "both_0", "left_0", "double_1", "hidden_0", "forward_0", "mul_0"]
    assert sorted(seen) == sorted(names)
    assert torch.equal(out, Block()(torch.ones(2))) and out.tolist() == [16, 16]
    assert seen["hidden_0"].tolist() == [4, 4] and seen["left_0"] is True and seen["double_0"] is doubled
    out, _ = run(Block(), {"hidden_0": torch.zeros(2), "left_0": 0})
    assert out.tolist() == [3, 3]


def test_assignments_in_a_called_function_are_reported() -> None:
    out, seen = run(Block(), {"double_1.twice_0": torch.zeros(2)}, opened="double_1")
    assert {"double_1.twice_0", "double_1.twice_relu_0"} <= set(seen) and "double_0.twice_0" not in seen
    assert out.tolist() == [4, 4]


def test_decorators_stay_around_a_forward() -> None:
    """As in nnsight: a decorator that calls several of the functions it has is traced itself."""
    out, seen = run(Decorated(), {"hidden_0": torch.zeros(2)})
    assert out.tolist() == [1, 1] and not out.requires_grad and list(seen) == ["hidden_0"]
    out, seen = run(OneOfSeveral(), {})
    assert (
        out.tolist() == [4, 4]
        and list(seen) == ["other_0"]
        and list(forward_source(OneOfSeveral.forward).names) == ["forward_0", "other_0"]
    )


def test_an_assignment_has_no_source_and_names_the_calls() -> None:
    forward = Forward(nn.ModuleDict({"block": Block()}), {})
    with pytest.raises(
        TraceError, match=r"block\.source\.double_0 is an assignment .* The calls of that name: double_1\."
    ):
        _ = Source(forward, "block").double_0.source
    with pytest.raises(
        TraceError, match=r"block\.source\.hidden_0 is an assignment and calls nothing; its value is its \.output\.$"
    ):
        _ = Source(forward, "block").hidden_0.source


@pytest.mark.parametrize(
    "function", [len, torch.nn.ReLU, lambda x: x, None], ids=["builtin", "class", "lambda", "none"]
)
def test_what_has_no_source_says_so(function: Any) -> None:
    with pytest.raises(SourceUnavailableError, match="has no Python source"):
        forward_source(function)
