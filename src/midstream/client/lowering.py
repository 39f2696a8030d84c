"""What a trace does with the model, found before it runs.

A trace that writes nothing but what a plan can make need not stop the forward: the plan makes the edits, and the body runs when the step is
over, on captured rows. `lower` finds the edits and the sites that are read. In doubt it says no, and the body runs in the forward.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import FunctionType
from typing import Any, NamedTuple

from midstream.client.findings import Note, Record
from midstream.client.following import Reader, source_of
from midstream.client.keeping import Rows, rows_kept
from midstream.client.known import (
    MODEL,
    SHARED,
    TRACER,
    Model,
    Stays,
    Unsized,
    abstract,
)
from midstream.plan.values import Capture, Edit, Plan, counted_from_0
from midstream.sites import Point
from midstream.trace.program import BlockProgram, FunctionProgram, Program
from midstream.trace.tracer import BodyTracer

_LONG_PROMPT = 512
# The positions to capture for what is kept: of a point that is read in the prompt's step alone, and of others.
_KEPT: dict[Rows, tuple[Sequence[str], Sequence[str]]] = {
    "last": (("last_prompt",), ("last_prompt", "all_generated")),
    "whole": (("all_prompt",), ("all",)),
}


class Kept(NamedTuple):
    """Which rows of each step a trace keeps, and the plan that captures them."""

    rows: Rows
    plan: Plan


@dataclass
class Lowered:
    """What a program does.

    Attributes:
        edits: its writes, as a plan makes them.
        reads: the points that it reads or writes, and whether in the prompt's step alone.
        notes: line by line.
        reason: why it has to run in the forward; None if it need not.
        needs_body: whether it does more than the edits.
        changes_captured: whether it may change one of the caller's objects, which another body may use.
        kept: what it keeps, if it only keeps rows; else None.
    """

    edits: tuple[Edit, ...] = ()
    reads: dict[Point, bool] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    reason: str | None = None
    needs_body: bool = True
    changes_captured: bool = False
    kept: Kept | None = None

    @property
    def written(self) -> set[Point]:
        return {(edit.site, layer) for edit in self.edits for layer in edit.at_layers}

    @cached_property
    def plan(self) -> Plan:
        """The edits, and captures of the rows that the body needs: its own writes go to its copies of them."""
        if not self.needs_body:
            return Plan(self.edits)
        return Plan((*self.edits, *self._captures(("all_prompt",), ("all",))))

    def _captures(self, of_prompt: Sequence[str], of_all: Sequence[str]) -> Iterator[Capture]:
        """Captures of what it reads. `of_prompt`: the positions for a point that it reads only in the prompt's step."""
        groups: dict[tuple[str, bool], list[int]] = {}
        for (site, layer), in_prompt in sorted(self.reads.items()):
            groups.setdefault((site, in_prompt), []).append(layer)
        for (site, in_prompt), layers in groups.items():
            yield from (Capture(site, layers=layers, positions=each) for each in (of_prompt if in_prompt else of_all))


class Behind(NamedTuple):
    """Traces that do not stop the forward: the plan of each, and whether the engine has to run their bodies behind the step, too.

    Attributes:
        kept: what each keeps, if all of them only keep rows. Their code may then run after the requests have ended.
    """

    plans: Sequence[Plan]
    needs_bodies: bool
    kept: Sequence[Kept] | None = None

    def stands_beside(self, plans: Iterable[Plan], num_layers: int) -> bool:
        """Whether a request may have both plans: the other one captures nothing, and edits no point that the trace reads or writes.

        A trace acts after the edits of a plan beside it, and one plan would make them in an order of its own. Raises PlanError for a
        layer outside of the model.
        """
        for own, other in zip(self.plans, plans, strict=True):
            if other.captures or _points(own, num_layers) & _points(Plan(other.edits), num_layers):
                return False
        return True


def _points(plan: Plan, num_layers: int) -> set[Point]:
    items = counted_from_0(plan, num_layers).interventions
    return {(item.site, layer) for item in items for layer in item.layers_in(num_layers)}


def explained(program: Program, model: Model, may_keep: bool) -> str:
    """What becomes of a program, line by line, as text. Prompts are taken to have enough tokens for the positions that it names.

    `may_keep`: whether its code may run in this process if it only keeps rows.
    """
    found = lower(program, model, _LONG_PROMPT)
    lines = [f"{f'line {note.line}':>10}  {note.kind:<8} {note.text}" for note in found.notes]
    if found.reason is not None:
        end = "The trace runs in the forward: its steps are slower, for all requests in them."
    elif found.kept is not None and may_keep:
        end = "The trace only keeps rows. A plan captures them, and the trace's code runs in this process after the request has ended."
    elif found.needs_body:
        end = "The trace runs behind the step: a plan makes its writes, and its code gets captured rows. The forward is not stopped."
    else:
        end = "A plan does all of it: no code runs in the engine."
    return "\n".join([*lines, end])


def lower(program: Program, model: Model, prompt_length: int | None) -> Lowered:
    """Read a program. `prompt_length`: in tokens; if it is None, Unsized is raised for a program whose edits depend on it."""
    record = Record(model, prompt_length)
    try:
        statements, names = _code_of(getattr(program, "program", program))
        record.note_captured(names.values())
        given = dict(names)
        reader = Reader(record, names)
        if program.is_standing and not any(map(reader.goes_through_steps, statements)):
            record.step = "all"
        reader.run(statements)
        lowered = Lowered(
            tuple(edit for _, _, edit in record.edits),
            record.points(),
            record.notes,
            None,
            record.needs_body,
            record.changes_captured,
        )
        rows = rows_kept(statements, given) if record.knows_layers and not program.is_standing else None
        if rows is not None and _is_worth_keeping(lowered, rows):
            lowered.kept = Kept(rows, Plan(tuple(lowered._captures(*_KEPT[rows]))))
        return lowered
    except Stays as stays:
        record.notes.append(Note(stays.line, "forward", stays.reason))
        return Lowered(notes=record.notes, reason=f"line {stays.line}: {stays.reason}")


def _is_worth_keeping(found: Lowered, rows: Rows) -> bool:
    """Whether code that only keeps rows may run after its request, and is better run there.

    Code that reads whole values in the prompt's step alone runs once, and the engine sends what it saves faster.
    """
    sites, only_prompt = {site for site, _ in found.reads}, all(found.reads.values())
    if found.edits or not found.needs_body or (rows == "whole" and only_prompt):
        return False
    return len(sites) == 1 and "attn_z" not in sites  # its rows have an axis of heads


def lower_all(programs: Sequence[Program], model: Model, prompt_length: int | None) -> Lowered:
    """What the programs of one request do together. Arguments are as of `lower`."""
    each = [lower(program, model, prompt_length) for program in programs]
    if len(each) == 1:
        return each[0]
    notes = [note for one in each for note in one.notes]
    if reason := next((one.reason for one in each if one.reason is not None), None):
        return Lowered(notes=notes, reason=reason)
    written = [point for one in each for point in one.written]
    if len(set(written)) < len(written):
        return Lowered(notes=notes, reason="two of its bodies write to one site")
    reads: dict[Point, bool] = {}
    for one in each:
        for point, in_prompt in one.reads.items():
            reads[point] = reads.get(point, True) and in_prompt
    edits = tuple(edit for one in each for edit in one.edits)
    needs_body, changes = any(one.needs_body for one in each), any(one.changes_captured for one in each)
    return Lowered(edits, reads, notes, _clash(each), needs_body, changes)


def _clash(each: Sequence[Lowered]) -> str | None:
    """Why bodies with the same captured objects have to run in the forward; None if they need not."""
    if len(each) > 1 and any(one.changes_captured for one in each) and any(one.edits for one in each):
        return "a body changes an object that another one may use in its writes"
    return None


def lower_trace(programs: Sequence[Sequence[Program]], model: Model, lengths: Sequence[int | None]) -> Behind | None:
    """What the requests of a trace do; None if any of them has to run in the forward.

    Args:
        programs: of each request.
        lengths: of the requests' prompts, in tokens; None as for `lower`.
    """
    known: dict[Any, Lowered | None] = {}

    def lowered(own: Sequence[Program], length: int | None) -> Lowered:
        for each in (None, length):  # most programs do not depend on the length, and so are read once
            key = (each, *map(id, own))
            if key not in known:
                try:
                    known[key] = lower_all(own, model, each)
                except Unsized:
                    if length is None:
                        raise
                    known[key] = None
            if (there := known[key]) is not None:
                return there
        raise AssertionError

    found = []
    for own, length in zip(programs, lengths, strict=True):
        found.append(lowered(own, length))
        if found[-1].reason is not None:
            return None
    if _clash(found):
        return None
    kept = [each.kept for each in found if each.kept is not None]
    needs_bodies = any(each.needs_body for each in found)
    return Behind([each.plan for each in found], needs_bodies, kept if len(kept) == len(found) else None)


def _code_of(program: Program) -> tuple[Sequence[ast.stmt], dict[str, Any]]:
    """The statements, and what is known of their names. Raises Stays without source."""
    if isinstance(program, BlockProgram):
        names: dict[str, Any] = {name: abstract(value) for name, value in program.block.captured.items()}
        names |= {
            name: TRACER if isinstance(value, BodyTracer) else abstract(value)
            for name, value in program.injected.items()
        }
        if not program.block.compiled.statements:
            raise Stays(None, "the block has no source here")
        return program.block.compiled.statements, names | dict.fromkeys(program.block.borrows, SHARED)
    if isinstance(program, FunctionProgram) and isinstance(program.fn, FunctionType):
        function, names = source_of(program.fn, None)
        arguments, defaults = [each.arg for each in function.args.args], program.fn.__defaults__ or ()
        required = len(arguments) - len(defaults)
        names |= dict(zip(arguments[:required], (MODEL, TRACER), strict=False))
        names |= dict(zip(arguments[required:], map(abstract, defaults), strict=True))
        return function.body, names
    raise Stays(None, "the function has no source that can be read")
