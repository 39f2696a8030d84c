"""The data that the site kernel reads: each row's profile, the address for its captured row, and the ops of every profile.

The buffers that a recorded CUDA graph uses have fixed addresses: the profile and the capture address of each row, and one word with the
table's address. The kernel finds the table and the ops through that word, so they may grow and move. So a batch may have any number of
plans, vectors, sites and positions. The stream of the forward orders the uploads; the CPU never waits for them.

`DeviceTables` keeps the data on a GPU. `TorchTables` in `torch_tables` applies the ops in plain PyTorch instead.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from midstream.errors import PlanError
from midstream.plan.compile import CompiledPlan, Profile
from midstream.plan.ops.edit import GROUP, READINGS, Op, kernel_codes
from midstream.plan.running import tensor_of, try_out
from midstream.runtime.programs import (
    MOST_PROFILES,
    GraphValues,
    HeldPrograms,
    InGraph,
    ProgramAt,
    ProgramGroup,
    RecordedPrograms,
    StepPrograms,
    all_programs,
    around,
    run_apart,
    run_groups,
    value_of,
)
from midstream.sites import Point

_FIRST_PROFILES = 64
# As in `kernel`, which is imported only where Triton is installed.
OP_WORDS, ENTRY_WORDS = 6, 8
_NO_PROGRAMS = StepPrograms({}, {})


@dataclass
class ProfileSlots:
    """A compiled plan that the tables hold.

    Attributes:
        ids: the numbers of its profiles in the tables; 0 for the empty one.
        profile_bytes: how many bytes each of these takes in the tables.
        kept: the device memory that its ops point to.
        behind: profile -> the number of a profile that captures the rows after programs have edited them.
    """

    compiled: CompiledPlan
    ids: np.ndarray
    profile_bytes: int
    kept: list[torch.Tensor] = field(default_factory=list)
    behind: dict[int, int] = field(default_factory=dict)


@dataclass(eq=False)
class RowProfiles:
    """The profile of each row of a batch.

    Attributes:
        profile_T: int32 `[T]`, padding included; it never changes.
        again: whether the batch may come again.
        prepared: what the tables keep for the next step with this batch.
        programs: as `HeldPrograms.of_step` returns them; None if not known yet.
    """

    profile_T: np.ndarray
    again: bool = False
    prepared: Any = None
    programs: StepPrograms | None = None


class Tables:
    """Profiles by number, and the rows of the step.

    Args:
        points: every (site, layer) at which plans may act, in the order of the op's `point` argument.

    Attributes:
        first_rows: the first row of each request of the step, in the batch's order. If it is known, an exception in a program ends only the
            requests whose own rows raise it. If it is None, the exception leaves the forward.
        failures: number of a request in the batch -> why its programs failed in this step. A failed edit makes the request's rows NaN.
    """

    def __init__(self, points: Sequence[Point], device: torch.device) -> None:
        self.first_rows: np.ndarray | None = None
        self.failures: dict[int, str] = {}
        self._device = device
        self.points = list(points)
        self.index = {point: i for i, point in enumerate(self.points)}
        self.profiles: dict[int, Profile] = {}
        self.growths = 0
        self._free: list[int] = list(range(_FIRST_PROFILES - 1, 0, -1))
        self._size = _FIRST_PROFILES
        self._rows: RowProfiles | None = None  # of the last step

    def load(self, compiled: CompiledPlan) -> ProfileSlots:
        """Hold `compiled` until `unload`. Raises PlanError for a program that does not run on the device."""
        constants = self._try_out(compiled)
        taken = iter(self._take(sum(bool(profile.ops) for profile in compiled.profiles)))
        numbers = [next(taken) if profile.ops else 0 for profile in compiled.profiles]
        slots = ProfileSlots(compiled, np.array(numbers, np.int32), len(self.points) * ENTRY_WORDS * 8)
        slots.kept += constants
        self.profiles.update({n: profile for n, profile in zip(numbers, compiled.profiles, strict=True) if n})
        self._rows = None  # the last step's numbers may stand for other profiles now
        try:
            self._place(slots)
        except Exception as error:
            self.unload(slots)
            if isinstance(error, PlanError):
                raise
            raise PlanError(f"The engine cannot hold the plan: {described(error)}") from error
        return slots

    def _take(self, count: int) -> list[int]:
        """Take free numbers for `count` profiles."""
        while len(self._free) < count:
            self._free += range(2 * self._size - 1, self._size - 1, -1)
            self._size *= 2
            self._grow()
        return [self._free.pop() for _ in range(count)]

    def unload(self, slots: ProfileSlots) -> None:
        """Forget a plan that no request has any more."""
        for number in slots.ids[slots.ids > 0].tolist():
            del self.profiles[number]
            self._free.append(number)
        slots.kept.clear()

    def _try_out(self, compiled: CompiledPlan) -> list[torch.Tensor]:
        """The constants of a plan's programs on the device, each of which has run there once."""
        programs = all_programs(compiled)
        try:
            constants = [tensor_of(constant, self._device) for program in programs for constant in program.constants]
            for program in programs:
                try_out(program, self._device)
        except torch.OutOfMemoryError as error:
            raise PlanError("The device has no memory left for the numbers of the plan's programs.") from error
        return constants

    def _apart(
        self,
        point: int,
        run: Callable[[torch.Tensor | None], torch.Tensor],
        failed_RW: Callable[[int], torch.Tensor],
        rows: Callable[[], np.ndarray],
    ) -> torch.Tensor:
        """`run_apart` for programs at a point. `rows`: returns the numbers of their rows in the batch."""
        first_rows = self.first_rows
        if first_rows is None:
            return run(None)

        def note(request: int, error: Exception) -> None:
            site, layer = self.points[point]
            why = f"A program of the plan failed at {site} of layer {layer}: {described(error)} Change the program, or leave it out."
            self.failures.setdefault(request, why)

        return run_apart(run, failed_RW, lambda: np.searchsorted(first_rows, rows(), "right") - 1, note)

    def begin_step(self, rows: RowProfiles, places: np.ndarray | None, score_places: np.ndarray | None = None) -> None:
        """Set the coming forward's rows.

        Args:
            places: int64 `[T]`, the address to write each row's captured row to; 0 for a row that is not kept. None if no row is.
            score_places: the same for rows of scores.
        """
        before, self._rows = self._rows, rows
        if rows is not before and (before is None or not np.array_equal(rows.profile_T, before.profile_T)):
            self._set_rows(rows)

    def _set_rows(self, rows: RowProfiles) -> None:
        """Take the rows of a step, which differ from those of the last step."""
        raise NotImplementedError

    def edit(self, point: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Apply the rows' ops at `point` in place; `hidden` and `residual` are contiguous: `[T, H]` or `[B, S, H]`, T = B S."""
        raise NotImplementedError

    def edited(
        self, point: int, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Both streams as `edit` would change them, in new tensors; the given tensors if nothing acts."""
        raise NotImplementedError

    def recordable(self, programs: Collection[ProgramAt]) -> Iterable[InGraph]:
        """The entries for these programs in the keys of CUDA graphs; none if there are no graphs."""
        return ()

    def take_overflow(self, hidden_TH: torch.Tensor) -> tuple[torch.Tensor, Callable[[], object]]:
        """Which rows of the step are not finite.

        Args:
            hidden_TH: `[T, H]`, the rows at the end of the forward.

        Returns:
            int32 `[T]` on the host: 0 for a finite row, `1 + i` for a row that `points[i]` made infinite or NaN, -1 for a row that became
            infinite or NaN elsewhere; and a function that waits for these codes.
        """
        raise NotImplementedError

    def warm_up(self, hidden_size: int, dual: bool, dtype: torch.dtype) -> None:
        """Compile in advance what would compile at its first use, for rows of this size, in two streams if `dual`."""

    def _grow(self) -> None:
        self.growths += 1

    def _place(self, slots: ProfileSlots) -> None:
        raise NotImplementedError


def described(error: Exception) -> str:
    """An exception's type and first line, as a sentence."""
    said = next(iter(str(error).splitlines()), "")[:200].rstrip(".")
    return f"{type(error).__name__}{': ' if said else ''}{said}."


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """`[T, H]` of a tensor that may have a leading batch axis, as a view."""
    return tensor if tensor.ndim == 2 else tensor.view(-1, tensor.shape[-1])


def streams(hidden: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Both streams, as `flat` returns them."""
    return flat(hidden), flat(residual) if residual is not None else None


def value_at(first: torch.Tensor, second: torch.Tensor | None, rows: torch.Tensor | slice) -> torch.Tensor:
    """The value of some rows: one stream, or the sum of two, in the dtype of the first."""
    return value_of(first[rows], second[rows] if second is not None else None)


def not_finite_at(point: Point, value_RH: torch.Tensor) -> torch.Tensor:
    """`[R]`, whether a row has an infinity or a NaN. At `router`, minus infinity takes an expert away: a row needs one finite logit."""
    logits_RH = value_RH.amax(-1, keepdim=True) if point[0] == "router" else value_RH
    return ~torch.isfinite(logits_RH).all(-1)


class Staging:
    """Pinned memory for copies to the device. Its two halves are used in turns, because pinning new memory costs a millisecond a copy.

    Args:
        size: bytes of each half. A half is written again when the copies from it are done.
    """

    def __init__(self, size: int = 1 << 20) -> None:
        self._size = size
        self._halves: list[tuple[torch.Tensor, np.ndarray, torch.cuda.Event]] = []
        self._used = 0

    def place(self, values: np.ndarray) -> torch.Tensor:
        """Put `values` into pinned memory, flat. The caller queues their copy on the current stream before the next call."""
        given = torch.from_numpy(values).view(-1)
        if values.nbytes > self._size:
            return given.pin_memory()  # PyTorch hands it out again only when the copy from it is done
        if not self._halves:
            made = (torch.empty(self._size, dtype=torch.uint8, pin_memory=True) for _ in "12")
            self._halves = [(half, half.numpy(), torch.cuda.Event()) for half in made]
        at = -(-self._used // 16) * 16
        if at + values.nbytes > self._size:
            self._halves[0][2].record()
            self._halves.reverse()
            self._halves[0][2].synchronize()
            at = 0
        self._used = at + values.nbytes
        half, bits, _ = self._halves[0]
        bits[at : self._used] = values.reshape(-1).view(np.uint8)
        return half[at : self._used].view(given.dtype)


class DeviceTables(Tables):
    """The tables for the Triton kernel.

    The kernel reads profiles, address, table and each row's first vector without waiting for the kernel before it. So only copies on the
    forward's stream may write them: no kernel starts before such a copy has ended.

    Args:
        rows: the most rows that a batch has.
        early_launch: see `early` of `kernel.edit_rows`.
    """

    def __init__(self, points: Sequence[Point], rows: int, device: torch.device, *, early_launch: bool = True) -> None:
        super().__init__(points, device)
        self._early_launch = early_launch
        self._profile_T = torch.zeros(rows, dtype=torch.int32, device=device)
        self._number_T = torch.zeros_like(self._profile_T)  # the same numbers, capped at MOST_PROFILES, for programs
        # The addresses of each row's captured row, and of its row of scores.
        self._addresses = {kind: torch.zeros(rows, dtype=torch.int64, device=device) for kind in READINGS}
        self._overflow_T = torch.zeros(rows, dtype=torch.int32, device=device)
        self._addressed = dict.fromkeys(READINGS, 0)  # rows that may have an address
        self._host = np.zeros((self._size, len(self.points), ENTRY_WORDS), np.int64)
        self._table = torch.zeros(self._host.shape, dtype=torch.int64, device=device)
        self._address = torch.tensor([self._table.data_ptr()], dtype=torch.int64, device=device)
        self._stale = range(0)  # profiles whose entries on the device are old
        # Maps a profile to the one whose captures run after programs; 0: none.
        self._behind_host = np.zeros(MOST_PROFILES + 1, np.int32)
        self._behind = torch.zeros(MOST_PROFILES + 1, dtype=torch.int32, device=device)
        self._behind_is_stale = False
        self._acting: set[int] | None = None  # the points at which a row of the step has ops; None if not known yet
        self._staging = Staging()
        self.programs = HeldPrograms(device, self._upload_rows)

    def load(self, compiled: CompiledPlan) -> ProfileSlots:
        each = (ops for profile in compiled.profiles for ops in profile.ops.values())
        kinds = {op.kind for ops in each for op in ops if op.program is None}
        if unknown := kinds - kernel_codes().keys():
            raise PlanError(
                f"The engine's kernel has no {min(unknown)!r}: give its class a `kernel`, and an entry point in the group {GROUP!r}, so "
                "that it is there when the engine starts."
            )
        return super().load(compiled)

    @torch.inference_mode()
    def _upload(self, values: np.ndarray, to: torch.Tensor) -> None:
        if not to.is_cuda:
            to.copy_(torch.from_numpy(values))
            return
        to.view(-1).copy_(self._staging.place(values), non_blocking=True)

    def _grow(self) -> None:
        super()._grow()
        grown = np.zeros((self._size, len(self.points), ENTRY_WORDS), np.int64)
        grown[: len(self._host)] = self._host
        self._host = grown
        self._table = torch.zeros(grown.shape, dtype=torch.int64, device=self._device)  # profile 0, at least, is read
        self._upload(np.array([self._table.data_ptr()], np.int64), self._address)
        self._stale = range(self._size)

    def _place(self, slots: ProfileSlots) -> None:
        compiled = slots.compiled
        mine = dict(zip(slots.ids.tolist(), compiled.profiles, strict=True))
        mine.pop(0, None)
        if all_programs(compiled) and max(mine) >= MOST_PROFILES:
            raise PlanError(
                f"The engine holds {MOST_PROFILES} kinds of rows of plans at once, and no programs beside more of them. "
                "Send fewer requests with plans of their own at a time."
            )
        behind = [n for n, profile in mine.items() if any(around(ops)[1] for ops in profile.ops.values())]
        slots.behind = dict(zip(behind, self._take(len(behind)), strict=True))
        for number, profile in mine.items():
            self.programs.hold(number, profile)
        self._set_behind(slots.behind)
        bank = self._bank(compiled.bank, slots.kept)
        words: list[bytes] = []
        entries: list[tuple[int, int, int, int]] = []  # (profile, point, first op, ops)
        for number, profile in zip(slots.ids.tolist(), compiled.profiles, strict=True):
            for point, ops in profile.ops.items() if number else ():
                before, after = around(ops)
                for place, part in ((number, before), (slots.behind.get(number, 0), after)):
                    if point in self.index and part:
                        entries.append((place, self.index[point], len(words), len(part)))
                        words += [self._words(op, bank) for op in part]
        # Needed even without words: on the device, these numbers may still have another plan's entries.
        self._stale = _span([*_numbers(slots), *self._stale[:1], *self._stale[-1:]])
        if not words:
            return
        ops_OW = np.frombuffer(b"".join(words), np.int64).reshape(-1, OP_WORDS)
        profiles, points, first, counts = np.array(entries, np.int64).T
        self._host[profiles, points, 0] = counts
        self._host[profiles, points, 2:] = ops_OW[first]
        if len(words) > len(entries):  # an entry holds the first of its ops
            there = torch.empty(ops_OW.size, dtype=torch.int64, device=self._device)
            self._upload(ops_OW.reshape(-1).copy(), there)
            slots.kept.append(there)
            self._host[profiles, points, 1] = there.data_ptr() + first * OP_WORDS * 8

    def _words(self, op: Op, bank: Sequence[int]) -> bytes:
        vector = bank[op.vector] if op.vector >= 0 else 0
        mask = bank[op.mask] if op.mask >= 0 else 0
        return struct.pack("<qqqqffff", vector, mask, kernel_codes()[op.kind], op.offset, op.a, op.b, op.c, 0.0)

    def _bank(self, bank: Sequence[torch.Tensor], kept: list[torch.Tensor]) -> list[int]:
        """The addresses of the vectors on the device. Vectors on the host are uploaded together."""
        here = [vector for vector in bank if not vector.is_cuda]
        addresses: list[int] = []
        whole = torch.empty(sum(_padded(v.numel()) for v in here), dtype=torch.float32, device=self._device)
        if here:
            kept.append(whole)
        host = np.zeros(whole.numel(), np.float32)
        at = 0
        for vector in bank:
            if vector.is_cuda:
                vector = vector if vector.data_ptr() % 16 == 0 else vector.clone()  # a run's row may be unaligned
                kept.append(vector)
                addresses.append(vector.data_ptr())
                continue
            host[at : at + vector.numel()] = vector.numpy()
            addresses.append(whole.data_ptr() + 4 * at)
            at += _padded(vector.numel())
        if at:
            self._upload(host, whole)
        return addresses

    def _set_behind(self, behind: Mapping[int, int]) -> None:
        for number, other in behind.items():
            self._behind_host[number] = other
            self._behind_is_stale = True

    def unload(self, slots: ProfileSlots) -> None:
        self._host[_numbers(slots)] = 0  # no row has these profiles any more: the device may keep the old entries
        self._set_behind(dict.fromkeys(slots.behind, 0))
        self._free += slots.behind.values()
        for number in slots.ids.tolist():
            self.programs.release(number)
        super().unload(slots)

    def _take(self, count: int) -> list[int]:
        taken = super()._take(count)
        if self._size > MOST_PROFILES:
            self._free.sort(reverse=True)  # low numbers first: programs need them
        return taken

    def begin_step(self, rows: RowProfiles, places: np.ndarray | None, score_places: np.ndarray | None = None) -> None:
        if self._stale:
            old = slice(self._stale.start, self._stale.stop)
            self._upload(self._host[old], self._table[old])
            self._stale = range(0)
        if self._behind_is_stale:
            self._upload(self._behind_host, self._behind)
            self._behind_is_stale = False
        self.programs.flush()
        for kept in rows.programs.kept.values() if rows.programs is not None else ():
            kept.value = None  # the value is of the last step with these rows
        super().begin_step(rows, places, score_places)
        count = len(rows.profile_T)
        for kind, given in (("capture", places), ("probe", score_places)):
            if given is None and not self._addressed[kind]:
                continue
            addresses_T = np.zeros(max(count, self._addressed[kind]), np.int64)  # also clears the last step's addresses
            if given is not None:
                addresses_T[:count] = given
            self._upload(addresses_T, self._addresses[kind][: len(addresses_T)])
            self._addressed[kind] = count if given is not None else 0

    def _set_rows(self, rows: RowProfiles) -> None:
        self._acting = None
        profile_T = self._profile_T[: len(rows.profile_T)]
        if rows.prepared is not None:
            profile_T.copy_(rows.prepared)
        else:
            self._upload(rows.profile_T, profile_T)
            if rows.again:  # the batches of a pipeline take turns: next time, the copy is made on the device
                rows.prepared = profile_T.clone()
        if self.programs:
            torch.clamp(profile_T, max=MOST_PROFILES, out=self._number_T[: len(profile_T)])

    def edit(self, point: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        if not self.acts_at(point):
            return
        first, second = streams(hidden, residual)
        step = self._step_programs()
        kept = step.kept.get(point)
        if kept is not None:  # programs that run later in the step need the value before the edits
            kept.value = value_at(first, second, kept.rows)
            self.programs.keep_for_graphs(self.points[point], first, second)
        self._read(step, point, "before", first, second)
        self._launch(point, first, second, self._profile_T)
        groups = step.groups.get((point, "edit"), ())
        for given, _ in chain.from_iterable(group.inputs for group in groups):
            if given.value is None:  # the part of the forward that computes it was replayed
                given.value = self.programs.from_graph(given, len(first))
        run_groups(groups, first, second, partial(self._run, point), partial(self._note_overflow, point))
        if groups:
            assert self._rows is not None
            if self._behind_host[np.minimum(self._rows.profile_T, MOST_PROFILES)].any():
                self._capture_behind(point, first, second)
        self._read(step, point, "after", first, second)

    def _step_programs(self) -> StepPrograms:
        if not self.programs or self._rows is None:
            return _NO_PROGRAMS
        if self._rows.programs is None:
            self._rows.programs = self.programs.of_step(self._rows.profile_T, self.index)
        return self._rows.programs

    def _read(
        self, step: StepPrograms, point: int, when: str, first: torch.Tensor, second: torch.Tensor | None
    ) -> None:
        """Store the results of the programs of captures and probes."""
        for kind in READINGS:
            for group in step.groups.get((point, f"{kind} {when}"), ()):
                assert group.offsets is not None
                value = self._run(point, group, value_at(first, second, group.rows))
                self._kernel.store_rows(value, self._addresses[kind][group.rows], group.offsets)

    def _run(self, point: int, group: ProgramGroup, x_RH: torch.Tensor) -> torch.Tensor:
        """The results of a group's programs for the rows' values."""
        width = group.bank.width(x_RH.element_size())
        failed = partial(torch.full, fill_value=math.nan, dtype=x_RH.dtype, device=x_RH.device)
        return self._apart(
            point, partial(group.run, x_RH), lambda rows: failed((rows, width)), lambda: group.rows.cpu().numpy()
        )

    def _note_overflow(self, point: int, rows: torch.Tensor | slice, new_RH: torch.Tensor) -> None:
        """Note rows that are not finite, as the kernel does: see `overflow_T` of `kernel.edit_rows`."""
        code_R = (len(self.points) - point) * not_finite_at(self.points[point], new_RH).to(torch.int32)
        self._overflow_T[rows] = torch.maximum(self._overflow_T[rows], code_R)

    def _capture_behind(self, point: int, first: torch.Tensor, second: torch.Tensor | None) -> None:
        """Capture the rows after programs have edited them."""
        behind_T = self._behind.index_select(0, self._number_T[: len(first)])
        self._launch(point, first, second, behind_T, early=False)  # an early launch would read `behind_T` too soon

    def _upload_rows(self, rows: np.ndarray) -> torch.Tensor:
        there = torch.empty(len(rows), dtype=torch.int64, device=self._device)
        self._upload(rows, there)
        return there

    def edited(
        self, point: int, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not self.acts_at(point):
            return hidden, residual
        hidden = hidden.clone(memory_format=torch.contiguous_format)
        residual = residual.clone(memory_format=torch.contiguous_format) if residual is not None else None
        self.edit(point, hidden, residual)
        return hidden, residual

    def recordable(self, programs: Collection[ProgramAt]) -> Iterable[InGraph]:
        return map(self.programs.recordable, programs)

    def acts_at(self, point: int) -> bool:
        """Whether a row of the step has ops at `point`."""
        if self._acting is None:
            numbers = np.unique(self._rows.profile_T).tolist() if self._rows is not None else []
            here = [self.profiles[number] for number in numbers if number]
            self._acting = {self.index[point] for profile in here for point in profile.points if point in self.index}
        return point in self._acting

    def edit_recorded(
        self,
        point: int,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        programs: Mapping[str, Sequence[RecordedPrograms]] = MappingProxyType({}),
        kept: GraphValues | None = None,
    ) -> None:
        """As `edit`, for a CUDA graph that is being recorded, which will be replayed for other rows.

        Args:
            programs: the programs that may run at the point, in their order, by `ProgramAt.what`.
            kept: keeps the value, if programs need it later.
        """
        first, second = streams(hidden, residual)
        rows = len(first)
        number_T = self._number_T[:rows]

        def read(when: str) -> None:
            for kind in READINGS:
                for each in programs.get(f"{kind} {when}", ()):
                    value, offset_T = each.read(number_T, value_of(first, second))
                    self._kernel.store_rows(value, self._addresses[kind][:rows], offset_T)

        if kept is not None:
            kept.put(self.points[point], first, second)
        read("before")
        self._launch(point, first, second, self._profile_T)
        for each in programs.get("edit", ()):
            each.run(number_T, first, second, partial(self._note_overflow, point))
        if programs.get("edit"):
            self._capture_behind(point, first, second)
        read("after")

    def _launch(
        self,
        point: int,
        first: torch.Tensor,
        second: torch.Tensor | None,
        profile_T: torch.Tensor,
        early: bool = True,
    ) -> None:
        place = (profile_T, self._addresses["capture"], self._overflow_T, self._address, point, len(self.points))
        self._kernel.edit_rows(first, second, *place, early=self._early_launch and early)

    @torch.inference_mode()
    def take_overflow(self, hidden_TH: torch.Tensor) -> tuple[torch.Tensor, Callable[[], object]]:
        codes_T = self._kernel.take_overflow(hidden_TH, self._overflow_T, len(self.points))
        host_T = torch.empty(codes_T.shape, dtype=codes_T.dtype, pin_memory=codes_T.is_cuda)
        host_T.copy_(codes_T, non_blocking=True)
        if not codes_T.is_cuda:
            return host_T, lambda: None
        copied = torch.cuda.Event()
        copied.record()
        return host_T, copied.synchronize

    @torch.inference_mode()
    def warm_up(self, hidden_size: int, dual: bool, dtype: torch.dtype) -> None:
        """Compile both forms of the kernel. Triton takes half a second for each, and recorded graphs use only the form for few rows."""
        for rows in (1, min(self._kernel.FEW_ROWS + 1, len(self._profile_T))):
            hidden_TH = torch.zeros(rows, hidden_size, dtype=dtype, device=self._device)
            self.edit_recorded(0, hidden_TH, torch.zeros_like(hidden_TH) if dual else None)
            self._kernel.take_overflow(hidden_TH, self._overflow_T, len(self.points))

    @cached_property
    def _kernel(self) -> Any:
        from midstream.runtime import kernel  # with Triton, which not every machine has

        return kernel


def _span(numbers: Sequence[int]) -> range:
    """The range from the lowest number to the highest."""
    return range(min(numbers), max(numbers) + 1) if numbers else range(0)


def _numbers(slots: ProfileSlots) -> list[int]:
    """The profiles of a plan in the tables."""
    return [*slots.ids[slots.ids > 0].tolist(), *slots.behind.values()]


def _padded(width: int) -> int:
    return -(-width // 4) * 4  # 16 bytes, so that the kernel may load four at a time
