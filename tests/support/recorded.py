"""What recording finds in a trace's body, without an engine, and the same body run on plain numbers.

    found = checked(body, steps=3)      # raises AssertionError unless the edits do to the numbers what the body does
    found.tier, said(found), captured(found)

The plain run shares no code with midstream: each site has random numbers in each step, and the body gets them one after the other
(`plain_model`, `plain_run`). Writing to a site does not change the numbers of later ones.

Shape suffixes: T tokens of this step, H hidden.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain_model import ORDER, PARTS
from plain_model import Model as PlainModel
from plain_model import Tracer as PlainTracer
from plain_run import NeverReachedError, OutOfOrderError, Stopped, Visit
from torch import nn

from midstream.arch import Architecture
from midstream.arch.aliases import Aliases
from midstream.lowering.taper import warm_up
from midstream.lowering.tiers import Lowered, TapedCode, Tier
from midstream.plan.ops import Apply, Clamp, Patch, Steer
from midstream.plan.running import run
from midstream.plan.vectors import Zeros
from midstream.sites import ACCESSORS, LAYER_SITES, Binding
from midstream.trace.body import SAVE_ABOVE
from midstream.trace.code import RETURNED, FunctionProgram, TraceProgram
from midstream.trace.record import Model
from midstream.trace.shipping import ShippedCode, ship

warm_up()
LAYERS, WIDTH, LENGTH, VOCAB = 4, 8, 5, 20
# Each site's module within its layer, whether it is the input or the output, and where the value lies there.
_LAYER = [
    ("resid_pre", "", "input", (0, 1), (0, 2)),
    ("attn_z", ".self_attn.o_proj", "input", (0, 0), None),
    ("attn_out", ".self_attn", "output", (), None),
    ("resid_mid", ".norm", "input", (0, 0), (0, 1)),
    ("mlp_in", ".mlp", "input", (0, 0), None),
    ("mlp_out", ".mlp", "output", (), None),
    ("resid_post", "", "output", (0,), (1,)),
]


def model(layers: int = LAYERS, width: int = WIDTH, sites: Sequence[str] = LAYER_SITES, dtype=torch.float32) -> Model:
    """A model with vLLM's forms: layers take and return two streams."""
    bindings, order = {}, {}
    modules = {"": "Whole", "model": "Inner", "model.layers": "ModuleList", "model.norm": "RMSNorm", "lm_head": "Head"}
    shapes = {"model.norm": f"([T, {width}], [T, {width}])"}
    for layer in range(layers):
        base = f"model.layers.{layer}"
        modules |= {base: "Layer", f"{base}.self_attn": "Attention", f"{base}.self_attn.o_proj": "Linear"}
        modules |= {f"{base}.norm": "RMSNorm", f"{base}.mlp": "MLP", f"{base}.mlp.down_proj": "Linear"}
        shapes[base] = f"([T, {width}], [T, {width}])"
        shapes |= {f"{base}{part}": f"[T, {width}]" for part in (".self_attn", ".self_attn.o_proj", ".mlp")}
        for site, part, kind, hidden, residual in _LAYER:
            heads = (2, width // 2) if site == "attn_z" else None
            bindings[site, layer] = Binding(base + part, kind, hidden, residual, heads)
            order[base + part, kind] = (len(order), len(order))
    bindings["final_norm", None] = Binding("model.norm", "output", (0,))
    order["model.norm", "output"] = (len(order), len(order))
    arch = Architecture(layers, tuple(range(layers)), width, bindings, order, shapes, dict.fromkeys(bindings, width))
    return Model(arch, modules, sites, dtype, torch.device("cpu"), VOCAB, Aliases({"mlp": "ffn"}))


MODEL = model()
# What bodies of tests write.
V = torch.arange(1.0, WIDTH + 1)
UNIT = V / V.norm()
ROWS = torch.arange(float(LENGTH * WIDTH)).reshape(LENGTH, WIDTH)


# Recording.


def lowered(
    requests: Sequence[Sequence[Callable | TraceProgram]],
    lengths: Sequence[int],
    steps: Sequence[int],
    known: Model = MODEL,
) -> list[Lowered]:
    """What the bodies of each request do."""
    made: dict[int, TraceProgram] = {}  # one function is one program
    programs = [
        [each if isinstance(each, TraceProgram) else made.setdefault(id(each), FunctionProgram(each)) for each in own]
        for own in requests
    ]
    return FIND.get()(programs, ship(programs), known, lengths, steps)


def _in_this_process(
    programs: Sequence[Sequence[TraceProgram]],
    code: ShippedCode,
    known: Model,
    lengths: Sequence[int],
    steps: Sequence[int],
) -> list[Lowered]:
    key = "in this process", code.programs, tuple(code.weights), tuple(code.bodies)
    known.recorded[key] = known.recorded.get(key) or TapedCode.of(programs, code, known)
    return known.recorded[key].lowered(lengths, steps)


FIND: ContextVar[Callable] = ContextVar("find", default=_in_this_process)  # or `taping.lowered_requests`


def found(*bodies: Callable | TraceProgram, steps: int = 4, length: int = LENGTH, known: Model = MODEL) -> Lowered:
    """What one request's bodies do."""
    return lowered([bodies], [length], [steps], known)[0]


def said(given: Lowered) -> list[tuple[str, str, int, Any, list[float]]]:
    """(kind, site, layer, positions or phase or both, numbers) of each edit."""
    return [
        (
            type(edit).__name__,
            edit.site,
            layer,
            edit.phase if edit.place is None else ("decode", edit.place) if edit.phase == "decode" else edit.place,
            numbers(edit).tolist(),
        )
        for edit in given.edits
        for layer in edit.at_layers
    ]


def numbers(edit: Any) -> torch.Tensor:
    """The vector of an edit, with its factor; empty for a program."""
    if isinstance(edit, Apply):
        return torch.empty(0)
    if isinstance(edit, Clamp):
        return torch.tensor(edit.direction.data)
    if isinstance(edit, Patch):
        return torch.zeros(WIDTH) if isinstance(edit.source, Zeros) else torch.tensor(edit.source.data)
    return edit.scale * torch.tensor(edit.vector.data)


def steer(vector: torch.Tensor, layer: int = 2, where: Any = "prefill", site: str = "resid_post") -> tuple[Any, ...]:
    """What `said` has of a Steer with these numbers."""
    return "Steer", site, layer, where, pytest.approx(vector.tolist(), rel=1e-6)


def patch(vector: torch.Tensor, layer: int = 2, where: Any = (0,), site: str = "resid_post") -> tuple[Any, ...]:
    return "Patch", site, layer, where, pytest.approx(vector.tolist(), rel=1e-6)


def clamp(direction: torch.Tensor = UNIT, layer: int = 2, where: Any = "prefill") -> tuple[Any, ...]:
    return "Clamp", "resid_post", layer, where, pytest.approx(direction.tolist(), rel=1e-5)


def captured(given: Lowered, tier: Tier | None = None) -> dict[tuple[str, int], list[str]]:
    """The captured positions of each point."""
    taken: dict[tuple[str, int], list[str]] = {}
    for item in given.plan_for(tier or given.tier).captures:
        for layer in item.at_layers:
            taken.setdefault((item.site, layer), []).append(item.positions)
    return taken


# The plain run.


class Numbers:
    """One request on plain numbers: what a `plain_run.Run` is to a body.

    Attributes:
        was: the numbers of each (site, layer, step).
        now: those that the forward goes on with, of the points that the body has been at.
    """

    def __init__(self, steps: int, length: int, layers: int, width: int) -> None:
        self.steps, self.length, self.layers, self.width = steps, length, layers, width
        self.step, self.passed, self.visit, self.stopped = 0, (-1, -1), None, False
        generator = torch.Generator().manual_seed(1)
        self.was = {
            (ACCESSORS[name], layer, step): torch.randn(length if step == 0 else 1, width, generator=generator)
            for step in range(steps)
            for layer in range(layers)
            for name in ORDER
        }
        self.last = [(torch.randn(1, VOCAB, generator=generator), torch.tensor([step])) for step in range(steps)]
        self.now: dict[tuple[str, int, int], torch.Tensor] = {}

    def leave(self) -> None:
        if self.visit is not None and self.visit.point[0] < self.layers:
            layer, place = self.visit.point
            self.now[ACCESSORS[ORDER[place]], layer, self.visit.step] = self.visit.value().clone()
        self.visit = None

    def visit_to(self, point: tuple[int, int]) -> Visit:
        if self.visit is not None and (self.visit.step, self.visit.point) == (self.step, point):
            return self.visit
        if self.step >= self.steps:
            raise NeverReachedError(f"{point} of step {self.step}")
        if point <= self.passed:
            raise OutOfOrderError(f"{point} after {self.passed}")
        self.leave()
        self.passed = point
        layer, place = point
        if layer == self.layers:
            self.visit = Visit(self.step, point, self.last[self.step][place].clone(), None)
            return self.visit
        value = self.was[ACCESSORS[ORDER[place]], layer, self.step]
        self.visit = Visit(self.step, point, value.clone(), value * 0.25 if ORDER[place] == "layers_output" else None)
        return self.visit

    def go_to_step(self, step: int) -> bool:
        if step < min(self.step, self.steps - 1):
            raise OutOfOrderError(f"step {step} in step {self.step}")
        if step != self.step:
            self.leave()
            self.passed = (-1, -1)
        self.step = step
        return step < self.steps


def _net(layers: int, width: int) -> Any:
    """Modules with the names of a transformers model's."""

    def part(*names: str) -> nn.Module:
        made = nn.Module()
        for name in names:
            made.add_module(name, nn.Module())
        return made

    inner = nn.Module()
    inner.layers = nn.ModuleList([part(*filter(None, (name for name, _ in PARTS.values()))) for _ in range(layers)])
    config = SimpleNamespace(num_hidden_layers=layers, hidden_size=width)
    return SimpleNamespace(model=inner, config=config)


def plain(fn: Callable, steps: int = 4, length: int = LENGTH, known: Model = MODEL) -> tuple[Numbers, Any, Any]:
    """The numbers, the returned value and the error of a body."""
    request = Numbers(steps, length, known.arch.num_layers, known.arch.hidden_size)
    takes_tracer = len([p for p in inspect.signature(fn).parameters.values() if p.default is p.empty]) == 2
    returned = error = None
    token = SAVE_ABOVE.set(
        lambda value: request.visit.save(value) if request.visit and torch.is_tensor(value) else value
    )
    try:
        with torch.no_grad():
            net = _net(request.layers, request.width)
            returned = copy.deepcopy(
                fn(PlainModel(request, net, True), *([PlainTracer(request)] if takes_tracer else []))
            )
    except Stopped:
        pass
    except Exception as raised:
        error = raised
    finally:
        SAVE_ABOVE.reset(token)
    request.leave()
    return request, returned, error


def edited(edits: Sequence[Any], point: tuple[str, int], step: int, request: Numbers) -> torch.Tensor:
    """What edits make of a site's value: first replaced rows, then what is added, what is projected out, and programs."""
    h_TH = request.was[*point, step]
    here = [edit for edit in edits if edit.site == point[0] and point[1] in edit.at_layers]
    h_TH = h_TH.clone()
    for edit in sorted(here, key=lambda each: _ORDER[type(each)]):
        phases = ("both", "prefill" if step == 0 else "decode")
        every = range(len(h_TH)) if edit.place is None and edit.phase in phases else ()
        if edit.place is None:
            rows = [*every]
        elif edit.phase == "decode":  # numbers of generated tokens; the first one is what the second step computes
            rows = [0] if step - 1 in edit.place else []
        else:
            rows = [*edit.place] if step == 0 else []
        for row in rows:
            further = [request.was[*at, step][row : row + 1] for at in edit.further]
            h_TH[row] = _edited_row(edit, h_TH[row], further)
    return h_TH


_ORDER = {Patch: 0, Steer: 1, Clamp: 2, Apply: 3}


def _edited_row(edit: Any, h_H: torch.Tensor, further: Sequence[torch.Tensor]) -> torch.Tensor:
    if isinstance(edit, Apply):
        return run(edit.program, h_H[None], *further)[0]
    if isinstance(edit, Clamp):
        assert edit.low == edit.high
        direction_H = torch.tensor(edit.direction.data)
        direction_H = direction_H / direction_H.norm()
        return h_H + edit.strength * (edit.low - h_H @ direction_H) * direction_H
    if isinstance(edit, Steer):
        return h_H + edit.scale * torch.tensor(edit.vector.data)
    return torch.zeros_like(h_H) if isinstance(edit.source, Zeros) else torch.tensor(edit.source.data)


def checked(fn: Callable, steps: int = 4, length: int = LENGTH, known: Model = MODEL) -> Lowered:
    """What is found in a body, compared with a plain run of it: its writes, the captured points, and what it gives."""
    given = found(fn, steps=steps, length=length, known=known)
    if given.tier is Tier.FORWARD:
        assert given.reason is not None and not given.edits
        return given
    request, returned, error = plain(fn, steps, length, known)
    check_numbers(given, request)
    for site, layer, step in request.now:
        assert (site, layer) in given.reads and (step == 0 or not given.reads[site, layer]), (site, layer, step)
    if given.tier is Tier.CLIENT:
        assert error is None
        computes = any(program is not None for program in given.saved_rows.programs.values())
        assert_equal(client_value(given, request), returned, 2e-5 if computes else 0)
    if given.tier is Tier.PLAN:
        assert error is None
        assert_equal(given.client_trace.outcome({}, steps).values.get(RETURNED), returned)
    return given


def planned(*bodies: Callable) -> list[Lowered]:
    """What is found in bodies of which a plan does all."""
    every = [checked(body) for body in bodies]
    for body, given in zip(bodies, every, strict=True):
        assert given.tier is Tier.PLAN, (body.__name__, given.tier, given.reason)
    return every


def in_forward(*bodies: Callable, why: str = "") -> None:
    """Assert that bodies run in the forward, and that the reason has the line and `why`."""
    for body in bodies:
        given = checked(body)
        assert given.tier is Tier.FORWARD, body.__name__
        assert given.notes[-1].kind == "forward"
        assert given.reason.startswith(f"line {given.notes[-1].line}: ") and why in given.reason, given.reason


def without_simple_edits(*bodies: Callable) -> None:
    """Assert that no Steer, Patch or Clamp is taken to do what bodies do."""
    for body in bodies:
        given = checked(body)
        assert all(isinstance(edit, Apply) for edit in given.edits), body.__name__
        assert given.edits or given.tier is Tier.FORWARD, body.__name__
        if given.tier is Tier.FORWARD:
            assert given.notes[-1].kind == "forward" and given.reason.startswith(f"line {given.notes[-1].line}: ")


def check_numbers(given: Lowered, request: Numbers) -> None:
    """Assert that the edits change the numbers of all points as the plain run did."""
    for (site, layer, step), was_TH in request.was.items():
        now_TH = request.now.get((site, layer, step), was_TH)
        mine_TH = edited(given.edits, (site, layer), step, request)
        torch.testing.assert_close(
            mine_TH, now_TH, atol=2e-5, rtol=1e-4, msg=lambda text, at=(site, layer, step): f"{at}: {text}"
        )


def client_value(given: Lowered, request: Numbers) -> Any:
    """What a body that only keeps rows gives in the caller's process, from the rows that its plan captures."""
    planes: dict[tuple[str, int], torch.Tensor] = {}
    for (site, layer), positions in captured(given, Tier.CLIENT).items():
        rows = []
        first, later = request.was[site, layer, 0], [request.was[site, layer, step] for step in range(1, request.steps)]
        for each in positions:
            rows += {
                "last_prompt": [first[-1:]],
                "all_prompt": [first],
                "all_generated": later,
                "all": [first, *later],
            }[each]
        program = given.saved_rows.programs[site, layer]
        found = torch.cat(rows)
        planes[site, layer] = found if program is None else run(program, found.flatten(1))
    outcome = given.client_trace.outcome(planes, request.steps)
    return outcome.values.get(RETURNED)


def assert_equal(mine: Any, theirs: Any, tolerance: float = 0) -> None:
    """Assert that two nested values are equal, numbers of tensors within a relative and absolute tolerance."""
    assert isinstance(mine, type(theirs)), (mine, theirs)
    if isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    elif isinstance(theirs, dict):
        assert mine.keys() == theirs.keys()
        for name in theirs:
            assert_equal(mine[name], theirs[name], tolerance)
    elif isinstance(theirs, (list, tuple)):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            assert_equal(one, other, tolerance)
    else:
        assert mine == theirs or (mine != mine and theirs != theirs)
