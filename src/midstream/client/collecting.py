"""`collect`: runs the prompts whose captures a directory lacks, a part of them at a time.

A directory has one collection: one model and one plan. Each prompt has an id, the user's or one made of its tokens, which the
index of the directory lists once the prompt's captures are on the disk (`captures.directory`). Such a prompt is not run again.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from midstream.capture.consumers import Collected
from midstream.capture.directory import remove_orphans
from midstream.capture.store import Store, open_captures
from midstream.client.prompts import Prompt, encode
from midstream.client.tracer import Invoke
from midstream.errors import CaptureError, ParameterError, PlanError, PromptError
from midstream.plan.values import Capture, Plan, has_spans, with_digests
from midstream.plan.vectors import digest

if TYPE_CHECKING:
    from midstream.client.model import TraceModel

_log = logging.getLogger(__name__)
PART = 4096  # prompts that are submitted at a time: what is held for each goes with its part


class Collection:
    """One call of `collect`.

    Args:
        model, prompts, plan, to, ids: as of `TraceModel.collect`.
        params: sampling parameters, `max_tokens` among them.

    Raises:
        PlanError, PromptError, ParameterError: what is wrong without a look at the model.
    """

    def __init__(
        self,
        model: TraceModel,
        prompts: Sequence[Prompt],
        plan: Any,
        to: str | Path,
        ids: Iterable[Any] | None,
        params: Mapping[str, Any],
    ) -> None:
        self._model, self._prompts, self._params = model, prompts, dict(params)
        self._directory = Path(to).expanduser()
        self._plan = _own_plan(plan)
        self._ids = None if ids is None else _checked_ids(list(ids), len(prompts))
        if params.get("n", 1) != 1:
            raise ParameterError(
                f"n is {params['n']}; collect takes n=1. Give a prompt several times, with an id each."
            )
        if self._has_generated and params["max_tokens"] == 1:
            raise ParameterError(
                "max_tokens is 1, and the last generated token has no row: give collect a larger one to capture generated rows."
            )

    def run(self) -> Store:
        """Run what is missing, on a model that runs at once."""
        for part in self._parts():
            self._model._outputs(part)
        return open_captures(self._directory)

    async def run_later(self) -> Store:
        """The same on an async engine."""
        model: Any = self._model
        await model.start()
        for part in self._parts():
            await model._outputs(part)
        return open_captures(self._directory)

    @property
    def _has_generated(self) -> bool:
        return any(capture.positions in ("all_generated", "all") for capture in self._plan.captures)

    def _parts(self) -> Iterator[list[Invoke]]:
        of = self._identity()
        missing = self._missing(of, self._done(of))
        remove_orphans(self._directory)
        there, count = len(self._prompts) - len(missing), len(self._prompts)
        if there:  # a warning, for it is to be seen where no logging is set up: these prompts are not run
            _log.warning(
                "%s of %s prompts are in %s already; %s to go",
                *_numbers(there, count),
                self._directory,
                *_numbers(len(missing)),
            )
        for first in range(0, len(missing), PART):
            yield missing[first : first + PART]

    def _identity(self) -> Collected:
        """What the index says of each of the prompts, but for its id."""
        model, facts = self._model, self._model.facts
        path = Path(model.model_name).expanduser()
        name = str(path.resolve()) if path.is_dir() else model.model_name
        plan = Plan(model.plan.edits) + self._plan
        plan_hash = with_digests(plan, model.vectors.digests).normal(facts.num_layers).hash
        params = json.dumps(self._params, sort_keys=True, default=str) if self._has_generated else ""
        return Collected("", f"{name} ({facts.dtype})", digest(f"{plan_hash} {params}".encode()))

    def _done(self, of: Collected) -> dict[str, str]:
        """The ids that the directory has, and the digests of their prompts."""
        if not any(self._directory.glob("index-*.jsonl")):
            return {}
        done: dict[str, str] = {}
        for collected, prompt in open_captures(self._directory).entries():
            if collected is None:
                raise CaptureError(
                    f"{self._directory} holds captures that collect has not written. Give collect a directory of its own."
                )
            if collected.model != of.model:
                raise CaptureError(
                    f"{self._directory} holds captures of {collected.model}, and this is {of.model}. Give collect another directory."
                )
            if collected.plan != of.plan:
                raise CaptureError(
                    f"{self._directory} holds captures of another plan, or of generated rows with other sampling parameters. Give "
                    "collect what the directory was begun with, or another directory."
                )
            done[collected.id] = _digest(prompt)
        return done

    def _missing(self, of: Collected, done: Mapping[str, str]) -> list[Invoke]:
        """What is to be run, in the order of the prompts; all of it is checked."""
        model: Any = self._model
        planner = model.planner
        own = Plan(tuple(_directed(item, self._directory) for item in self._plan.interventions))
        whole = model.plan + own
        by_text, seen = has_spans(whole), Counter[str]()
        invokes = []
        for number, prompt in enumerate(self._prompts):
            ids = encode(prompt, lambda: model.tokenizer)
            tokens = _digest(ids)
            name = self._ids[number] if self._ids is not None else _name(tokens, seen)
            if name in done:
                if done[name] != tokens:
                    raise CaptureError(
                        f"{self._directory} has the id {name!r} with another prompt. Give this one another id, or collect another "
                        "directory."
                    )
                continue
            self._check_length(name, ids)
            try:
                planner.prepare(whole, prompt, ids, self._params)
            except PlanError as error:
                error.add_note(f"This is of the prompt {name!r}, number {number}.")
                raise
            given: Any = prompt if by_text else np.array(ids, np.int32)
            invokes.append(Invoke(given, None, self._params, own, collected=replace(of, id=name)))
        return invokes

    def _check_length(self, name: str, ids: Sequence[int]) -> None:
        longest = self._model.longest_prompt
        if longest is not None and len(ids) > longest:
            raise PromptError(
                f"The prompt {name!r} has {len(ids)} tokens; the engine's max_model_len leaves room for {longest}. Shorten it, or "
                "leave it out."
            )


def _own_plan(given: Any) -> Plan:
    plan = Plan.of(given)
    if not plan.captures:
        raise PlanError("plan has no Capture, so collect has nothing to keep. Add one, such as Capture('resid_post').")
    if any(capture.to is not None for capture in plan.captures):
        raise PlanError(
            "plan has a Capture with to=. Leave it out: all that collect captures goes to the directory of its own to=."
        )
    return plan


def _directed(item: Any, directory: Path) -> Any:
    return replace(item, to=str(directory)) if isinstance(item, Capture) else item


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
    """For a prompt without an id: of equal ones the second is `...#2`."""
    seen[tokens] += 1
    return tokens[:16] if seen[tokens] == 1 else f"{tokens[:16]}#{seen[tokens]}"


def _numbers(*numbers: int) -> list[str]:
    return [f"{number:,}" for number in numbers]
