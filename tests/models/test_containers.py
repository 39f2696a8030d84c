"""What a trace leaves in the caller's containers and objects is what plain Python leaves there, aliases included."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from container_bodies import BODIES, differences, made
from copied_model import CopiedModel

import midstream

PARIS = "The capital of France is"


@pytest.fixture(scope="module")
def copied() -> CopiedModel:
    return CopiedModel(midstream.demo_model(), dtype=torch.float32)


@pytest.fixture(params=["hf", "copied", pytest.param("engine", marks=pytest.mark.engine)])
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("name", BODIES)
def test_containers_are_as_plain_python_leaves_them(model, plain, name):
    sites = plain.run(PARIS).sites
    hidden = {layer: sites["resid_post", layer] for layer in range(8)}
    body = made(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = body.traced(model, midstream.save, PARIS)
    expected = body.plain(hidden, lambda value: value)
    found = {each: found[each] for each in expected if each in found}
    expected = {each: value for each, value in expected.items() if each in found}
    assert not differences(expected, found)
