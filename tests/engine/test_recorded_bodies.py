"""Random bodies of traces mean what Python and PyTorch mean by them (rows L1, L2, L8).

Their pieces are the idioms of `random_idioms.py` and its neighbours: short circuits, aliases, closures, generators, exceptions, classes.
The oracle is `plain_forward.py`: plain transformers with hooks. Values, errors and tokens must agree with it, however midstream runs the
body. `MIDSTREAM_RANDOM_BODIES=10000` sets the number of random bodies, and `MIDSTREAM_RANDOM_FIRST` the first one's seed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from body_checks import Oracle, check_random

COUNT = int(os.environ.get("MIDSTREAM_RANDOM_BODIES", "600"))
FIRST = int(os.environ.get("MIDSTREAM_RANDOM_FIRST", "0"))
CHUNK = 50
ALWAYS = 300 if COUNT == 600 else COUNT  # these have nearly every idiom


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    """The oracle and engines compute without them, so `LanguageModel` must, too: `h.numpy()` works only then."""
    with torch.no_grad():
        yield


# ------------------------------------------------------------------------------------------------------ random bodies


def chunks(count: int, always: int) -> Any:
    """Random bodies in groups, each of which is one test."""
    seeds = [range(first, min(first + CHUNK, FIRST + count)) for first in range(FIRST, FIRST + count, CHUNK)]
    marks = [[] if each.start < FIRST + always else pytest.mark.matrix for each in seeds]
    params = [pytest.param(each, marks=mark) for each, mark in zip(seeds, marks, strict=True)]
    return pytest.mark.parametrize("seeds", params, ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")


@pytest.mark.slow
@chunks(COUNT, ALWAYS)
def test_random_bodies_mean_what_pytorch_means(engine, oracle, tmp_path, seeds):
    check_random(oracle, engine, seeds, tmp_path)


@pytest.mark.slow
@chunks(100, 50)
def test_random_bodies_on_transformers(hf, oracle, tmp_path, seeds):
    check_random(oracle, hf, seeds, tmp_path)
