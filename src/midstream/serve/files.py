"""Reads the files that a server takes at its start: named vectors, sparse autoencoders and the engine-wide plan."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from midstream.errors import MidstreamError
from midstream.plan import fields
from midstream.plan.values import ModelFacts, Plan
from midstream.plan.vectors import Vector, load_vectors
from midstream.sae import SAE
from midstream.settings import Settings

VECTORS, SAES, PLAN = "--midstream-vectors", "--midstream-sae", "--midstream-plan"


class Files(NamedTuple):
    """The content of a server's files, read as `midstream serve` names them.

    Attributes:
        plan: the engine-wide plan as plain data, as in a request; None if there is none.
    """

    vectors: dict[str, Vector]
    saes: dict[str, SAE]
    plan: Any


def read_files(settings: Settings) -> Files:
    """Read all files. Raises MidstreamError, which names the file and the mistake in it."""
    vectors, places = dict[str, Vector](), dict[str, str]()
    for path in settings.vector_files:
        with errors_in(VECTORS, path):
            found = load_vectors(path)
            if taken := next(iter(found.keys() & vectors.keys()), None):
                raise MidstreamError(f"the name {taken!r} is taken by a vector of {places[taken]}.")
            vectors |= found
            places |= dict.fromkeys(found, path)
    saes = {}
    for name, path in settings.saes.items():
        with errors_in(SAES, f"{name}={path}"):
            saes[fields.name("the name", name)] = SAE.load(path)
    plan = None
    if settings.plan_file is not None:
        with errors_in(PLAN, settings.plan_file):
            plan = json.loads(Path(settings.plan_file).read_text())
            plan = {"interventions": plan} if isinstance(plan, list) else plan
            Plan.from_wire(plan, trusted=False, may_be_final=True, saes=saes)
    return Files(vectors, saes, plan)


def check_widths(vectors: dict[str, Vector], facts: ModelFacts) -> None:
    """Raise MidstreamError for a vector that fits no site of the model."""
    widths = {*facts.widths.values(), *facts.head_dims.values()}
    for name, vector in vectors.items():
        if vector.width not in widths:
            there = ", ".join(map(str, sorted(widths)))
            text = f"{VECTORS}: the vector {name!r} is of width {vector.width}; the sites of this model are of width {there}."
            raise MidstreamError(text)


@contextlib.contextmanager
def errors_in(option: str, path: str | None) -> Iterator[None]:
    """Make errors in the block name the option and the file."""
    try:
        yield
    except (OSError, ValueError, RecursionError, MidstreamError) as error:
        raise MidstreamError(f"{option} {path}: {error}") from error
