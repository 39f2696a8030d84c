"""The results of the pipeline stages are merged into those of one GPU (C9), with the structure as the oracle. Rows C8, C14."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections import OrderedDict, deque
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import examples

from midstream.errors import NeverReachedError, StageFailedError, StageMismatchWarning
from midstream.ranks import merge
from midstream.ranks.merge import Absent, merged_outcomes
from midstream.trace.code import Failure, Outcome
from midstream.trace.tracer import Cache, CacheEntry
from midstream.transport.messages import ResultHeader
from midstream.vllm.stream import merge_stages


class Pair(NamedTuple):
    hidden: Any
    residual: Any


@dataclass
class Noted:
    value: Any
    notes: dict[str, Any] = field(default_factory=dict)


def absent(number: int = 0) -> Absent:
    return Absent(f"model.layers.{number}.output")


def same(a: Any, b: Any) -> bool:
    """Equal in structure, classes, values, and shapes and dtypes of tensors."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, Noted):
        return same(vars(a), vars(b))
    return bool(a == b)


def merged_values(each: list[dict[str, Any]]) -> dict[str, Any]:
    """The merged values of stages that got equally far."""
    (merged,) = merged_outcomes([[Outcome(values)] for values in each])
    return merged.values


# Any splitting of any structure.

LEAVES = st.one_of(
    st.integers(),
    st.text(max_size=3),
    st.none(),
    st.booleans(),
    st.floats(allow_nan=False),
    st.integers(0, 3).map(lambda n: torch.arange(n * 2).reshape(n, 2)),
    st.sampled_from([torch.bfloat16, torch.float32, torch.int64]).map(lambda d: torch.ones(2, dtype=d)),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=4),
        st.builds(Pair, inner, inner),
        st.builds(Noted, inner, st.dictionaries(st.text(max_size=2), inner, max_size=2)),
    ),
    max_leaves=12,
)


def split(tree: Any, stages: set[int], draw: Any) -> dict[int, Any]:
    """A part for each stage, so that every leaf is real on one of them at least."""
    if isinstance(tree, (list, tuple, dict, Noted)) and draw(st.integers(0, 4)):
        if isinstance(tree, dict):
            inner = {key: split(value, stages, draw) for key, value in tree.items()}
            return {s: {key: inner[key][s] for key in tree} for s in stages}
        if isinstance(tree, Noted):
            parts = {name: split(value, stages, draw) for name, value in vars(tree).items()}
            return {s: Noted(**{name: each[s] for name, each in parts.items()}) for s in stages}
        items = [split(item, stages, draw) for item in tree]
        make = type(tree)._make if isinstance(tree, Pair) else type(tree)  # type: ignore[attr-defined]
        return {s: make([item[s] for item in items]) for s in stages}
    real = draw(st.sets(st.sampled_from(sorted(stages)), min_size=1))
    return {s: copy.deepcopy(tree) if s in real else absent() for s in stages}


@settings(deadline=None, max_examples=examples(60))
@given(st.data(), st.dictionaries(st.text(min_size=1, max_size=3), TREES, max_size=3), st.integers(2, 4))
def test_any_splitting_of_any_structure_gives_it_back(data: Any, values: dict[str, Any], count: int) -> None:
    """C9: real over absent, containers by position and key, classes kept; and whatever the order of the stages."""
    parts = {name: split(tree, set(range(count)), data.draw) for name, tree in values.items()}
    each = [pickle.loads(pickle.dumps({name: parts[name][s] for name in values})) for s in range(count)]
    shuffled = data.draw(st.permutations(each))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(merged_values(each), values)
        assert same(merged_values(shuffled), values)


# Lists and names.


def test_a_saved_list_takes_each_entry_from_the_stage_that_has_it() -> None:
    """C9: lists by union."""
    first = {"hs": [torch.zeros(2), absent(1), absent(2)], "a": torch.ones(1), "b": absent(7)}
    last = {"hs": [absent(0), torch.ones(2), torch.full((2,), 2.0)], "a": absent(0), "b": torch.zeros(1)}
    merged = merged_values([first, last])
    assert [h[0].item() for h in merged["hs"]] == [0.0, 1.0, 2.0]
    assert merged["a"].item() == 1.0 and merged["b"].item() == 0.0
    assert (
        merged_values([{"hs": [1, 2, 3]}, {"hs": [1]}])
        == {"hs": [1, 2, 3]}
        == merged_values([{"hs": [1]}, {"hs": [1, 2, 3]}])
    )


def test_values_absent_on_every_stage_are_left_out() -> None:
    """C9: the name is left out. Inside a container the position stays and names the missing value."""
    merged = merged_values([{"h": absent(3), "hs": [absent(3), 1]}, {"h": absent(3), "hs": [absent(3), absent(4)]}])
    assert merged == {"hs": [absent(3), 1]}
    assert "model.layers.3.output" in repr(merged["hs"][0])


def test_a_name_that_one_stage_has_is_kept() -> None:
    """C9: names by union."""
    assert merged_values([{"a": 1}, {"b": 2}]) == {"a": 1, "b": 2}


def test_containers_keep_their_classes() -> None:
    """C9: NamedTuple kept; likewise deques, ordered dicts, sets and objects, and what they share."""
    shared = [1, absent()]
    first = {
        "p": Pair(1, absent()),
        "d": deque([absent(), 2], 2),
        "o": OrderedDict(x=absent()),
        "s": {1, absent()},
        "l": [shared] * 2,
    }
    mirrored = [absent(), 2]
    last = {
        "p": Pair(absent(), 2),
        "d": deque([1, absent()], 2),
        "o": OrderedDict(x=3),
        "s": {absent(), 2},
        "l": [mirrored] * 2,
    }
    merged = merged_values([first, last])
    assert type(merged["p"]) is Pair and merged["p"] == Pair(1, 2)
    assert merged["d"] == deque([1, 2]) and merged["d"].maxlen == 2
    assert merged["o"] == OrderedDict(x=3) and type(merged["o"]) is OrderedDict
    assert merged["s"] == {1, 2}
    assert merged["l"] == [[1, 2], [1, 2]] and merged["l"][0] is merged["l"][1]


def test_model_outputs_and_containers_that_contain_themselves_merge() -> None:
    """C9: transformers' outputs are dicts with attributes."""
    from transformers.modeling_outputs import BaseModelOutput

    first, last = (
        BaseModelOutput(last_hidden_state=absent(), hidden_states=1),
        BaseModelOutput(last_hidden_state=2, hidden_states=1),
    )
    loops: list[list[Any]] = [[1, absent()], [absent(), 2]]
    for loop in loops:
        loop.append(loop)
    merged = merged_values([{"out": first, "loop": loops[0]}, {"out": last, "loop": loops[1]}])
    assert (
        type(merged["out"]) is BaseModelOutput
        and merged["out"].last_hidden_state == 2 == merged["out"]["last_hidden_state"]
    )
    assert merged["loop"][:2] == [1, 2] and merged["loop"][2] is merged["loop"]


def test_classes_that_the_trace_defines_merge_by_name() -> None:
    """C9: each stage runs the class statement itself, so the classes are different objects."""

    def of_a_stage(value: Any) -> Any:
        class Own:
            pass

        own = Own()
        own.value, own.kind = value, Own  # type: ignore[attr-defined]
        return own

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert merged_values([{"own": of_a_stage(1)}, {"own": of_a_stage(absent())}])["own"].value == 1


# Values that differ.


@pytest.mark.parametrize(
    ("first", "last"),
    [
        (1, 2),
        (True, False),
        ("a", "b"),
        (1.0, 1.1),
        (math.nan, 1.0),
        (1, 1.0),
        ([1], (1,)),
        (torch.ones(2), torch.tensor([1.0, 1.05])),
        (torch.ones(2), torch.ones(3)),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.tensor([3, 4]), torch.tensor([3, 5])),
        (torch.ones(2, dtype=torch.bfloat16), torch.tensor([1.0, 1.1], dtype=torch.bfloat16)),
        (torch.tensor([1.0, math.inf]), torch.tensor([1.0, 2.0])),
        (np.arange(3), np.arange(3) + 1),
        (np.ones(3), np.ones(3) * 1.1),
        (None, torch.ones(1)),
        (slice(1), slice(2)),
    ],
)
@pytest.mark.parametrize("where", [lambda x: x, lambda x: [0, {"a": (x,)}], lambda x: Noted(x)])
def test_real_values_that_differ_warn_by_name(first: Any, last: Any, where: Any) -> None:
    """C9: the value of the last stage is used, and the warning names the value and the stages."""
    each = [{"fine": 1, "odd": where(first)}, {"fine": 1, "odd": where(absent())}, {"fine": 1, "odd": where(last)}]
    with pytest.warns(StageMismatchWarning, match=r"'odd' .* stages 0, 2; the value of stage 2") as caught:
        merged = merged_values(each)
    assert len([each for each in caught if each.category is StageMismatchWarning]) == 1
    assert same(merged["odd"], where(last))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64])
def test_rounding_is_no_difference(dtype: torch.dtype) -> None:
    """C9: in every dtype, the same sum in another order differs only in its last bits."""
    torch.manual_seed(0)
    entries = torch.randn(64, 512, dtype=torch.complex128 if dtype.is_complex else torch.float64).to(dtype)
    one = entries.sum(1)
    other = entries[:, torch.randperm(512)].reshape(64, 8, 64).sum(1).sum(1)
    each = [{"x": x, "a": x.real.float().numpy(), "n": x.real.flatten()[0].item()} for x in (one, other)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        merged_values(each)


KINDS = {
    "sparse": lambda x: x.to_sparse(),
    "sparse_bool": lambda x: (x > 1).to_sparse(),
    "csr": lambda x: x.reshape(1, -1).to_sparse_csr(),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.5, 0, torch.qint8),
    "nested": lambda x: torch.nested.as_nested_tensor([x, x[:1]]),
    "conj": lambda x: torch.complex(x, x).conj(),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.*prototype stage", "ignore:.*quantize", "ignore:.*beta state")
def test_tensors_of_any_layout_are_compared_by_their_values(kind: str) -> None:
    first, last = KINDS[kind](torch.tensor([1.0, 2.0])), KINDS[kind](torch.tensor([5.0, 0.0]))
    assert merge._same(first, KINDS[kind](torch.tensor([1.0, 2.0])))
    assert not merge._same(first, last)
    assert not merge._same(first, KINDS[kind](torch.tensor([1.0, 2.0, 3.0])))


def test_equal_specials_are_equal() -> None:
    """C9: NaN and infinities at the same places, empty tensors, 8-bit floats, dtypes and objects without an ==."""
    special = {
        "t": torch.tensor([math.nan, math.inf, -math.inf, 1.0]),
        "f": math.nan,
        "e": torch.empty(0),
        "d": torch.bfloat16,
    }
    special |= {"q": torch.ones(4).to(torch.float8_e4m3fn), "o": Noted(torch.ones(2)), "g": len, "x": ValueError("a")}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        merged = merged_values([special, copy.deepcopy(special)])
    assert merged.keys() == special.keys()


# Outcomes.


def made(values: dict[str, Any], steps: int = 1, error: Exception | None = None, **more: Any) -> Outcome:
    return Outcome(values, failure=Failure.of(error) if error is not None else None, name="r/0", steps=steps, **more)


def test_a_step_past_the_end_is_dropped() -> None:
    """C9: overshoot. Stage 0 ran a step after the one that ended the request on the last stage."""
    first = {"hs": [0, 1, 2, 3], "by_step": {0: 0, 1: 1, 2: 2}, "late": 9, "own": Noted([0, 1, 2])}
    last = {"hs": [absent()] * 2, "by_step": {0: absent(), 1: absent()}, "own": Noted([absent()])}
    (merged,) = merged_outcomes([[made(first, 3)], [made(last, 2, order=5)]])
    assert merged.values == {"hs": [0, 1], "by_step": {0: 0, 1: 1}, "own": Noted([0])}
    assert merged.steps == 2 and merged.order == 5 and merged.name == "r/0"
    (equally_far,) = merged_outcomes([[made(first, 2)], [made(last, 2)]])
    assert equally_far.values["hs"] == [0, 1, 2, 3] and equally_far.values["late"] == 9


@pytest.mark.parametrize("steps", [1, 2])
def test_a_cache_takes_each_module_from_its_stage_and_no_step_past_the_end(steps: int) -> None:
    """C9: each value knows its step, since the last stage may have no entries to count."""
    stages = []
    for stage, ran in enumerate((steps + 1, steps)):
        cache = Cache()
        for step in range(ran):
            cache.setdefault(f"layers.{stage}", CacheEntry()).add("output", torch.tensor(10 * stage + step), step)
        if stage == 0:
            cache.setdefault("late", CacheEntry()).add("inputs", 1, steps)
        stages.append([made({"cache": pickle.loads(pickle.dumps(cache))}, ran)])
    (merged,) = merged_outcomes(stages)
    cache = merged.values["cache"]
    assert type(cache) is Cache and list(cache) == ["layers.0", "layers.1"]
    for stage in (0, 1):
        kept = cache.layers[stage].output
        assert (kept if steps > 1 else [kept]) == [10 * stage + step for step in range(steps)]


def test_a_failure_beats_one_that_only_says_that_another_stage_failed() -> None:
    """C14: one error, the user's own, with the values saved before it."""
    told = made({"a": 1, "late": 2, "hs": [1, 2]}, 2, StageFailedError("stage 1 failed"))
    own = made({"a": absent(), "hs": [absent()]}, 2, ValueError("mine"))
    for each in ([[told], [own]], [[own], [told]]):
        (merged,) = merged_outcomes(each)
        assert merged.failure is not None and merged.failure.message == "mine" and not merged.failure.secondary
        assert merged.values == {"a": 1, "hs": [1]}
    (only_told,) = merged_outcomes([[told], [made({}, 2)]])
    assert only_told.failure is not None and only_told.failure.secondary


def test_the_same_error_on_every_stage_is_one() -> None:
    """C9, C4: every stage runs the code, so each raises it; the earliest step counts."""
    each = [[made({"a": stage}, 3 - stage, ValueError(str(stage)))] for stage in range(2)]
    with pytest.warns(StageMismatchWarning):
        (merged,) = merged_outcomes(each)
    assert merged.failure is not None and merged.failure.message == "1" and merged.values == {"a": 1}


def test_a_failure_past_the_end_is_dropped() -> None:
    """C9: stage 0 waited for a value in a step that the last stage never ran. That is no error of the user."""
    first = made({"hs": [1, 2]}, 3, NeverReachedError("step 2 of the last stage was never reached"))
    last = made({"hs": [absent()]}, 2, stopped=True)
    (merged,) = merged_outcomes([[first], [last]])
    assert merged.failure is None and merged.values == {"hs": [1]} and merged.stopped
    (merged,) = merged_outcomes([[made({"hs": [1, 2]}, 3, ValueError("mine"))], [last]])
    assert merged.failure is not None and merged.failure.message == "mine"


def test_an_edit_that_failed_on_one_stage_is_reported_beside_the_trace() -> None:
    """C14: bodies are distinguished by name, and the trace's own comes first."""
    edit = replace(made({}, 1, ValueError("edit")), name="r/0#0")
    merged = merged_outcomes([[made({"a": 1})], [made({"a": absent()}), edit]])
    assert [(outcome.name, outcome.failure is None) for outcome in merged] == [("r/0", True), ("r/0#0", False)]
    assert merged[0].values == {"a": 1}


def test_one_stage_is_left_as_it_is() -> None:
    """C9: without pipeline stages nothing is merged."""
    outcomes = [made({"a": object()})]
    (found,) = merge_stages([(ResultHeader(("mailbox", 0), "r", True, 0), outcomes)], 1)
    assert found is outcomes
