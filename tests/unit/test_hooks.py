"""Hooks on modules have one home, `midstream/hooks.py` (requirement K4)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from midstream import hooks

SRC = Path(hooks.__file__).parent
INSTALLS = re.compile(r"register_\w*forward\w*hook|\.__dict__\[.forward.\]|\.forward = |setattr\(\w+, .forward.")


def installers(source: str) -> list[str]:
    """The lines that register a hook or replace a forward."""
    return [line.strip() for line in source.splitlines() if INSTALLS.search(line)]


@pytest.mark.parametrize("path", sorted(SRC.rglob("*.py")), ids=lambda path: str(path.relative_to(SRC)))
def test_no_other_file_installs_hooks(path: Path) -> None:
    found = installers(path.read_text())
    assert bool(found) == (path.name == "hooks.py" and path.parent == SRC), found


@pytest.mark.parametrize(
    "line",
    [
        "layer.register_forward_hook(f)",
        "layer.register_forward_pre_hook(f, with_kwargs=True)",
        "torch.nn.modules.module.register_module_forward_hook(f)",
        "module.__dict__['forward'] = f",
        "module.forward = f",
        "setattr(module, 'forward', f)",
    ],
)
def test_the_check_finds_each_way_to_install_a_hook(line: str) -> None:
    assert installers(line) == [line]


class OwnCall(nn.Linear):
    """A module that skips hooks, as vLLM's compiled models do."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)


X = torch.ones(2, 4)


def doubled_input(args: tuple[torch.Tensor], kwargs: dict[str, torch.Tensor]) -> object:
    return (args[0] * 2,), kwargs


@pytest.mark.parametrize("kind", [nn.Linear, OwnCall])
def test_hooks_replace_inputs_and_outputs_and_leave_nothing_behind(kind: type[nn.Linear]) -> None:
    module = kind(4, 4)
    plain, doubled = module(X), module(X * 2)
    if hooks.skips_hooks(module):
        handles = [hooks.around(module, doubled_input, lambda output: output + 1)]
    else:
        handles = [hooks.before(module, doubled_input), hooks.after(module, lambda output: output + 1)]
    assert torch.equal(module(X), doubled + 1)
    for handle in handles:
        handle.remove()
    assert torch.equal(module(X), plain) and "forward" not in vars(module)


@pytest.mark.parametrize("kind", [nn.Linear, OwnCall])
def test_hooks_that_return_none_change_nothing(kind: type[nn.Linear]) -> None:
    module, seen = kind(4, 4), []
    plain = module(X)
    install = hooks.around if hooks.skips_hooks(module) else lambda m, f, g: (hooks.before(m, f), hooks.after(m, g))
    install(module, lambda args, kwargs: seen.append(args), seen.append)
    assert torch.equal(module(X), plain) and len(seen) == 2


def test_a_replaced_forward_is_put_back() -> None:
    module = OwnCall(4, 4)
    outer = hooks.replace_forward(module, lambda x: x + 1)
    inner = hooks.replace_forward(module, lambda x: x + 2)
    assert torch.equal(module(X), X + 2)
    inner.remove()
    assert torch.equal(module(X), X + 1)
    outer.remove()
    assert "forward" not in vars(module)


def test_a_forward_is_replaced_inside_of_what_is_around_it() -> None:
    module, seen = OwnCall(4, 4), []
    around = hooks.around(module, None, seen.append)
    inner = hooks.replace_forward(module, lambda x: x + 2)
    assert torch.equal(module(X), X + 2) and torch.equal(seen[0], X + 2)
    inner.remove()
    assert torch.equal(module(X), nn.functional.linear(X, module.weight, module.bias)) and len(seen) == 2
    around.remove()
    assert "forward" not in vars(module)


def test_the_first_hook_runs_ahead_of_those_that_are_there() -> None:
    module, order = nn.Linear(4, 4), []
    hooks.after(module, lambda _: order.append("second"))
    hooks.after(module, lambda _: order.append("first"), first=True)
    module(X)
    assert order == ["first", "second"]


def test_dynamo_traces_hooks_into_a_compiled_forward() -> None:
    """The site op is built into vLLM's compiled forward this way."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    hooks.after(model[0], lambda output: torch.mul(output, 2))
    plain = model(X)
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(X), plain)
