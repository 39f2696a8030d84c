"""`collect`: runs the prompts whose captures a directory lacks, in parts.

A directory contains one collection: one model and one plan. Each prompt has an id, the user's or one made of its tokens. The directory's
index lists the id once the prompt's captures are on the disk (`capture.directory`). A listed prompt is not run again.

All prompts are prepared before the first one runs, so the rows and bytes that they will write are known, and compared with the free space
and `limit_bytes`.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from midstream.capture.consumers import Collected
from midstream.capture.directory import Store, remove_orphans
from midstream.capture.listing import Listing, digest_of
from midstream.errors import CaptureError, ParameterError, PlanError, PromptError
from midstream.lowering.functions import with_programs
from midstream.plan import fields
from midstream.plan.selections import Without
from midstream.plan.values import Capture, Consumer, Plan, has_spans, resolve_spans, with_digests
from midstream.plan.vectors import digest
from midstream.progress import Bar
from midstream.requests.arguments import Prompt, check_form, encode, numbered, offsets_of
from midstream.requests.invokes import Invoke, Planner, PreparedPlan

_log = logging.getLogger(__name__)
ON_BAD = ("raise", "skip", "truncate")
PART = 4096  # prompts submitted at a time; memory held for a prompt is freed with its part
_LARGE = 1 << 30  # bytes; an estimate from here on shows without a logging setup


@dataclass(frozen=True)
class Estimate:
    """What `collect` will write.

    Attributes:
        prompts: how many will run.
        rows: the number of rows, over all captured sites and layers. Rows of generated tokens count as if each prompt generated
            `max_tokens`.
        nbytes: the size of these rows in bytes. The index, which lists the prompts' tokens as text, is not counted.
    """

    prompts: int
    rows: int
    nbytes: int

    def __repr__(self) -> str:
        return f"<{self.prompts:,} prompts: {self.rows:,} rows, {_amount(self.nbytes)}>"


@dataclass(eq=False)
class PromptCheck:
    """Takes the prompts of a call one by one, and leaves out or cuts those that the model cannot take.

    Attributes:
        model: a TraceModel.
        on_bad: "raise", "skip" or "truncate", as in `TraceModel.collect`.
        bad: the number of each prompt that was left out or cut -> why: "empty", "too long", "out of the vocabulary" or "not a prompt".
    """

    model: Any
    on_bad: str
    bad: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.on_bad not in ON_BAD:
            raise ParameterError(f"on_bad is {self.on_bad!r}; allowed: {', '.join(map(repr, ON_BAD))}.", field="on_bad")

    def ids(self, number: int, prompt: Any, name: str | None = None, is_alone: bool = False) -> list[int] | None:
        """The token ids of a prompt; None to leave it out. Raises PromptError with on_bad="raise"."""
        try:
            with numbered(None if is_alone else number, name):
                check_form(prompt)
                (ids,) = self.model.ids_of([prompt])
        except PromptError as error:
            if self.on_bad == "raise":
                raise
            self.bad[number] = error.reason
            if self.on_bad == "skip" or error.reason != "too long":
                return None
            ids = encode(prompt, lambda: self.model.tokenizer)
        longest = self.model.trained_length
        if self.on_bad == "raise" or longest is None or len(ids) <= longest:
            return ids  # type: ignore[no-any-return]
        self.bad[number] = "too long"
        return ids[:longest] if self.on_bad == "truncate" else None

    def tell(self) -> None:
        """Log how many prompts were left out and cut."""
        cut = sum(reason == "too long" for reason in self.bad.values()) if self.on_bad == "truncate" else 0
        counts = Counter(reason for reason in self.bad.values() if not (cut and reason == "too long"))
        texts = [f"{count:,} {reason}" for reason, count in counts.most_common()]
        if texts:
            _log.warning("%s prompts were left out: %s", f"{counts.total():,}", ", ".join(texts))
        if cut:
            _log.warning("%s prompts were cut to their first %s tokens", f"{cut:,}", f"{self.model.trained_length:,}")


class Part(NamedTuple):
    """Requests that are submitted together, with the rows and bytes that they will write on average."""

    invokes: list[Invoke]
    mean_rows: float
    mean_bytes: float


@dataclass(eq=False)
class Collection:
    """One call of `collect`.

    Attributes:
        model: the TraceModel that will run the prompts; None to check the arguments alone.
        prompts, plan, ids, shard_bytes, limit_bytes, skip_special_tokens, on_bad: as in `TraceModel.collect`.
        to: the directory, as in `TraceModel.collect`; None to estimate all prompts.
        params: sampling parameters, including `max_tokens`.
        listing: the directory's listing, kept from an earlier call; None reads the whole index.
        adapter: the adapter that all prompts run with, as in `Invoke`.

    Raises:
        PlanError, PromptError, ParameterError: for errors that can be found without the model.
    """

    model: Any
    prompts: Sequence[Prompt]
    plan: Any
    to: str | Path | None
    params: dict[str, Any]
    ids: Iterable[Any] | None = None
    shard_bytes: int | None = None
    limit_bytes: int | None = None
    skip_special_tokens: bool = False
    listing: Listing | None = None
    adapter: Any = None
    on_bad: str = "raise"

    def __post_init__(self) -> None:
        self.check = PromptCheck(self.model, self.on_bad)
        self.directory = Path(os.devnull if self.to is None else self.to).expanduser()  # an estimate may have none
        self._listing = self.listing or Listing(self.directory)
        self._sink: str | Consumer = str(self.directory)
        for name in ("shard_bytes", "limit_bytes"):
            given = getattr(self, name)
            if given is not None and (not isinstance(given, int) or given < 1):
                raise ParameterError(f"{name} is {given!r}; allowed is a number of bytes, from 1.")
        fields.flag("skip_special_tokens", self.skip_special_tokens)
        self._there: int | None = None  # how many prompts the directory has, once `parts` was called
        if self.shard_bytes is not None:
            directory = str(self.directory.absolute())
            self._sink = Consumer("directory", directory=directory, shard_bytes=self.shard_bytes)
        self.plan = _own_plan(self.plan)
        self._ids = None if self.ids is None else _checked_ids(list(self.ids), len(self.prompts))
        self._names: list[str] = []  # the id of each prompt, once `missing` was called
        if self.params.get("n", 1) != 1:
            raise ParameterError(
                f"n is {self.params['n']}; collect takes n=1. Give a prompt several times, with a different id each time."
            )
        if self._has_generated and self.params["max_tokens"] == 1:
            raise ParameterError(
                "max_tokens is 1, and the last generated token has no row: give collect a larger one to capture generated rows."
            )

    def parts(self) -> list[Part]:
        """The requests to run, in parts. Checks all of them, and logs how many rows and bytes they will write.

        Raises:
            CaptureError: the directory contains another collection, or the file system has too little space.
        """
        missing, sizes = self.missing()
        self.check.tell()
        remove_orphans(self.directory)
        self._there = len(self._names) - len(missing)
        fitting = self._fitting(missing, sizes)
        self._tell(missing, sizes[:fitting])
        missing, sizes = missing[:fitting], sizes[:fitting]
        return [
            Part(missing[first : first + PART], *sizes[first : first + PART].mean(0).tolist())
            for first in range(0, fitting, PART)
        ]

    def estimate(self) -> Estimate:
        """What `parts` would write without `limit_bytes`. Raises the errors of the prompts and the plan."""
        return _sum_of(self.missing()[1])

    def store(self) -> Store:
        """The captures of these prompts, once they have been written."""
        self._listing.refresh()
        store = Store(self.directory, self._names, self._listing)
        store.bad = self.check.bad
        return store

    def ended(self, bar: Bar, part: Part, count: int) -> None:
        """Show in the bar that `count` more requests of a part have ended."""
        most = " at most" if self._has_generated else ""
        bar.update(count, {" rows/s": count * part.mean_rows, f"B/s{most}": count * part.mean_bytes})

    def how_to_go_on(self) -> str:
        """The message for a user who has interrupted the collection: how many prompts the directory has.

        First waits until the rows of ended requests are written. Another interrupt ends this wait.
        """
        directory, again = repr(str(self.directory)), "The same call again collects the others."
        if self._there is None:
            return f"The prompts that are complete are in {directory}. {again}"
        least, why = "At least ", ""
        try:
            reason = self.model.sinks.flush(self._sink)
            least, why = "", "" if reason is None else f" Prompts that ended last could not be written: {reason}."
        except KeyboardInterrupt:
            pass
        try:
            self._listing.refresh()
        except OSError as error:
            return f"The prompts in {directory} cannot be counted: {error}.{why} {again}"
        count = sum(name in self._listing.digests for name in self._names)
        return f"{least}{count:,} of {len(self._names):,} prompts are in {directory}.{why} {again}"

    def _fitting(self, missing: Sequence[Invoke], sizes: np.ndarray) -> int:
        """How many of the missing prompts fit `limit_bytes`, in their order. Raises ParameterError if not even the first one does."""
        if self.limit_bytes is None or not missing:
            return len(missing)
        fitting = int(np.searchsorted(sizes[:, 1].cumsum(), self.limit_bytes, side="right"))
        if not fitting:
            assert missing[0].collected is not None
            raise ParameterError(
                f"limit_bytes is {self.limit_bytes:,}; allowed: at least {sizes[0, 1]:,}, the bytes of the prompt "
                f"{missing[0].collected.id!r}, which is the next one."
            )
        return fitting

    def _tell(self, missing: Sequence[Invoke], sizes: np.ndarray) -> None:
        """Log how many rows and bytes requests of these sizes will write. Raises CaptureError if the free space is too small."""
        path = self.directory.absolute()
        disk = shutil.disk_usage(next(each for each in (path, *path.parents) if each.exists()))
        will = _sum_of(sizes)
        most = "up to " if self._has_generated else ""
        written = f"{most}{will.rows:,} rows, {_amount(will.nbytes)}"
        if disk.total and will.nbytes > disk.free:  # some network file systems tell no size
            raise CaptureError(
                f"{will.prompts:,} prompts would write {written}, and the file system of {self.directory} has {_amount(disk.free)} free. "
                "Capture fewer rows, give collect another directory, or give it limit_bytes= for the prompts that fit."
            )
        text = f"{len(missing):,} prompts to collect"
        if self._there:
            there = f"{self._there:,} of {len(self.prompts):,} prompts"
            text = f"{there} are in {self.directory} already; {len(missing):,} to go"
        if will.prompts:
            text += f": {written}; {_amount(disk.free)} are free"
        if left := len(missing) - will.prompts:
            text += f". limit_bytes leaves {left:,} of them for another call"
        level = logging.WARNING if self._there or left or will.nbytes >= _LARGE else logging.INFO
        _log.log(level, "%s", text)  # a warning shows without a logging setup

    @property
    def _has_generated(self) -> bool:
        return any(capture.selects_generated for capture in self.plan.captures)

    def _identity(self) -> Collected:
        """The index entry that all prompts share: the model, and the digest of the plan and its parameters. The id is empty."""
        model = self.model
        path, facts = Path(model.model_name).expanduser(), model.facts
        name = str(path.resolve()) if path.is_dir() else model.model_name
        plan = with_programs(Plan(model.plan.edits) + self.plan, facts)
        plan = with_digests(plan, model.vectors.digests)
        params = json.dumps(self.params, sort_keys=True, default=str) if self._has_generated else ""
        special = f" without the tokens {self._special}" if self.skip_special_tokens else ""
        plan_hash = plan.normal(facts.num_layers).hash
        adapted = "" if self.adapter is None else f" with the adapter {model.name_of_adapter(self.adapter)}"
        return Collected("", f"{name} ({facts.dtype}){adapted}", digest(f"{plan_hash} {params}{special}".encode()))

    @cached_property
    def _special(self) -> list[int]:
        """The ids of the tokens that `skip_special_tokens` leaves out. `tokenizer.decode(skip_special_tokens=True)` leaves out the same."""
        if not self.skip_special_tokens:
            return []
        # `all_special_ids` alone lacks some, such as those of Llama 3's chat template.
        tokenizer = self.model.tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        return sorted({*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)})

    def _listed(self, expected: Collected) -> Mapping[str, str]:
        """The digest of each prompt in the directory, by id. Raises CaptureError if the directory contains another collection."""
        listing = self._listing
        listing.refresh()
        if None in listing.kinds:
            raise CaptureError(
                f"{self.directory} holds captures that collect has not written. Give collect a directory of its own."
            )
        for model, plan in filter(None, listing.kinds):
            if model != expected.model:
                raise CaptureError(
                    f"{self.directory} holds captures of {model}, and this is {expected.model}. Give collect another directory."
                )
            if plan != expected.plan:
                raise CaptureError(
                    f"{self.directory} holds captures of another plan, with another skip_special_tokens, or of generated rows with other "
                    "sampling parameters. Give collect what the directory was begun with, or another directory."
                )
        return listing.digests

    def missing(self) -> tuple[list[Invoke], np.ndarray]:
        """Check the prompts. Returns requests for those that the directory lacks, and an array of their rows and bytes, `[prompts, 2]`."""
        model = self.model
        planner, facts = model.planner, model.facts
        collected = self._identity()
        listed = self._listed(collected)
        by_text = has_spans(model.plan + self.plan)
        special = set(self._special)
        plans: dict[tuple[int, ...], tuple[Plan, Plan]] = {}  # by the left-out positions; prompts share plans
        known: dict[Any, tuple[int, int]] = {}  # by these positions and the prompt's length
        seen, sizes = Counter[str](), list[tuple[int, int]]()
        invokes = []
        for number, prompt in enumerate(self.prompts):
            name_of = None if self._ids is None else self._ids[number]
            ids = self.check.ids(number, prompt, name_of, len(self.prompts) == 1)
            if ids is None:
                continue
            if by_text and number in self.check.bad:
                raise PromptError(
                    f"The prompt {number} is too long, and the plan has a Span, which is looked up in the text of a whole prompt: cut the "
                    'text yourself, use on_bad="skip", or give positions as numbers.'
                )
            tokens = digest_of(ids)
            name = self._ids[number] if self._ids is not None else _name(tokens, seen)
            self._names.append(name)
            other = self._listing.ids.get(tokens)
            if name not in listed and other is not None and _is_made(other, tokens) != (self._ids is None):
                how = (
                    "with ids=, and this call has none" if self._ids is None else "without ids=, and this call has them"
                )
                raise CaptureError(
                    f"{self.directory} has prompt {number} already, as {other!r}. It was collected {how}. Collect it as "
                    "before, or give collect another directory."
                )
            if name in listed:
                if listed[name] != tokens:
                    raise CaptureError(
                        f"{self.directory} has the id {name!r} with another prompt. Give this one another id, or collect another "
                        "directory."
                    )
                continue
            left_out = tuple(i for i, token in enumerate(ids) if token in special) if special else ()
            alike = left_out, len(ids)
            if by_text or alike not in known:
                try:
                    if left_out not in plans or (by_text and left_out):
                        own = self._own(left_out, prompt, ids, planner)
                        plans[left_out] = own, with_programs(model.plan + own, facts)
                    known[alike] = self._size(planner.prepare(plans[left_out][1], prompt, ids, self.params))
                except PlanError as error:
                    error.add_note(f"The error is about the prompt {name!r}, number {number}.")
                    raise
            sizes.append(known[alike])
            given: Any = prompt if by_text else np.array(ids, np.int32)
            of_prompt = Collected(name, collected.model, collected.plan)
            invokes.append(
                Invoke(given, None, self.params, plans[left_out][0], collected=of_prompt, adapter=self.adapter)
            )
        return invokes, np.array(sizes, np.int64).reshape(-1, 2)

    def _own(self, left_out: tuple[int, ...], prompt: Prompt, ids: Sequence[int], planner: Planner) -> Plan:
        """The plan of a prompt, with captures to the directory that leave out some positions."""
        plan = self.plan
        if left_out and has_spans(plan):
            plan = resolve_spans(plan, *offsets_of(prompt, ids, planner.tokenizer()))

        def own(capture: Capture) -> Capture:
            positions = Without(capture.positions, left_out) if left_out else capture.positions
            return replace(capture, to=self._sink, positions=positions)

        return Plan(tuple(own(item) if isinstance(item, Capture) else item for item in plan.interventions))

    def _size(self, prepared: PreparedPlan) -> tuple[int, int]:
        """The rows and bytes that a request writes."""
        facts, stop = prepared.facts, len(prepared.prompt) + self.params["max_tokens"] - 1
        rows, nbytes, counts = 0, 0, dict[int, int]()
        for _, selected in prepared.routes:
            for (site, layer, _), selection in selected.items():
                if id(selection) not in counts:
                    counts[id(selection)] = len(selection.below(stop))
                itemsize = getattr(torch, selection.dtype or facts.dtype).itemsize
                rows += counts[id(selection)]
                width = facts.widths[site, layer] if selection.heads is None else selection.heads.width
                nbytes += counts[id(selection)] * width * itemsize
        return rows, nbytes


def _sum_of(sizes: np.ndarray) -> Estimate:
    return Estimate(len(sizes), *sizes.sum(0).tolist())


def _amount(nbytes: int) -> str:
    """Bytes as text: "1.2 GB"."""
    rounded, units = float(f"{nbytes:.3g}"), ["B", "kB", "MB", "GB", "TB"]
    while rounded >= 1000 and len(units) > 1:
        rounded, units = rounded / 1000, units[1:]
    return f"{rounded:g} {units[0]}"


def _own_plan(given: Any) -> Plan:
    plan = Plan.of(given)
    if not plan.captures:
        raise PlanError("plan has no Capture, so collect has nothing to keep. Add one, such as Capture('resid_post').")
    if plan.probes:
        raise PlanError(
            "plan has a Probe, and collect keeps captured rows alone. Take scores from generate.", field="plan"
        )
    if any(capture.to is not None for capture in plan.captures):
        raise PlanError(
            "plan has a Capture with to=. Leave it out: collect writes all captured rows to the directory of its own to=."
        )
    return plan


def _checked_ids(given: Sequence[Any], count: int) -> list[str]:
    ids = list(map(str, given))
    if len(ids) != count:
        raise PromptError(f"ids has {len(ids)} for {count} prompts; give each prompt one.")
    twice = [name for name, times in Counter(ids).items() if times > 1]
    if twice:
        raise PromptError(f"ids has {twice[0]!r} more than once; give each prompt one of its own.")
    return ids


def _name(tokens: str, seen: Counter[str]) -> str:
    """The id of a prompt that was given without one. The second of equal prompts gets `...#2`."""
    seen[tokens] += 1
    return tokens[:16] if seen[tokens] == 1 else f"{tokens[:16]}#{seen[tokens]}"


def _is_made(name: str, tokens: str) -> bool:
    """Whether an id has the form that `_name` gives to a prompt of these tokens."""
    return name.partition("#")[0] == tokens[:16]
