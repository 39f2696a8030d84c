"""The reads and writes that are found in a trace's code."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from midstream.client.known import Known, Model, Site, Stays, Unsized, is_fixed
from midstream.errors import PlanError
from midstream.plan.values import Edit
from midstream.sites import LAYER_SITES, Point


def _moment(point: Point) -> tuple[int, int]:
    """When the forward gets there."""
    return point[1], LAYER_SITES.index(point[0])


@dataclass(frozen=True)
class Note:
    """What becomes of one line: `"edit"`, `"read"` or `"forward"`, and why."""

    line: int
    kind: str
    text: str


class Record:
    """The reads and writes that were found."""

    def __init__(self, model: Model, prompt_length: int | None) -> None:
        self.model, self.facts, self.sites, self._length = model, model.facts, model.sites, prompt_length
        self.notes: list[Note] = []
        self.edits: list[tuple[Point, str, Edit]] = []
        self.reads: dict[Point, bool] = {}  # whether only in the prompt's step
        self.step: str | None = "prompt"  # in which steps the code runs: "prompt", "all", "decode"; None: not known
        self.is_dry = False  # nothing is noted
        self.is_certain = True  # the code runs once in each of its steps
        self.has_stopped = False
        self.needs_body = False  # it does more than to write what a plan writes
        self.captured: set[int] = set()  # ids of the caller's objects that can be changed
        self.changes_captured = False
        self.last_written = (-1, 0)
        self.writes: Counter[Point] = Counter()
        self.at: Point | None = None  # where the body is, if known: what it holds of this point may be changed in place
        self.latest = (-1, 0)
        self.is_lent = False  # whether the activation at `at` may be a tensor that the body has a name for
        self.rounds = 0
        self.knows_layers = True  # of all its reads

    @property
    def length(self) -> int:
        """Of the prompt, in tokens. Raises Unsized if it is not known."""
        if self._length is None:
            raise Unsized
        return self._length

    def note_captured(self, values: Iterable[Any]) -> None:
        """Note the caller's objects that can be changed, with those in them."""
        for value in values:
            if isinstance(value, Known):
                value = value.value
            if not is_fixed(value) and id(value) not in self.captured:
                self.captured.add(id(value))
                if isinstance(value, (list, tuple, set)):
                    self.note_captured(value)
                elif isinstance(value, dict):
                    self.note_captured(value.values())

    def note(self, node: ast.AST, kind: str, text: str) -> None:
        note = Note(getattr(node, "lineno", 0), kind, text)
        if not self.is_dry and note not in self.notes:
            self.notes.append(note)

    def now(self, point: Point) -> Site:
        """The site's value as it is now."""
        return Site(point, self.writes[point])

    def visit(self, *points: Point) -> None:
        """The body reads or writes these points. After several, or after one before the latest, it is not known where the body is."""
        only = points[0] if len(points) == 1 else None
        self.is_lent = self.is_lent and only == self.at
        self.at = only if only is not None and _moment(only) >= self.latest else None
        self.latest = max(self.latest, _moment(points[-1]))

    def leave(self) -> None:
        """The body is past all sites of this step."""
        self.at, self.latest, self.is_lent = None, (self.facts.num_layers, 0), False

    def begin_step(self) -> None:
        self.at, self.latest, self.is_lent = None, (-1, 0), False

    def read(self, node: ast.AST, site: str, layers: Sequence[int]) -> None:
        self._capture(node, site, layers, self.step == "prompt")
        self.visit(*((site, layer) for layer in layers))

    def watch(self, node: ast.AST, point: Point) -> None:
        """A cache gets the point's values, in all steps from here on."""
        self.needs_body = True
        self._capture(node, point[0], [point[1]], in_prompt=False)

    def _capture(self, node: ast.AST, site: str, layers: Sequence[int], in_prompt: bool) -> None:
        if site not in self.sites:
            raise Stays(
                node, f"{site} is not among the engine's graph_sites: {', '.join(sorted(self.sites)) or 'none'}"
            )
        if missing := [layer for layer in layers if (site, layer) not in self.facts.widths]:
            raise Stays(node, f"the model has no {site} at layer {missing[0]}")
        listed = f"{site}[{layers[0]}]" if len(layers) == 1 else f"{site} at {len(layers)} layers"
        self.note(node, "read", f"{listed} is captured")
        if not self.is_dry:
            for layer in layers:
                self.reads[site, layer] = self.reads.get((site, layer), True) and in_prompt

    def write(
        self, node: ast.AST, point: Point, kind: str, make: Callable[[dict[str, Any]], Sequence[Edit]], at: Any
    ) -> None:
        """Note edits. `make` gets the fields that say where they act; `at`: the indices of the step's rows, None for all."""
        if not self.is_certain or self.has_stopped or self.step is None:
            raise Stays(node, "it is not known before the step whether, or in which steps, this write is made")
        self.writes[point] += 1
        self.visit(point)
        if self.is_dry:
            return
        moment = _moment(point)
        if moment < self.last_written:  # it may be out of order: the body will say it
            self.needs_body = True
        self.last_written = moment
        others = {each for there, each, _ in self.edits if there == point}
        if others - {"add"} or (others and kind != "add"):
            raise Stays(
                node, f"{point[0]}[{point[1]}] has another write, and a plan makes its edits in an order of its own"
            )
        if at is not None:
            place: dict[str, Any] = {"positions": at}
            if self.step != "prompt":
                raise Stays(node, "a plan can name positions of the prompt alone")
        elif kind != "set":
            place = {"phase": {"prompt": "prefill", "all": "both", "decode": "decode"}[self.step]}
        elif self.step == "prompt":
            place = {"positions": tuple(range(self.length))}
        else:
            raise Stays(node, "a plan can replace rows of the prompt alone")
        try:
            made = make(place)
        except PlanError as error:
            raise Stays(node, str(error)) from error
        self.edits += [(point, kind, edit) for edit in made]
        self.note(node, "edit", f"{point[0]}[{point[1]}] is edited by a plan")

    def points(self) -> dict[Point, bool]:
        """The points that are read or written, and whether in the prompt's step alone."""
        found = dict(self.reads)
        for point, _, edit in self.edits:
            found[point] = found.get(point, True) and (edit.place is not None or edit.phase == "prefill")
        return found
