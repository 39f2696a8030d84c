"""The recordings of a call's code, cached for later calls of the same code with other prompts.

A body is recorded twice (`trace.record`), and the second time the codes of a call run in the opposite order. The codes of several requests
run on one copy of their variables, which they share. If the two recordings differ, the code depends on something that a recording misses: a
variable that it changes, or the prompt's length. Two recordings of different lengths reveal the latter, and serve all lengths in between.

A recording of many steps also serves requests with fewer steps: the code is run once more to see how it ends.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from midstream.trace.code import BlockProgram, TraceProgram
from midstream.trace.graph import same_steps
from midstream.trace.record import Model, Recording, fingerprint, record
from midstream.trace.shipping import ShippedCode, unship
from midstream.trace.stand_in import is_plain

T = TypeVar("T")
Place = tuple[int, int]  # a request, and which of its programs
_Jobs = dict[tuple[Place, int], int]  # a program and the prompt's length -> the most steps
_Recordings = dict[tuple[Place, int], Recording]
_SHORT = 5  # tokens of the short prompt in a recording for all lengths
_LONGER = 5  # how many tokens longer the second prompt of a check is: odd, and enough for every kind of special row
_FEW = 4  # the least steps of a recording
_MOST_RECORDED = 16  # sets of recordings of one code
_MOST_LOWERED = 512  # kinds of requests, by length and steps, whose plans are remembered
_MOST_AGAIN = 256  # recordings of requests with fewer steps


class Recorded:
    """The recordings of all programs of a call.

    Args:
        recordings: of each program and prompt length.
        steps: the number of steps of each recording.
        lengths: the shortest and the longest prompt that the recordings serve; None if each serves only its own length.

    Attributes:
        lowered: the findings of `lowering.tiers` about requests. Keys contain ids of recordings, which the values keep alive.
        differences: what `lowering.validation` has found about the tapes of requests.
    """

    def __init__(self, recordings: _Recordings, steps: _Jobs, lengths: tuple[int, int] | None) -> None:
        self._recordings, self._steps, self._lengths = recordings, steps, lengths
        self.differences: dict[Hashable, Any] = {}
        self._found: dict[Hashable, tuple[Any, Any]] = {}
        self.lowered: dict[Hashable, Any] = {}

    def keep(self, key: Hashable, lowered: Any) -> None:
        """Remember the findings about a kind of requests."""
        if len(self.lowered) >= _MOST_LOWERED:
            self._found.clear()
            self.lowered.clear()
        self.lowered[key] = lowered

    def serves(self, jobs: _Jobs) -> bool:
        """Whether it covers these programs. A recording that failed in a late step does not cover a request that ends before it."""
        for (place, length), steps in jobs.items():
            key = self._key(place, length)
            if self._lengths is not None and not self._lengths[0] <= length <= self._lengths[1]:
                return False
            if key not in self._recordings:
                return False
            recording = self._recordings[key]
            reached = len(recording.steps)
            # Code that does not wait for a later step does the same for any number of steps.
            if reached == self._steps[key] < steps or (recording.reason is not None and steps < reached):
                return False
        return True

    def length(self, length: int) -> int:
        """A length for which a program does the same as for the given one."""
        return length if self._lengths is None else self._lengths[0]

    def to_check(self, length: int) -> list[list[int]]:
        """Lists of prompt lengths with which to check a tape for prompts of one length. If a length in the first list has no tape, the
        second list is used. The prompts of a list have different special rows.
        """
        own = [length] if length == 1 else [length, length]
        return [own] if self._lengths is None else [[self._lengths[0], self._lengths[0] + _LONGER], own]

    def _key(self, place: Place, length: int) -> tuple[Place, int]:
        return place, self.length(length)

    def of(self, place: Place, length: int) -> Recording:
        return self._recordings[self._key(place, length)]

    def once(self, find: Callable[..., T], of: Any, *rest: Any) -> T:
        """`find(of, *rest)`, computed once for each object `of`."""
        key = find, id(of)
        if key not in self._found:
            self._found[key] = of, find(of, *rest)  # keeps the object alive, so that its id stays unique
        return self._found[key][1]  # type: ignore[no-any-return]


class Recorder:
    """Records the programs of a call.

    Args:
        places: for each request's programs, the place of the first equal one.
        held: the weights of the code, by digest.

    Attributes:
        changes_shared: whether the code of several requests, or several codes of one, may change a variable that they share.
    """

    def __init__(
        self, places: Sequence[Sequence[Place]], code: ShippedCode, model: Model, held: Mapping[str, torch.Tensor]
    ) -> None:
        self.places, self._code, self._model, self._held = places, code, model, held
        self._has_arrays = b"numpy" in code.programs
        self._are_several = sum(code.bodies) > 1
        self.changes_shared = False
        self._depends_on_length = False
        self._changing: dict[Place, str | None] = {}  # the programs that change this process, with the reason
        self._recorded: list[Recorded] = []  # the last one first
        self._again: OrderedDict[Hashable, Recording] = OrderedDict()

    def recorded(self, lengths: Sequence[int], steps: Sequence[int]) -> Recorded:
        """The recordings for requests with these prompts and at most so many steps."""
        jobs: _Jobs = {}
        for own, length, most in zip(self.places, lengths, steps, strict=True):
            for place in own:
                jobs[place, length] = max(most, jobs.get((place, length), 0))
        for known in self._recorded:
            if known.serves(jobs):
                return known
        more = {key: max(_FEW, 1 << (most - 1).bit_length()) for key, most in jobs.items()}  # later calls may have more
        found = self._record(more)
        if not found.serves(jobs):
            found = self._record(jobs)
        self._recorded = [found, *self._recorded[: _MOST_RECORDED - 1]]
        return found

    def _record(self, jobs: _Jobs) -> Recorded:
        if (for_all := self._refused(jobs) or self._for_lengths(jobs)) is not None:
            return for_all
        once, again = self._twice(jobs, jobs)
        for key, recording in once.items():
            self._expect(recording, again[key], key[0])
        return Recorded(once, jobs, None)

    def of(self, recorded: Recorded, place: Place, length: int, steps: int) -> Recording:
        """The recording for a request. With fewer steps than were recorded, the code may end differently."""
        recording = recorded.of(place, length)
        if recording.reason is None and steps < len(recording.steps):
            return self.again(place, recorded.length(length), steps)
        return recording

    def again(self, place: Place, length: int, steps: int) -> Recording:
        """Record a program with fewer steps than before."""
        key = place, length, steps
        if key in self._again:
            self._again.move_to_end(key)
        else:
            self._again[key] = self._run(self._copy(), place, length, steps)
            if len(self._again) > _MOST_AGAIN:
                self._again.popitem(last=False)
        return self._again[key]

    def writes_in_turn(self, lengths: Sequence[int], steps: Sequence[int]) -> bool:
        """Whether any code writes to the model, or may, if the codes of all requests run one after another on the same variables."""
        copy = self._copy()
        for request, (own, length, most) in enumerate(zip(copy, lengths, steps, strict=True)):
            for number in range(len(own)):
                made = self._run(copy, (request, number), length, most)
                if made.reason is not None or any(graph.writes for graph in made.steps):
                    return True
        return False

    def _refused(self, jobs: _Jobs) -> Recorded | None:
        """Recordings that say why the code cannot run here; None if it can."""
        reason = self._code.by_name
        try:
            if reason is None:
                self._copy()
        except Exception as error:  # the code of one of its variables fails here
            reason = f"its variables cannot be copied here: {type(error).__name__}: {error}"
        return Recorded({key: Recording([], reason) for key in jobs}, jobs, None) if reason is not None else None

    def _for_lengths(self, jobs: _Jobs) -> Recorded | None:
        """Record each program once for all lengths; None if the length of the prompts makes a difference."""
        lengths = [length for _, length in jobs]
        if not jobs or min(lengths) == 1 or self._depends_on_length:
            return None
        steps: dict[Place, int] = {}
        for (place, _), most in jobs.items():
            steps[place] = max(most, steps.get(place, 0))
        long = 2 * max(lengths) + 501
        for short in sorted({min(_SHORT, min(lengths)), min(lengths)}):
            first, second = ({(place, length): most for place, most in steps.items()} for length in (short, long))
            once, again = self._twice(first, second)
            pairs = [(once[place, short], again[place, long]) for place in steps]
            agree = all(_agree(one, other) for one, other in pairs)
            if agree and all(one.sizes == other.sizes for one, other in pairs):
                return Recorded(once, first, (short, long))
            copy = self._copy()
            for (place, _), one in once.items() if not agree else ():  # the process may differ, not the length
                self._expect(one, self._run(copy, place, short, steps[place]), place)
        self._depends_on_length = True
        return None

    def _twice(self, first: _Jobs, second: _Jobs) -> tuple[_Recordings, _Recordings]:
        """Record programs, and record them again in the opposite order. The codes of several requests share their variables."""
        copy = self._copy()
        once = {key: self._run(copy, *key, most) for key, most in first.items()}
        if self._are_several:
            fresh, used = fingerprint(self._copy()), fingerprint(copy)
            self.changes_shared = self.changes_shared or fresh is None or fresh != used
        copy = copy if len(self.places) > 1 else self._copy()
        return once, {key: self._run(copy, *key, most) for key, most in reversed(second.items())}

    def _expect(self, recording: Recording, again: Recording, place: Place) -> None:
        """Note that a program does something else each time it runs, unless two recordings of it agree."""
        if not _agree(recording, again):
            recording.reason = recording.reason or again.reason or "it does something else each time it runs"
            self._changing.setdefault(place, recording.reason)

    def _run(self, copy: list[list[TraceProgram]], place: Place, length: int, steps: int) -> Recording:
        program = copy[place[0]][place[1]]
        made = record(program, self._model, length, steps, self._has_arrays)
        if made.changes_process:
            self._changing.setdefault(place, made.reason)
        made.reason = made.reason or self._changing.get(place)
        return made

    def copy(self, resolve: Callable[[Any], Any]) -> list[list[TraceProgram]]:
        """A new copy of the programs of all requests. `resolve`: finds the model's own objects."""
        return unship(self._code.programs, resolve, None, self._held, apart=True)

    def _copy(self) -> list[list[TraceProgram]]:
        return self.copy(self._model.resolve)


def places_of(programs: Sequence[Sequence[TraceProgram]]) -> list[list[Place]]:
    """For each request's programs, the place of the first equal one."""
    first: dict[Hashable, Place] = {}
    return [
        [first.setdefault(_identity(program), (i, j)) for j, program in enumerate(own)]
        for i, own in enumerate(programs)
    ]


def _identity(program: TraceProgram) -> Hashable:
    """Equal for programs that do the same with the same objects."""
    if not isinstance(program, BlockProgram):
        return id(program)
    block = program.block
    values = tuple((name, id(value)) for name, value in block.captured.items())
    return id(block.compiled), values, tuple(program.injected), tuple(program.saved), tuple(block.borrows.items())


def _agree(one: Recording, other: Recording) -> bool:
    if one.reason is not None or other.reason is not None:
        return one.reason == other.reason
    values = [each.outcome.values for each in (one, other)]
    if all(map(is_plain, values)) and values[0] != values[1]:
        return False
    facts = [(each.needs_body, each.may_raise, each.watched) for each in (one, other)]
    return facts[0] == facts[1] and same_steps(one.steps, other.steps)
