"""Decides where the code of a trace runs, by recording it (`trace.record`). Callers use `lowering.taping`, which runs this
module in another process.

If a plan can make all writes of a trace, the forward need not stop: the plan makes the writes, and the code, if it does more, runs on
captured rows after the step. Otherwise, and in all uncertain cases, the code runs in the forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tag

from midstream.errors import PlanError
from midstream.lowering.client_traces import ClientTrace, Ending, SavedRows, SavedRowsFinder, Template
from midstream.lowering.linear import change_of
from midstream.lowering.recordings import Place, Recorded, Recorder, places_of
from midstream.lowering.row_programs import Made, NotRowwise, programs_of
from midstream.lowering.validation import UNCHECKED, Difference, difference, steps_to_check
from midstream.plan.ops.apply import Apply
from midstream.plan.ops.edit import Edit, RowChange, changed, kinds, point_of
from midstream.plan.program import Program
from midstream.plan.rowwise import FLOATING, PACKETS
from midstream.plan.steps import INPUT
from midstream.plan.values import Capture, Plan, counted_from_0
from midstream.runtime.request import Tier
from midstream.sites import Point
from midstream.trace.code import TraceProgram
from midstream.trace.graph import StepGraph, Value, Write, repeats
from midstream.trace.record import Model, Recording
from midstream.trace.shipping import ShippedCode
from midstream.trace.weights import on_device

_IN_GRAPHS = ("resid_post",)  # the sites that traces can use in a compiled forward: see `runtime.points.trace_keys`
_MOST_NAMED = 1 << 10  # generated tokens that a write may name, unless it changes all of them
_MOST_CONSTANTS = 1 << 20  # bytes of numbers in a program that each request carries
_MOST_PROGRAMS = 1 << 8  # of one write
_MOST_FORMS = 8  # different forms among the programs of one write: the engine runs the forms one after the other
# Operations that never raise, or only for indices. Neither PyTorch's tags nor the table of programs shows this.
_NEVER_RAISE = frozenset(
    "copy fill zero lift_fresh lift_fresh_copy _unsafe_view new_zeros new_ones new_full new_empty empty_like dot addmv addr baddbmm tril "
    "triu _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_attention_math".split()
)
_RAISE_BY_INDICES = frozenset("index_add index_copy index_fill index_reduce put take".split())
# The positions to capture: at a point that is read in the prompt's step alone, and at others.
_LAST = (("last_prompt",), ("last_prompt", "all_generated"))
_WHOLE = (("all_prompt",), ("all",))


@dataclass(frozen=True)
class Note:
    """The fate of one line: `"edit"`, `"read"` or `"forward"`, and why."""

    line: int
    kind: str
    text: str


@dataclass
class Lowered:
    """The findings about the code of one request.

    Attributes:
        tier: where it can run.
        edits: its writes as a plan's edits.
        reads: the points that it reads or writes, and whether it does so in the prompt's step alone.
        saved_rows: the rows from which its saved values can be made; None if they cannot be made from rows.
        notes: line by line.
        reason: why it has to run in the forward; None if it need not.
        keeps_to_graphs: whether its code is known to use only sites that traces can use in the compiled forward.
        first: its own program's outcome in a request with `steps` steps, if no code runs in the engine.
        steps: the most steps that its own program takes part in.
        template: makes the outcome in a request with fewer steps.
        recordings: the recordings of its programs, that of its own program last; only in the process that made them.
    """

    tier: Tier = Tier.FORWARD
    edits: tuple[Edit, ...] = ()
    reads: dict[Point, bool] = field(default_factory=dict)
    saved_rows: SavedRows | None = None
    notes: list[Note] = field(default_factory=list)
    reason: str | None = None
    keeps_to_graphs: bool = False
    first: Template | None = None
    steps: int = 0
    template: Callable[[int], Template] | None = field(default=None, repr=False)
    recordings: Sequence[Recording] = field(default=(), repr=False)
    _trace: ClientTrace | None = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "template": None, "recordings": (), "_trace": None}

    @property
    def reads_nothing(self) -> bool:
        """Whether it needs no values of the forward."""
        return self.tier is Tier.PLAN or (
            self.tier is Tier.CLIENT and self.saved_rows is not None and not self.saved_rows.programs
        )

    @property
    def client_trace(self) -> ClientTrace:
        """Makes the outcomes of requests, for `Tier.PLAN` and `Tier.CLIENT`."""
        if self._trace is None:
            assert self.first is not None and self.template is not None
            rows = self.saved_rows if self.tier is Tier.CLIENT else None
            self._trace = ClientTrace(self.first, self.steps, self.template, rows)
        return self._trace

    def ending(self, tier: Tier) -> Ending | None:
        """Makes the outcome of a request; None if the engine runs the code."""
        return self.client_trace.ending if tier in (Tier.PLAN, Tier.CLIENT) else None

    def plan_for(self, tier: Tier) -> Plan:
        """The edits, and captures of the rows that the code needs. If the code runs on these, its own writes change only copies."""
        if tier is Tier.FORWARD:
            return Plan()
        if tier is Tier.PLAN:
            return Plan(self.edits)
        if tier is Tier.CLIENT and self.saved_rows is not None:
            of_prompt, of_all = _LAST if self.saved_rows.last else _WHOLE
            return Plan((*self.edits, *self._captures(of_prompt, of_all, self.saved_rows.programs)))
        rows = dict.fromkeys(self.reads)
        return Plan((*self.edits, *self._captures(*_WHOLE, rows)))

    def _captures(
        self, of_prompt: Sequence[str], of_all: Sequence[str], programs: Mapping[Point, Program | None]
    ) -> Iterator[Capture]:
        """Captures of the points that it reads.

        Args:
            of_prompt: the positions for a point that it reads only in the prompt's step.
            of_all: those for other points.
            programs: point -> the program whose results are captured there; None for the rows themselves.
        """
        groups: dict[tuple[str, bool, Program | None], list[int]] = {}
        for (site, layer), program in sorted(programs.items(), key=itemgetter(0)):
            groups.setdefault((site, self.reads[site, layer], program), []).append(layer)
        for (site, in_prompt, program), layers in groups.items():
            for positions in of_prompt if in_prompt else of_all:
                yield Capture(site, layers=layers, positions=positions, program=program)


@dataclass
class Lowering:
    """How the requests of a call run.

    Attributes:
        tier: one for all requests, since they share variables.
        plans: one for each request; empty if the code runs in the forward.
        keeps_to_graphs: for each request, as in `Lowered`.
        each: the findings about each request; empty for the requests of a remote client.
    """

    tier: Tier
    plans: list[Plan]
    keeps_to_graphs: list[bool]
    each: list[Lowered] = field(default_factory=list)

    @classmethod
    def of(cls, tier: Tier, each: list[Lowered]) -> Lowering:
        keeps = [one.keeps_to_graphs for one in each]
        return cls(tier, [one.plan_for(tier) for one in each], keeps, each)

    @classmethod
    def of_call(cls, each: list[Lowered]) -> Lowering:
        """From the findings about each request. If one of them has to run in the forward, all do."""
        tiers = {one.tier for one in each}
        tier = tiers.pop() if len(tiers) == 1 else Tier.FORWARD if Tier.FORWARD in tiers else Tier.BEHIND
        return cls.of(tier, each)

    def in_the_engine(self) -> Lowering:
        """The same, but the engine runs code of `Tier.CLIENT`: for requests that need values before they end, or must share their steps."""
        return Lowering.of(Tier.BEHIND, self.each) if self.tier is Tier.CLIENT else self

    def stands_beside(self, plans: Sequence[Plan], num_layers: int) -> bool:
        """Whether each request may have its own plan and the given one: the given plan reads nothing, and edits only points that the trace
        neither reads nor writes.

        A trace acts after the edits of the other plan, and a joint plan would order them differently. Raises PlanError for a layer outside
        of the model.
        """
        for own, other in zip(self.plans, plans, strict=True):
            if other.readings or _points(own, num_layers) & _points(Plan(other.edits), num_layers):
                return False
        return True


def _points(plan: Plan, num_layers: int) -> set[Point]:
    items = counted_from_0(plan, num_layers).interventions
    own = {(item.site, layer) for item in items for layer in item.layers_in(num_layers)}
    return own.union(*(item.further for item in items))


# Recording.


class TapedCode:
    """Records a call's code, and finds out how requests with this code can run. The code runs in this process; `lowering.taping` uses
    another one.

    Args:
        places: for each request's programs, the place of the first equal one.
        standing: for each request's programs, whether they are standing edits.
        held: the weights of the code, by digest.
    """

    def __init__(
        self,
        places: Sequence[Sequence[Place]],
        standing: Sequence[Sequence[bool]],
        code: ShippedCode,
        model: Model,
        held: Mapping[str, torch.Tensor],
    ) -> None:
        self._model, self._recorder, self._standing = model, Recorder(places, code, model, held), standing

    @classmethod
    def of(cls, programs: Sequence[Sequence[TraceProgram]], code: ShippedCode, model: Model) -> TapedCode:
        """Make it from programs and from `code`, which contains the same programs in the form to send."""
        held = {digest: on_device(weight.data, None) for digest, weight in code.weights.items()}
        return cls(places_of(programs), standing_of(programs), code, model, held)

    def lowered(self, lengths: Sequence[int], steps: Sequence[int]) -> list[Lowered]:
        """The findings about requests with prompts of these lengths and at most so many steps."""
        recorded = self._recorder.recorded(lengths, steps)
        found = [self._request(recorded, i, length, steps[i]) for i, length in enumerate(lengths)]
        if self._recorder.changes_shared:
            return _side_by_side(found, self._recorder.writes_in_turn(lengths, steps))
        return found

    def _request(self, recorded: Recorded, request: int, length: int, steps: int) -> Lowered:
        places = self._recorder.places[request]
        recordings = [self._recorder.of(recorded, place, length, steps) for place in places]
        ends = [(id(each), min(steps, each.varied), steps > len(each.steps)) for each in recordings]
        key = tuple(places), length, tuple(ends)
        if key not in recorded.lowered:
            made = self._made(recorded, request, length, steps)
            if made.tier is not Tier.FORWARD:
                made = self._checked(made, recorded, request, length, steps)
            recorded.keep(key, made)
        return recorded.lowered[key]

    def _made(self, recorded: Recorded, request: int, length: int, steps: int) -> Lowered:
        places = self._recorder.places[request]
        recordings = [self._recorder.of(recorded, place, length, steps) for place in places]
        each = [
            _lowered(recorded, recording, self._model, length, steps, is_standing)
            for recording, is_standing in zip(recordings, self._standing[request], strict=True)
        ]
        made = each[0] if len(each) == 1 else _together(each)
        if places and made.tier in (Tier.PLAN, Tier.CLIENT):
            made.template = partial(self._template, recorded, places[-1], length, recordings[-1])
            made.steps = len(recordings[-1].steps)
            made.first = made.template(made.steps)
        return made

    def _checked(self, made: Lowered, recorded: Recorded, request: int, length: int, steps: int) -> Lowered:
        """The findings `made`; with the forward as tier if the tape does something else than the code on real numbers."""
        found: Difference | None = UNCHECKED
        count = steps_to_check(made, steps)
        for lengths in recorded.to_check(length):
            key = tuple(self._recorder.places[request]), tuple(lengths), count
            if key not in recorded.differences:
                recorded.differences[key] = difference(
                    lambda resolve: self._recorder.copy(resolve)[request],
                    self._model,
                    lambda each: made if each == length else self._made(recorded, request, each, steps),
                    lengths,
                    count,
                )
            found = recorded.differences[key]
            if found != UNCHECKED:
                break
        if found is None:
            return made
        notes = [note for note in made.notes if note.kind != "edit"] + [Note(found.line, "forward", found.text)]
        reason = f"line {found.line}: {found.text}"
        return replace(made, tier=Tier.FORWARD, edits=(), first=None, template=None, notes=notes, reason=reason)

    def _template(self, recorded: Recorded, place: Place, length: int, known: Recording, steps: int) -> Template:
        """The outcome of a program in requests with so many steps. `known`: its recording with at least as many steps."""
        recording = known
        if steps < len(known.steps):
            recording = self._recorder.again(place, recorded.length(length), steps)
        finder = recorded.once(SavedRowsFinder.found, known, self._model.dtype) if known.needs_body else None
        return Template.plain(recording) if finder is None else finder.template(recording, length)


def standing_of(programs: Sequence[Sequence[TraceProgram]]) -> list[list[bool]]:
    return [[program.is_standing for program in own] for own in programs]


def _side_by_side(found: Sequence[Lowered], writes: bool) -> list[Lowered]:
    """The findings for codes that change variables which they share. Separate recordings miss these changes, so the engine runs the codes:
    in the forward if any of them writes to the model.
    """
    reason = "it changes a variable that other requests of the call use, too"
    apart = []
    for one in found:
        if writes:
            notes = [note for note in one.notes if note.kind != "edit"] + [Note(0, "forward", reason)]
            apart.append(replace(one, tier=Tier.FORWARD, edits=(), reason=one.reason or reason, notes=notes))
        else:
            apart.append(one if one.tier is Tier.FORWARD else replace(one, tier=Tier.BEHIND))
    return apart


# From recordings to plans.


def _lowered(
    recorded: Recorded, recording: Recording, model: Model, length: int, steps: int, is_standing: bool
) -> Lowered:
    graphs = recording.steps[: min(steps, recording.varied)]  # later ones repeat the last of these
    goes_on = len(recording.steps) < steps and not recording.outcome.stopped  # the request continues without the code
    notes = _reads_noted(recording)
    made = Lowered(notes=notes, recordings=[recording])
    for step, graph in enumerate(recording.steps):
        for point in graph.reads:
            made.reads[point] = made.reads.get(point, True) and step == 0
    made.reads |= dict.fromkeys(recording.watched, False)
    made.keeps_to_graphs = _keeps_to_graphs([recording], made.reads)
    finder: SavedRowsFinder | None = None
    try:
        _refuse(recording, made.reads, model)
        made.edits = tuple(_edits(graphs, len(recording.steps), goes_on, length, notes, recorded, model))
        _refuse_errors(recording)
        if recording.needs_body and not is_standing:
            finder = recorded.once(SavedRowsFinder.found, recording, model.dtype)
        made.saved_rows = finder.rows if finder is not None else None
        made.tier = _tier_of(made, finder, recording, model, length)
    except _Stays as stays:
        notes.append(Note(stays.line, "forward", stays.reason))
        return replace(made, edits=(), reason=f"line {stays.line}: {stays.reason}")
    if made.tier is not Tier.BEHIND:
        saved_rows = made.saved_rows.programs if made.tier is Tier.CLIENT and made.saved_rows is not None else {}
        notes = [*_reads_noted(recording, saved_rows), *(note for note in notes if note.kind == "edit")]
    made.notes = sorted(notes, key=lambda note: note.line)
    return made


def _keeps_to_graphs(recordings: Sequence[Recording], reads: Mapping[Point, bool]) -> bool:
    known = all(recording.reason is None and not recording.watched for recording in recordings)
    return known and all(site in _IN_GRAPHS for site, _ in reads)


def _tier_of(made: Lowered, finder: SavedRowsFinder | None, recording: Recording, model: Model, length: int) -> Tier:
    """Where code runs whose writes are edits. Raises _Stays if it needs values that captures lack."""
    if not recording.needs_body:
        return Tier.PLAN
    if finder is not None and finder.fits(length) and _needs_no_code(made, finder.rows, model):
        return Tier.CLIENT
    values = (value for graph in recording.steps for value in graph.values)
    for value in values:
        if value.kind == "read" and value.part is not None:
            raise _Stays(value.line, "it reads one of a layer's two streams")
    return Tier.BEHIND


class _Stays(Exception):
    """The code has to run in the forward."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line, self.reason = line, reason


def _refuse(recording: Recording, reads: Mapping[Point, bool], model: Model) -> None:
    """Raise _Stays for code whose writes are unknown before its steps, or that reads where the engine captures nothing."""
    if recording.reason is not None:
        raise _Stays(recording.line, recording.reason)
    free = ", ".join(sorted(model.sites)) or "none"
    for graph in recording.steps:
        for point, line in (*graph.reads.items(), *recording.watched.items()):
            if point[0] not in model.sites:
                raise _Stays(line, f"{point[0]} is not among the engine's graph_sites: {free}")
    if recording.may_raise is not None:
        raise _Stays(recording.may_raise, "whether this raises an error depends on the values")


def _refuse_errors(recording: Recording) -> None:
    """Raise _Stays if the code has an operation that may raise an error that depends on numbers."""
    for graph in recording.steps:
        for value in graph.values:
            if value.kind == "call" and not _never_raises(value):
                name = value.target._schema.name.removeprefix("aten::")
                raise _Stays(value.line, f"whether {name} raises an error depends on the values")


def _never_raises(value: Value) -> bool:
    """Whether an operation raises no errors that depend on numbers of the forward. Its indices are checked when it is recorded."""
    inputs = list(value.inputs)
    unknown = {each.dtype.is_floating_point for each in inputs if each.kind != "const"}
    divisor = value.args[1] if len(value.args) > 1 else None
    divides_integers = not any(each.dtype.is_floating_point for each in inputs)
    may_divide_by_0 = divides_integers and isinstance(divisor, Value) and divisor.kind != "const"
    return _is_total(value.target, False not in unknown, may_divide_by_0)


@functools.cache
def _is_total(operation: Any, all_floats: bool, may_divide_by_0: bool) -> bool:
    """Whether an operation raises no errors that depend on numbers.

    Args:
        all_floats: whether all numbers of the forward that it takes are floating numbers.
        may_divide_by_0: whether it takes only integers, and its second argument is a value of the forward.
    """
    packet = operation._schema.name.removeprefix("aten::").removesuffix("_")
    if packet in FLOATING:
        return not may_divide_by_0
    is_known = packet in PACKETS or packet in _NEVER_RAISE or {Tag.pointwise, Tag.reduction} & set(operation.tags)
    is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in operation._schema.returns)
    return bool(is_known) or is_view or (all_floats and (Tag.core in operation.tags or packet in _RAISE_BY_INDICES))


def _reads_noted(recording: Recording, points: Container[Point] | None = None) -> list[Note]:
    """Notes about the points that it reads; about `points` alone if given."""
    lines: dict[tuple[int, str], list[int]] = {}
    for graph in recording.steps:
        for (site, layer), line in (*graph.reads.items(), *recording.watched.items()):
            if points is not None and (site, layer) not in points:
                continue
            layers = lines.setdefault((line, site), [])
            if layer not in layers:
                layers.append(layer)
    return [
        Note(
            line,
            "read",
            f"{site}[{layers[0]}] is captured" if len(layers) == 1 else f"{site} at {len(layers)} layers is captured",
        )
        for (line, site), layers in lines.items()
    ]


def _edits(
    steps: Sequence[StepGraph],
    count: int,
    goes_on: bool,
    length: int,
    notes: list[Note],
    recorded: Recorded,
    model: Model,
) -> Iterator[Edit]:
    """The writes as edits. Raises _Stays for a write that no edit can make.

    Args:
        count: how many steps there may be; the last of `steps` repeats up to that number.
        goes_on: whether further steps follow, which write nothing.
    """

    def edits(graph: StepGraph, tokens: int, phase: str) -> list[Edit]:
        return [edit for write in graph.writes for edit in _edits_of(write, tokens, phase, notes, recorded, model)]

    first = edits(steps[0], length, "prefill")
    later: list[list[Edit]] = []  # in each step after the prompt's
    for number, graph in enumerate(steps[1:], start=1):
        is_same = number > 1 and repeats(graph, steps[number - 1])
        later.append(later[-1] if is_same else edits(graph, 1, "decode"))
    later += later[-1:] * (count - 1 - len(later)) + [[]] * goes_on
    line = next((write.line for graph in steps[1:] for write in graph.writes), 0)
    for edit in _in_steps(later, line):
        if edit.is_of_generated:
            yield edit
            continue
        alike = next((other for other in first if other == changed(edit, phase="prefill")), None)
        if alike is not None:
            first.remove(alike)
            yield changed(edit, phase="both")
        else:
            yield edit
    yield from first


def _in_steps(later: Sequence[Sequence[Edit]], line: int) -> Iterator[Edit]:
    """Merge the edits of each step into edits of generated tokens. An edit that all steps have needs no positions. `line`: the line of the
    first write.
    """
    of_point: dict[Point, dict[tuple[Edit, ...], list[int]]] = {}
    for step, edits in enumerate(later):
        here: dict[Point, list[Edit]] = {}
        for edit in edits:
            here.setdefault(point_of(edit), []).append(edit)
        for point, own in here.items():
            of_point.setdefault(point, {}).setdefault(tuple(own), []).append(step)
    for alike in of_point.values():
        for edits_there, places in alike.items():
            if len(places) == len(later):
                yield from edits_there
            elif len(places) > _MOST_NAMED:
                raise _Stays(line, f"it makes one write in over {_MOST_NAMED} steps, and not in all")
            else:
                yield from (changed(edit, positions=tuple(places)) for edit in edits_there)


def _edits_of(write: Write, length: int, phase: str, notes: list[Note], recorded: Recorded, model: Model) -> list[Edit]:
    """The edits that make a write: of a kind other than `Apply` if one can, else programs. Raises _Stays if no edits can make it."""
    try:
        made = recorded.once(programs_of, write, model.are_together).at(length)
    except NotRowwise as error:
        raise _Stays(error.line or write.line, error.reason) from None
    edits = _linear(made, write, length, phase)
    if edits is None:
        edits = _programs(made, write, length, phase, model.holds_weights)
    note = Note(write.line, "edit", f"{write.point[0]}[{write.point[1]}] is edited by a plan")
    if edits and note not in notes:
        notes.append(note)
    return edits


def _linear(found: Sequence[tuple[list[int], Made]], write: Write, length: int, phase: str) -> list[Edit] | None:
    """Edits of kinds other than `Apply` that make the changes of these rows; None if a change needs a program."""
    edits: list[Edit] = []
    if len(write.was.shape) != 2:
        return None
    for rows, made in found:
        change = change_of(made.program)
        if change is None:
            return None
        if not change.is_nothing:
            said = _said(change, _places(rows, length, phase), write)
            if not said:
                return None
            edits += said
    return edits


def _programs(
    found: Sequence[tuple[list[int], Made]], write: Write, length: int, phase: str, holds_weights: bool
) -> list[Edit]:
    """Edits that apply the programs, each to its own rows. Raises _Stays if they are too many or too large."""
    if write.was.part is not None:
        raise _Stays(write.line, "it is about one of a layer's two streams")
    found = [(rows, made) for rows, made in found if made.program.result != INPUT]
    if len(found) > _MOST_PROGRAMS:
        raise _Stays(
            write.line,
            f"it does something else at each of {len(found)} groups of tokens; a plan: up to {_MOST_PROGRAMS}",
        )
    if len({made.program.form.key for _, made in found}) > _MOST_FORMS:
        raise _Stays(write.line, f"it does something else at each of more than {_MOST_FORMS} tokens")
    carried = (made.program.held[0] if holds_weights else made.program for _, made in found)
    constants = {constant for program in carried for constant in program.constants if constant.data is not None}
    if sum(constant.nbytes for constant in constants) > _MOST_CONSTANTS:
        raise _Stays(write.line, "its numbers are too many for a plan: each request would carry them")
    return [
        Apply(
            write.point[0],
            layers=write.point[1],
            program=made.program,
            inputs=made.inputs,
            **_places(rows, length, phase)[0],
        )
        for rows, made in found
    ]


def _places(rows: Sequence[int], length: int, phase: str) -> list[dict[str, Any]]:
    """Alternative fields that select these rows in an edit: the phase if these are all rows, and positions if they are a prompt's."""
    places: list[dict[str, Any]] = [{"phase": phase}] if len(rows) == length else []
    return places + ([{"positions": tuple(rows)}] if phase == "prefill" else [])


def _said(change: RowChange, places: Sequence[Mapping[str, Any]], write: Write) -> Sequence[Edit]:
    """The edits of the first registered kind that can make a change; empty if none can."""
    if write.was.part is not None and (change.scale != 1 or change.outers):
        return ()  # the site's value is the sum of two streams: only a constant changes both alike
    for where in places:
        for kind in kinds().values():
            try:
                if made := kind.saying(change, *write.point, where):
                    return made
            except PlanError as error:
                raise _Stays(write.line, str(error)) from error
    return ()


def _needs_no_code(found: Lowered, saved_rows: SavedRows, model: Model) -> bool:
    """Whether captures are better than running the code after the step.

    They are not better if the code reads only complete values of the prompt's step: it runs once, and the engine sends saved values faster.
    """
    programs = [program for program in saved_rows.programs.values() if program is not None]
    if not saved_rows.programs:
        return True
    carried = [program.held[0] if model.holds_weights else program for program in programs]  # by each request
    if any(program.nbytes > _MOST_CONSTANTS for program in carried):
        return False
    only_prompt = all(found.reads[point] for point in saved_rows.programs)
    return bool(programs) or saved_rows.last or not only_prompt


def _together(each: Sequence[Lowered]) -> Lowered:
    notes = [note for one in each for note in one.notes]
    recordings = [recording for one in each for recording in one.recordings]
    written = [
        point for one in each for point in {(edit.site, layer) for edit in one.edits for layer in edit.at_layers}
    ]
    reason = next((one.reason for one in each if one.tier is Tier.FORWARD), None)
    if reason is None and len(set(written)) < len(written):
        reason = "two of its bodies write to one site"
    if reason is None and any(point in written for one in each for edit in one.edits for point in edit.further):
        reason = "one of its bodies may use a value that another writes"
    if reason is not None:
        keeps = _keeps_to_graphs(recordings, {})
        return Lowered(notes=notes, reason=reason, keeps_to_graphs=keeps, recordings=recordings)
    reads: dict[Point, bool] = {}
    for one in each:
        for point, in_prompt in one.reads.items():
            reads[point] = reads.get(point, True) and in_prompt
    edits = tuple(edit for one in each for edit in one.edits)
    tier = Tier.PLAN if all(one.tier is Tier.PLAN for one in each) else Tier.BEHIND
    keeps = _keeps_to_graphs(recordings, reads)
    return Lowered(tier, edits, reads, None, notes, None, keeps, recordings=recordings)
