"""`collect`: runs the prompts whose captures a directory lacks, in parts.

A directory contains one collection: one model and one plan. Each prompt has an id, the user's or one made of its tokens. The directory's
index lists the id once the prompt's captures are on the disk (`capture.directory`). A listed prompt is not run again.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from midstream.capture.consumers import Collected
from midstream.capture.directory import open_captures, remove_orphans
from midstream.errors import CaptureError, ParameterError, PlanError, PromptError
from midstream.lowering.functions import with_programs
from midstream.plan.values import Capture, Consumer, Plan, has_spans, with_digests
from midstream.plan.vectors import digest
from midstream.requests.invokes import Invoke
from midstream.requests.prompts import Prompt, encode

_log = logging.getLogger(__name__)
PART = 4096  # prompts submitted at a time; memory held for a prompt is freed with its part


class Collection:
    """One call of `collect`.

    Args:
        prompts, plan, to, ids: as in `TraceModel.collect`.
        params: sampling parameters, including `max_tokens`.

    Attributes:
        names: the id of each prompt, once `parts` has been called.

    Raises:
        PlanError, PromptError, ParameterError: for errors that can be found without the model.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        plan: Any,
        to: str | Path,
        ids: Iterable[Any] | None,
        params: Mapping[str, Any],
        shard_bytes: int | None,
    ) -> None:
        self._prompts, self._params = prompts, dict(params)
        self.directory = Path(to).expanduser()
        self._sink: str | Consumer = str(self.directory)
        if shard_bytes is not None:
            if not isinstance(shard_bytes, int) or shard_bytes < 1:
                raise ParameterError(f"shard_bytes is {shard_bytes!r}; allowed is a number of bytes, from 1.")
            self._sink = Consumer("directory", directory=str(self.directory.absolute()), shard_bytes=shard_bytes)
        self._plan = _own_plan(plan)
        self._ids = None if ids is None else _checked_ids(list(ids), len(prompts))
        self.names: list[str] = []
        if params.get("n", 1) != 1:
            raise ParameterError(
                f"n is {params['n']}; collect takes n=1. Give a prompt several times, with a different id each time."
            )
        if self._has_generated and params["max_tokens"] == 1:
            raise ParameterError(
                "max_tokens is 1, and the last generated token has no row: give collect a larger one to capture generated rows."
            )

    def parts(self, model: Any) -> list[list[Invoke]]:
        """The requests to run, in parts, all of them checked.

        `model`: the TraceModel that will run them.
        """
        collected = self._identity(model)
        missing = self._missing(model, collected, self._listed(collected))
        remove_orphans(self.directory)
        there, count = len(self._prompts) - len(missing), len(self._prompts)
        if there:  # a warning, which shows without a logging setup
            text = "%s of %s prompts are in %s already; %s to go"
            _log.warning(text, f"{there:,}", f"{count:,}", self.directory, f"{len(missing):,}")
        return [missing[first : first + PART] for first in range(0, len(missing), PART)]

    @property
    def _has_generated(self) -> bool:
        return any(capture.selects_generated for capture in self._plan.captures)

    def _identity(self, model: Any) -> Collected:
        """The index entry of each prompt, without its id."""
        path, facts = Path(model.model_name).expanduser(), model.facts
        name = str(path.resolve()) if path.is_dir() else model.model_name
        plan = with_programs(Plan(model.plan.edits) + self._plan, facts)
        plan = with_digests(plan, model.vectors.digests)
        params = json.dumps(self._params, sort_keys=True, default=str) if self._has_generated else ""
        plan_hash = plan.normal(facts.num_layers).hash
        return Collected("", f"{name} ({facts.dtype})", digest(f"{plan_hash} {params}".encode()))

    def _listed(self, expected: Collected) -> dict[str, str]:
        """The digest of each prompt in the directory, by id. Raises CaptureError if the directory contains another collection."""
        if not any(self.directory.glob("index-*.jsonl")):
            return {}
        listed: dict[str, str] = {}
        for collected, prompt in open_captures(self.directory).entries():
            if collected is None:
                raise CaptureError(
                    f"{self.directory} holds captures that collect has not written. Give collect a directory of its own."
                )
            if collected.model != expected.model:
                raise CaptureError(
                    f"{self.directory} holds captures of {collected.model}, and this is {expected.model}. Give collect another directory."
                )
            if collected.plan != expected.plan:
                raise CaptureError(
                    f"{self.directory} holds captures of another plan, or of generated rows with other sampling parameters. Give "
                    "collect the plan and parameters that the directory was begun with, or another directory."
                )
            listed[collected.id] = _digest(prompt)
        return listed

    def _missing(self, model: Any, collected: Collected, listed: Mapping[str, str]) -> list[Invoke]:
        """The prompts that are not listed, checked, in their order."""
        planner, longest_prompt = model.planner, model.longest_prompt
        own = Plan(
            tuple(
                replace(item, to=self._sink) if isinstance(item, Capture) else item for item in self._plan.interventions
            )
        )
        plan = with_programs(model.plan + own, model.facts)
        by_text, seen = has_spans(plan), Counter[str]()
        other_kind = {tokens: name for name, tokens in listed.items() if _is_made(name, tokens) != (self._ids is None)}
        invokes = []
        for number, prompt in enumerate(self._prompts):
            ids = encode(prompt, planner.tokenizer)
            tokens = _digest(ids)
            name = self._ids[number] if self._ids is not None else _name(tokens, seen)
            self.names.append(name)
            if name not in listed and tokens in other_kind:
                how = (
                    "with ids=, and this call has none" if self._ids is None else "without ids=, and this call has them"
                )
                raise CaptureError(
                    f"{self.directory} has prompt {number} already, as {other_kind[tokens]!r}. It was collected {how}. Collect it as "
                    "before, or give collect another directory."
                )
            if name in listed:
                if listed[name] != tokens:
                    raise CaptureError(
                        f"{self.directory} has the id {name!r} with another prompt. Give this one another id, or collect another "
                        "directory."
                    )
                continue
            if longest_prompt is not None and len(ids) > longest_prompt:
                raise PromptError(
                    f"The prompt {name!r} has {len(ids)} tokens; the engine's max_model_len leaves room for {longest_prompt}. Shorten "
                    "it, or leave it out."
                )
            try:
                planner.prepare(plan, prompt, ids, self._params)
            except PlanError as error:
                error.add_note(f"The error is about the prompt {name!r}, number {number}.")
                raise
            given: Any = prompt if by_text else np.array(ids, np.int32)
            invokes.append(Invoke(given, None, self._params, own, collected=replace(collected, id=name)))
        return invokes


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


def _digest(ids: Sequence[int]) -> str:
    return digest(np.array(ids, np.int64).tobytes())


def _name(tokens: str, seen: Counter[str]) -> str:
    """The id of a prompt that was given without one. The second of equal prompts gets `...#2`."""
    seen[tokens] += 1
    return tokens[:16] if seen[tokens] == 1 else f"{tokens[:16]}#{seen[tokens]}"


def _is_made(name: str, tokens: str) -> bool:
    """Whether an id has the form that `_name` gives to a prompt of these tokens."""
    return name.partition("#")[0] == tokens[:16]
