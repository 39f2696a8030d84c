"""The ways of a plan and of a trace through the files, as `docs/architecture.md` tells them, are those that requests go."""

from __future__ import annotations

import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import here
import pytest
import torch

import midstream
from midstream import VLLM, Capture, Plan, Steer

PACKAGE = Path(midstream.__file__).parent
PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"
# Files that import nothing of midstream are its vocabulary, and no stations on the way.
VOCABULARY = {"errors.py", "hooks.py", "memory.py", "progress.py", "queues.py", "settings.py", "sites.py", "tree.py"}
ONLY_WITH_GRAPHS = {"runtime/kernel.py"}
MOST = {"plan": 35, "trace": 45}  # so that the ways get no longer


class Walk:
    """The functions of the package that are called while it is on, and their files."""

    def __init__(self) -> None:
        self.on, self.files, self.calls = False, set[str](), Counter[tuple[str, str]]()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if self.on and event == "call" and file.startswith(f"{PACKAGE}/") and frame.f_code.co_name != "<module>":
            name = file[len(str(PACKAGE)) + 1 :]
            self.files.add(name)
            self.calls[name, frame.f_code.co_qualname] += 1

    @contextmanager
    def of_this_thread(self) -> Iterator[None]:
        self.files.clear()
        self.calls.clear()
        before = sys.getprofile()
        sys.setprofile(self)
        self.on = True
        yield
        self.on = False
        sys.setprofile(before)
        self.files -= VOCABULARY


@pytest.fixture(scope="module")
def walk() -> Walk:
    return Walk()


@pytest.fixture(scope="module")
def model(walk: Walk) -> Iterator[VLLM]:
    """In this process, so that one profiler sees the client, the scheduler and the worker."""
    threading.setprofile(walk)
    with here.start_here(enforce_eager=True) as model:
        yield model
    threading.setprofile(None)


def named(section: str, part: Callable[[str], str] = str) -> set[str]:
    """The files that a section of the page names."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)
    return set(re.findall(r"`((?:\w+/)+\w+\.py)`", part(text)))


def compare(walk: Walk, told: set[str], kind: str) -> None:
    assert walk.files - told == set(), "a request passes files that the page does not name"
    assert told - walk.files == set(), "the page names files that no request passes"
    assert len(walk.files) <= MOST[kind], sorted(walk.files)


def test_the_way_of_a_plan_is_the_one_in_the_architecture(model: VLLM, walk: Walk) -> None:
    vector = torch.randn(model.hidden_size)
    model.generate("The capital", plan=Steer("resid_post", layers=2, vector=vector), max_tokens=2)  # what happens once
    with walk.of_this_thread():
        model.generate("The capital of France is", plan=Steer("resid_post", layers=2, vector=-vector), max_tokens=4)
    told = named("The life of a plan", lambda text: re.findall(r"^1\. .*?(?=^9\. )", text, re.M | re.S)[0])
    compare(walk, told - ONLY_WITH_GRAPHS, "plan")
    plan = Plan.of([Steer("resid_post", layers=2, vector=-vector), Capture("resid_post", layers=1)])
    steered = set(walk.files)
    with walk.of_this_thread():
        model.generate("The capital of Italy is", plan=plan, max_tokens=4)
    rows = named("The life of a plan", lambda text: re.findall(r"^9\. .*?\n\n", text, re.M | re.S)[0])
    assert walk.files - steered - rows == set()
    assert rows - walk.files == set()


def test_a_plan_is_checked_once_on_its_way(model: VLLM, walk: Walk) -> None:
    """Q1. Its form for the scheduler is also made once, and no process reads a plan that it has made itself."""
    vector = torch.randn(model.hidden_size)
    plan = Plan.of([Steer("resid_post", layers=2, vector=vector), Capture("resid_post", layers=1)])
    with walk.of_this_thread():
        model.generate("The capital of France is", plan=plan, max_tokens=4)
    assert walk.calls["plan/values.py", "check"] == walk.calls["plan/compile.py", "ScheduledPlan.of"] == 1
    assert walk.calls["plan/wire.py", "to_wire"] == 1 and not walk.calls["plan/wire.py", "from_wire"]


def test_the_way_of_a_trace_is_the_one_in_the_architecture(model: VLLM, walk: Walk) -> None:
    def run(prompt: str) -> Any:
        with model.trace(prompt, max_tokens=1, temperature=0.0):
            last = model.layers_output[1][-1].clone().save()
            if last.sum() > 0:
                model.layers_output[2] = model.layers_output[2] * 1.5
        return last

    run("The capital of Spain is")
    with walk.of_this_thread():
        last = run("The capital of Italy is")
    assert last.shape == (model.hidden_size,)
    told = named("The life of a trace", lambda text: re.findall(r"^1\. .*?\n\n", text, re.M | re.S)[0])
    compare(walk, told, "trace")
