"""Runs the programs of a step's plans at a site, after the other edits: the rows of all requests whose programs have one form at once.

Legend: T rows of the batch, R those of them with a program, H the site's width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from midstream.plan.compile import CompiledPlan, Profile
from midstream.plan.ops.edit import Op, programs_of
from midstream.plan.program import Program
from midstream.plan.running import Together

Upload = Callable[[np.ndarray], torch.Tensor]


class Group(NamedTuple):
    """Rows with programs of one form.

    Attributes:
        rows: int64 `[R]`, on the device.
    """

    rows: torch.Tensor
    programs: Together


@dataclass(eq=False)
class StepPrograms:
    """The programs of a step.

    Attributes:
        at: index of a point -> its groups, in the order in which they run.
        behind: profile number of each row, for captures behind programs; None if there are none.
        knows_behind: whether `behind` is set.
    """

    at: dict[int, list[Group]]
    behind: torch.Tensor | None = None
    knows_behind: bool = False


def all_programs(compiled: CompiledPlan) -> set[Program]:
    """Those of a plan."""
    return {program for profile in compiled.profiles for ops in profile.ops.values() for program in programs_of(ops)}


def has_programs(profile: Profile) -> bool:
    return any(programs_of(ops) for ops in profile.ops.values())


def around(ops: Sequence[Op]) -> tuple[Sequence[Op], Sequence[Op]]:
    """The ops before the first program, and behind the last one; all of them, and none, if there is no program."""
    places = [i for i, op in enumerate(ops) if op.program is not None]
    return (ops[: places[0]], ops[places[-1] + 1 :]) if places else (ops, ())


def step_programs(
    profile_T: np.ndarray, profiles: Mapping[int, Profile], index: Mapping[Any, int], upload: Upload
) -> StepPrograms:
    """The programs of a batch.

    Args:
        profile_T: the number of each row's profile.
        profiles: those with programs.
        index: point -> its index.
        upload: copies rows to the device.
    """
    rows = {int(n): np.flatnonzero(profile_T == n) for n in np.unique(profile_T) if n in profiles}
    entries: dict[int, list[tuple[int, tuple[Program, ...]]]] = {}
    for number in rows:
        for point, ops in profiles[number].ops.items():
            if point in index and (programs := programs_of(ops)):
                entries.setdefault(index[point], []).append((number, programs))
    known: dict[tuple[int, ...], torch.Tensor] = {}  # rows of profiles: the points of a plan often have the same

    def rows_of(numbers: Sequence[int]) -> torch.Tensor:
        key = tuple(numbers)
        if key not in known:
            known[key] = upload(np.concatenate([rows[number] for number in numbers]))
        return known[key]

    lengths = {number: len(each) for number, each in rows.items()}
    return StepPrograms({point: list(_groups(here, lengths, rows_of, upload)) for point, here in entries.items()})


def _groups(
    entries: Sequence[tuple[int, tuple[Program, ...]]],
    lengths: Mapping[int, int],
    rows_of: Callable[[Sequence[int]], torch.Tensor],
    upload: Upload,
) -> Iterator[Group]:
    """The groups of a point: first those with the first program of each row, then those with its second one, and so on."""
    for turn in range(max(len(programs) for _, programs in entries)):
        forms: dict[str, list[tuple[int, Program]]] = {}
        for number, programs in entries:
            if turn < len(programs):
                forms.setdefault(programs[turn].form.key, []).append((number, programs[turn]))
        for members in forms.values():
            distinct = list(dict.fromkeys(program for _, program in members))
            rows = rows_of([number for number, _ in members])
            which = None
            if len(distinct) > 1:
                places = [distinct.index(program) for _, program in members]
                which = upload(np.repeat(places, [lengths[number] for number, _ in members]).astype(np.int64))
            yield Group(rows, Together(distinct, which, rows.device))


def run_groups(
    groups: Sequence[Group],
    first_TH: torch.Tensor,
    second_TH: torch.Tensor | None,
    note: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    """Replace the rows' values in place. Elements that come out as they were are bit-identical in both streams.

    Args:
        second_TH: the second stream, if the value is a sum of two.
        note: called with the rows and their new values.
    """
    for rows, programs in groups:
        one = first_TH[rows]
        two = second_TH[rows] if second_TH is not None else None
        old = one if two is None else (one + two).to(one.dtype)
        new = programs.run(old)
        changed = new != old
        first_TH[rows] = torch.where(changed, new, one)
        if second_TH is not None and two is not None:
            second_TH[rows] = two.masked_fill(changed, 0)
        note(rows, new)
