"""What a trace leaves in the caller's containers and objects is what plain Python leaves there, aliases included."""

from __future__ import annotations

import uuid
import warnings
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from container_bodies import BODIES, differences, made
from copied_model import CopiedModel
from oracle import close

import midstream

PARIS = "The capital of France is"
ROME = "The capital of Italy is"


@pytest.fixture(scope="module")
def copied() -> CopiedModel:
    return CopiedModel(midstream.demo_model(), dtype=torch.float32)


@pytest.fixture(params=["hf", "copied", pytest.param("engine", marks=pytest.mark.engine)])
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("name", BODIES)
def test_containers_are_as_plain_python_leaves_them(model, plain, name):
    if isinstance(model, midstream.Remote) and name.startswith("a new "):
        pytest.skip("a server sends data, and no objects of classes")
    sites = plain.run(PARIS).sites
    hidden = {layer: sites["resid_post", layer] for layer in range(8)}
    body = made(*BODIES[name])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = body.traced(model, midstream.save, PARIS)
    expected = body.plain(hidden, lambda value: value)
    found = {each: found[each] for each in expected if each in found}
    expected = {each: value for each, value in expected.items() if each in found}
    assert not differences(expected, found)


TOLD = {
    "an attribute of a class": ("class C:\n        n = 0", "C.n += 1", "C"),
    "a new attribute of a function": (
        "def keep():\n    pass\nkeep.rows = []",
        "keep.rows.append(save(H(3))); keep.last = H(4)",
        "last",
    ),
    "an attribute of a library's object": ("t = string.Template('a')", "t.template = 'b'", "t"),
    "an iterator": ("it = iter([1, 2, 3])", "next(it)", "it"),
    "a counter of itertools": ("n = itertools.count()", "next(n)", "n"),
    "random numbers": ("r = random.Random(0)", "r.random()", "r"),
    "bytes": ("b = bytearray()", "b.extend(b'x')", "b"),
    "a number of an object": ("p = Probe()", "p.calls += 1", "p"),
    "a tensor of an object": ("p = Probe()", "p.kept = save(H(3)); p.other = H(4)", "other"),
    "a list of an object": ("p = Probe()", "p.kept = save(H(3)); p.found.append(H(4))", "found"),
    "a list of slots": ("s = Slots(); s.rows = []", "s.rows.append(H(3))", "rows"),
    "a bound method": ("xs = []; keep = xs.append", "keep(H(3))", "keep"),
    "a list in a tuple": ("t = ([],)", "t[0].append(H(3))", "t"),
    "a list of a torch module": ("m = Lens()", "m.inner.rows.append(H(3))", "rows"),
    "an object that pickles itself": (
        "class C:\n    def __reduce__(self):\n        return C, (), self.__dict__\nc = C(); c.rows = []",
        "c.rows.append(save(H(3)))",
        "c",
    ),
    "an object with a state of its own": (
        "class C:\n    def __getstate__(self):\n        return {'rows': self.rows}\nc = C(); c.rows = []",
        "c.rows.append(save(H(3)))",
        "c",
    ),
    "an array of objects": ("import numpy as np; a = np.empty(2, dtype=object)", "a[0] = save(H(3))", "a"),
    "a list in an array of objects": (
        "import numpy as np; a = np.empty(1, dtype=object); a[0] = []",
        "a[0].append(save(H(3)))",
        "a",
    ),
    "an iterator in a list": ("xs = [iter([1, 2])]", "next(xs[0])", "xs"),
}


@pytest.mark.parametrize("name", TOLD)
def test_what_does_not_come_back_is_told_by_name(model, plain, name):
    before, body, told = TOLD[name]
    with pytest.warns(UserWarning, match=rf"put values into {told} and did not save"):
        found = made(before, f"{body}; got = save(H(5))").traced(model, midstream.save, PARIS)
    if model.__class__.__name__ == "CopiedModel":
        assert not hasattr(found.get("p"), "other") and not getattr(found.get("p"), "found", ())


def test_invokes_fill_one_graph_of_objects(model, plain):
    """In the order in which the model reaches the values; aliases stay aliases, and a value of another layer is no obstacle."""
    inner, counts = [], Counter(a=1)
    d, n = {"x": inner, "gone": 0}, SimpleNamespace(rows=inner)
    with model.trace() as tracer:
        above = dict().save()
        with tracer.invoke(PARIS):
            d["x"].append(model.layers_output[3].save())
            above["first"] = inner
            counts["a"] += 1
        with tracer.invoke(ROME):
            n.rows.append(model.layers_output[5].save())
            d.pop("gone")
            d["y"] = d["x"]
            counts["h"] = model.layers_output[6].norm().item().save()
    assert d["x"] is inner is d["y"] is n.rows is above["first"] and list(d) == ["x", "y"] and len(inner) == 2
    for value, layer, prompt in zip(inner, (3, 5), (PARIS, ROME), strict=True):
        close(value, plain.run(prompt).sites["resid_post", layer])
    assert list(counts) == ["a", "h"] and counts["a"] == 2


def test_an_invoke_that_ends_first_keeps_what_it_adds(model: Any) -> None:
    """The first invoke reads a later layer, so it ends last if both run in one step. Seen failing: the order of the invokes counted."""
    for _ in range(6):  # they may run in two steps
        xs: list[Any] = []
        with model.trace(max_tokens=1, temperature=0.0) as tracer:
            with tracer.invoke(PARIS):
                xs.append(("first", model.layers_output[5].save()))
            with tracer.invoke(ROME):
                xs.append(("second", model.layers_output[3].save()))
        assert sorted(name for name, _ in xs) == ["first", "second"]


def test_what_a_failed_trace_had_put_into_containers_comes_back(model, plain):
    inner = []
    d = {"x": inner, "gone": 0}
    with pytest.raises(ZeroDivisionError):
        with model.trace(PARIS):
            d["x"].append(model.layers_output[3].save())
            del d["gone"]
            1 / 0
    assert d["x"] is inner and list(d) == ["x"]
    close(inner[0], plain.run(PARIS).sites["resid_post", 3])


def test_the_output_is_put_into_the_callers_containers(model):
    inner = []
    d = {"x": inner}
    with model.trace(PARIS) as tracer:
        d["x"].append(("result", tracer.result.save()))
        got = model.layers_output[3].save()  # noqa: F841
    assert d["x"] is inner and inner[0][0] == "result" and type(inner[0][1]) is type(tracer.result)
    assert inner[0][1] is tracer.result or isinstance(model, CopiedModel)


def test_a_trace_in_a_loop_adds_to_what_came_back(model, plain):
    """The caller's own tensors stay the objects that they are."""
    inner = []
    d = {"x": inner}
    seen = []
    for prompt in (PARIS, ROME, PARIS):
        with model.trace(prompt):
            d["x"].append(model.layers_output[3].save())
        seen.append(inner[-1])
    assert len(inner) == 3 and all(a is b for a, b in zip(inner, seen, strict=True))


def test_an_object_that_stays_as_it_is_is_not_told(model):
    """Its pickle has another dict each time."""
    number = uuid.UUID(int=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with model.trace(PARIS):
            text = str(number)  # noqa: F841
            got = model.layers_output[3].save()  # noqa: F841
