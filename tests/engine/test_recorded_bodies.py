"""Bodies of traces mean what Python and PyTorch mean by them (rows L1, L2, L8).

The oracle is `plain_forward.py`: plain transformers with hooks. Values, errors and tokens must agree with it, however midstream runs the
body. `MIDSTREAM_RANDOM_BODIES=10000` sets the number of random bodies, and `MIDSTREAM_RANDOM_FIRST` the first one's seed. Without it,
`./test` runs 100 and `./test all` 500. `./test` runs each hard body in one form of a call, the next body in the next form, and `./test all`
runs it in every form.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from body_checks import EIFFEL, LONG, ONE, PARIS, REBINDS, THREE, Body, Oracle, check, check_random, hard_bodies
from limits import runs_all

HARD = hard_bodies()
COUNT = int(os.environ.get("MIDSTREAM_RANDOM_BODIES", "500"))
ALWAYS = 100 if "MIDSTREAM_RANDOM_BODIES" not in os.environ else COUNT
FIRST = int(os.environ.get("MIDSTREAM_RANDOM_FIRST", "0"))
CHUNK = 50


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    """The oracle and engines compute without them, so `LanguageModel` must, too: `h.numpy()` works only then."""
    with torch.no_grad():
        yield


# -------------------------------------------------------------------------------------------------- the table of issue 36


# By the beginnings of the bodies' names.
MEANINGS = {
    "not_reached": "a write that Python does not reach is not made",
    "reached": "a write in an expression is made once it is reached",
    "changed_in_place": "a vector that was changed in place is written as changed",
    "changed_in_tuples": "a vector in a tuple is the vector itself",
    "effects_of_comprehensions": "effects of comprehensions and generators stay",
    "defaults_and_bound_methods": "changes through defaults and bound methods count",
    "swallowed": "code behind a swallowed exception does not run",
    "replaced_and_changed": "a tensor that replaced a value is the value",
}
SPELLINGS = [body for body in HARD if "__" in body.name]


def check_forms(oracle: Oracle, model: Any, body: Body, *forms: tuple[list[Any], int, str]) -> None:
    """Check a body in one of the forms, the next body in the next; in all of them with `./test all`.

    Args:
        forms: prompts, the number of tokens, and how the body is called.
    """
    for form in forms if runs_all() else [forms[HARD.index(body) % len(forms)]]:
        check(oracle, model, body, *form)


def test_each_meaning_has_spellings():
    assert {body.name.partition("__")[0] for body in SPELLINGS} == {*MEANINGS}


@pytest.mark.parametrize("body", SPELLINGS, ids=lambda body: body.name)
def test_spellings_mean_the_same(engine, oracle, body):
    """As a function for three prompts at once, as a call in a with-block, and as the with-block itself."""
    forms = [([PARIS, LONG, THREE], 1, "several"), ([PARIS], 3, "trace"), ([EIFFEL], 2, "inline")]
    check_forms(oracle, engine, body, *forms[: 2 if body.name == REBINDS else 3])


# -------------------------------------------------------------------------------------------------------- hard bodies


@pytest.mark.parametrize(
    "body", [body for body in HARD if "__" not in body.name], ids=lambda body: f"{body.path.stem}-{body.name}"
)
def test_hard_bodies_mean_what_python_means(engine, oracle, body):
    check_forms(oracle, engine, body, ([EIFFEL, THREE, ONE], 3, "several"), ([PARIS], 2, "trace"))


@pytest.mark.slow
@pytest.mark.parametrize("file", sorted({body.path for body in HARD}), ids=lambda path: path.stem)
def test_hard_bodies_on_transformers(hf, oracle, file):
    for body in HARD:
        if body.path == file:
            check_forms(oracle, hf, body, ([PARIS], 3, "run"), ([ONE], 2, "trace"))


def test_the_callers_vectors_are_as_they_were(model):
    """The bodies change them in the trace."""
    for name in ("changed_in_place__callers_vector", "changed_in_place__global", "changed_in_place__replaced_global"):
        body = next(body for body in HARD if body.name == name)
        fn = body.fresh(lambda value: value)
        before = {name: fn.__globals__[name].clone() for name in ("D", "W", "GLOBAL")}
        model.run(fn, [PARIS, THREE], max_tokens=1, temperature=0.0)
        assert all(torch.equal(fn.__globals__[name], value) for name, value in before.items())


# ------------------------------------------------------------------------------------------------------ random bodies


def chunks(count: int, always: int) -> Any:
    """Random bodies in groups, each of which is one test. `./test` runs the first `always` of them."""
    starts = range(FIRST, FIRST + count, CHUNK)
    seeds = [range(start, min(start + CHUNK, FIRST + count)) for start in starts]
    marks = [pytest.mark.matrix if each.start >= FIRST + always else () for each in seeds]
    groups = [pytest.param(each, marks=marked) for each, marked in zip(seeds, marks, strict=True)]
    return pytest.mark.parametrize("seeds", groups, ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")


@pytest.mark.slow
@chunks(COUNT, ALWAYS)
def test_random_bodies_mean_what_pytorch_means(engine, oracle, tmp_path, seeds):
    check_random(oracle, engine, seeds, tmp_path)


@pytest.mark.slow
@chunks(100, 50)
def test_random_bodies_on_transformers(hf, oracle, tmp_path, seeds):
    check_random(oracle, hf, seeds, tmp_path)
