"""vLLM against transformers on every architecture (rows A2, A10, B1 to B5, B7), in float32 on a CPU engine.

Two prompts of different lengths share the batch. Reads and edits of every accessor are compared with `LanguageModel`;
those of the residual stream and the logits with plain transformers and torch hooks too (`compare_runs.Plain`). Row I1.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import compare_runs
import pytest
import tiny_models
import torch

from midstream.commands import compare
from midstream.commands.compare import Comparison, RelativeDifference, Side
from midstream.errors import InterventionErrorGroup, TraceError, UnknownSiteError

REQUIRED = "llama mistral qwen2 qwen3 gemma2 gemma3 phi3 gpt2 opt gpt_neox falcon olmo2 mixtral qwen3_moe".split()
TRANSFORMERS_BACKEND = {"gpt_neox", "olmo2", "llama_transformers", "qwen3_transformers", "gemma2_transformers"}
# One of each kind: a single stream, two streams, norms after the blocks, parallel blocks, experts, and the Transformers backend.
ALWAYS = {"qwen3", "gemma2", "falcon", "mixtral", "llama_transformers"}
NAMES = [name for name in tiny_models.ARCHITECTURES if name not in tiny_models.UNSUPPORTED_ON_CPU]
LAYERS = tiny_models.LAYERS
AT = LAYERS // 2

PARALLEL = {"gpt_neox", "falcon", "falcon_two_norms", "phi", "cohere", "gptj"}
MIXTURES = {"mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "gpt_oss", "granitemoe", "llama4", "flex_olmo", "hunyuan_moe"}
WITH_DENSE_LAYERS = {"glm4_moe", "dots1"}  # and others with experts
QKV = ("attn_q", "attn_k", "attn_v")
# In transformers their attention calls none of its attention functions.
WITHOUT_QKV = {"falcon", "falcon_serial", "falcon_two_norms", "gptj", "bloom", "mpt"}
# On vLLM they have position biases (ALiBi), or attention in chunks at some layers.
WITHOUT_PROBABILITIES = {"bloom": "lacking", "llama4": "other layers"}
WITHOUT_FINAL_NORM = {"opt_post_norm"}
# What is added to resid_mid is not mlp_out alone, or is normed after the add.
NOT_A_PLAIN_SUM = {"granite", "granitemoe", "opt_post_norm"}
# Read back up to rounding: the value lies in the model divided by a scale, or less a bias.
ROUNDED = {
    ("gemma", "embed"),
    ("gemma2", "embed"),
    ("gemma3", "embed"),
    ("gemma2_transformers", "embed"),
    ("granite", "embed"),
}
ROUNDED |= {("falcon_serial", "attn_out"), ("falcon_serial", "mlp_out")}

pytestmark = [pytest.mark.engine]


def lacking(name: str) -> set[str]:
    """The accessors and edits that this architecture has no place for."""
    missing: set[str] = set()
    if name in PARALLEL:
        missing |= {"resid_mid", "replace resid_mid"}
    if name in MIXTURES:
        missing |= {"mlp_act", "ablate neurons"}
    elif name not in WITH_DENSE_LAYERS:
        missing |= {"router", "ablate experts"}
    if name in WITHOUT_FINAL_NORM:
        missing |= {"final_norm", "project_on_vocab", "replace final_norm"}
    return missing


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of every architecture that a selected test asks for, from one process."""
    here = [item for item in request.session.items if item.path == request.path]
    asked = {
        item.callspec.params["name"] for item in here if hasattr(item, "callspec") and "name" in item.callspec.params
    }
    folder = tmp_path_factory.mktemp("compare")
    results = folder / "results.pt"
    order = [name for name in (*tiny_models.ARCHITECTURES, "command") if name in asked]
    done = subprocess.run(
        [sys.executable, compare_runs.__file__, str(folder), str(results), *order],
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
        timeout=60 + 90 * len(order),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(results, weights_only=False)


@pytest.fixture
def ran(runs: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    assert "error" not in runs[name], runs[name]["error"]
    yield runs[name]


def marked(names: list[str]) -> list[Any]:
    """One of each kind runs always, the others with `./test all`."""
    return [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.matrix) for name in names]


each = pytest.mark.parametrize("name", marked(NAMES))


def test_the_required_architectures_are_there() -> None:
    """B5: the fourteen by name, two of them and more through the Transformers backend."""
    assert set(REQUIRED) <= set(NAMES)
    assert len(TRANSFORMERS_BACKEND & set(NAMES)) >= 2


@each
def test_accessors_and_edits_agree(ran: dict[str, Any], name: str) -> None:
    """A10, B1, B5, B7: every accessor and every edit within 1e-4 of transformers, and every edit changes something."""
    found: dict[str, RelativeDifference] = dict(ran["differences"])
    note = "vLLM only" if name in WITHOUT_QKV else ""
    assert {found[site].note for site in QKV} == {note}
    assert found["attention_probabilities"].note == WITHOUT_PROBABILITIES.get(name, note)
    left_out = {entry for entry in (*QKV, "attention_probabilities") if found[entry].note}
    found = {entry: d for entry, d in found.items() if entry not in left_out}
    assert {entry for entry, d in found.items() if d.note == "lacking"} == lacking(name)
    have = {entry: d for entry, d in found.items() if d.note != "lacking"}
    assert {entry: (d.note, d.reason) for entry, d in have.items() if d.note} == {}
    if name.startswith(
        "opt"
    ):  # transformers multiplies the queries by the scale before attention, and vLLM inside of it
        assert have.pop("attn_q").value == pytest.approx(32**0.5 - 1, rel=1e-3)
    if name == "llama4":  # vLLM reorders the dimensions within each head of queries and keys
        assert (have.pop("attn_q").value or 0) > 0.1 and (have.pop("attn_k").value or 0) > 0.1
    tolerance = tiny_models.ARCHITECTURES[name].rtol
    assert {entry: (d.value, d.where) for entry, d in have.items() if d.value is None or d.value > tolerance} == {}


@each
def test_the_stream_and_logits_are_those_of_plain_transformers(ran: dict[str, Any], name: str) -> None:
    """B1, B2, B5: against what enters its layers, unpadded, with no code of midstream on that side."""
    for prompt, (logits, entering) in enumerate(ran["plain"]["clean"]):
        near(name, ran["values"]["logits"][prompt]["logits"], logits)
        near(name, ran["values"]["next_token_probs"][prompt]["next_token_probs"], logits.softmax(-1))
        for i in range(LAYERS):
            near(name, ran["values"]["layers_input"][prompt][f"layers_input[{i}]"], entering[i])
            if i:
                near(name, ran["values"]["layers_output"][prompt][f"layers_output[{i - 1}]"], entering[i])


@each
@pytest.mark.parametrize("edit", ["zero layers_output", "skip_layers", "steer", "patch", "replace layers_input"])
def test_edits_do_what_hooks_do(ran: dict[str, Any], name: str, edit: str) -> None:
    """A2, A8, B1: the same edit by a torch hook on plain transformers gives the same stream and logits."""
    for prompt, (logits, entering) in enumerate(ran["plain"][edit]):
        values = ran["values"][edit][prompt]
        near(name, values[f"logits with the edit at {AT}"], logits)
        for i in range(AT + 1, LAYERS):
            near(name, values[f"layers_output[{i - 1}] with the edit at {AT}"], entering[i])


@each
def test_every_cell_of_a_sweep_is_what_hooks_give(ran: dict[str, Any], name: str) -> None:
    """H9: patches at each layer and token, with no code of midstream on the other side."""
    expected = ran["plain"]["sweep"]
    assert expected.std() > 0
    near(name, ran["sweep"].float(), expected)


@each
def test_modules_whose_values_are_sites_run_behind_the_step(ran: dict[str, Any], name: str) -> None:
    """A module's input or output is read and written as in the forward, and the forward is not stopped."""
    is_flat = not ran["root"].startswith("Transformers")  # whose modules' values have a batch axis, except in a mixture
    assert is_flat == any("gate" not in module for module in ran["modules"])
    for module, ((values, stopped), (expected, stops)) in ran["modules"].items():
        assert stopped == 0 and stops > 0, module
        (read, written), (as_read, as_written) = values, expected
        for mine, theirs in zip([*read, *written], [*as_read, *as_written], strict=True):
            for ours, others in zip(mine, theirs, strict=True):
                assert compare.relative(ours, others) < 1e-5, module
        for (_, plain), (_, changed) in zip(as_read, as_written, strict=True):
            assert compare.relative(changed, plain) > 1e-6, module


@each
def test_the_stream_is_continuous(ran: dict[str, Any], name: str) -> None:
    """B3: what leaves a layer is what enters the next, bit for bit; and both prompts were in one step."""
    assert ran["continuous"] == [True] * (2 * (LAYERS - 1))
    assert ran["steps"] == 1


@each
def test_setters_leave_what_was_set(ran: dict[str, Any], name: str) -> None:
    """B3: another program of the same request reads exactly what was written, at every site."""
    for site, pairs in ran["set"].items():
        for read, written in pairs:
            if (name, site) in ROUNDED:
                torch.testing.assert_close(read, written, rtol=1e-6, atol=1e-6)
            else:
                assert torch.equal(read, written), site


@pytest.mark.parametrize("name", marked(sorted(set(NAMES) - PARALLEL - NOT_A_PLAIN_SUM)))
def test_what_is_written_in_mid_block_goes_on_in_the_stream(ran: dict[str, Any], name: str) -> None:
    """B3: `resid_post = resid_mid + mlp_out` holds for a written `resid_mid`: the residual connection has it."""
    assert len(ran["middle"]) == 2
    for written, mlp_out, left in ran["middle"]:
        assert compare.relative(left, written + mlp_out) < 1e-6


@each
def test_a_neighbour_in_the_batch_is_left_alone(ran: dict[str, Any], name: str) -> None:
    """A2: an edit of one prompt's whole stream does not reach the other's logits; nothing of a trace stays behind."""
    near(name, ran["bystander"], ran["plain"]["clean"][1][0])
    assert not ran["gauges"]


@each
def test_route(ran: dict[str, Any], name: str) -> None:
    """B5: those said to come through the Transformers backend do."""
    assert ran["root"].startswith("Transformers") or name not in TRANSFORMERS_BACKEND


@pytest.mark.parametrize("name", sorted(tiny_models.UNSUPPORTED_ON_CPU))
def test_what_vllm_cannot_run_is_listed_with_its_error(ran: dict[str, Any], name: str) -> None:
    """B5."""
    assert len(ran["said"]) == 2
    native, _, other = tiny_models.UNSUPPORTED_ON_CPU[name].partition(" model_impl='transformers': ")
    assert native in ran["said"][0]
    assert other in ran["said"][1]


@pytest.mark.parametrize("name", ["command"])
def test_the_command_prints_a_table(ran: dict[str, Any], name: str) -> None:
    """A10: one row for each accessor and edit, and exit code 0 where all agree."""
    assert ran["code"] == 0, ran["printed"]
    lines = ran["printed"].splitlines()
    for entry in (*compare.READS, *compare.EDITS):
        (line,) = [line for line in lines if line.startswith(f"{entry} ")]
        if "router" in entry or "expert" in entry:  # of mixtures
            assert line.split()[-1] == "lacking"
        else:
            assert 0 <= float(line.split()[-1]) < 1e-4


def near(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert compare.relative(actual, expected) <= tiny_models.ARCHITECTURES[name].rtol


# The comparison itself.


def side(**values: float | str) -> Side:
    """A side on which every entry is a number, but for those named."""
    made = Side()
    for entry in (*compare.READS, *compare.EDITS):
        value = values.get(entry.replace(" ", "_"), 2.0)
        keys = ["logits", "logits with the edit at 0"] if entry == "logits" or entry in compare.EDITS else [entry]
        if value == "missing":
            made.missing[entry] = "no such site"
        elif value == "failed":
            made.failed[entry] = "it broke"
        else:
            made.values[entry] = [{key: torch.tensor([[float(value), 4.0]]) for key in keys}]
    return made


def test_relative_difference() -> None:
    a, b = torch.tensor([1.0, -8.0]), torch.tensor([1.5, -10.0])
    assert compare.relative(a, b) == pytest.approx(0.2)
    assert compare.relative(a, a) == 0.0
    assert compare.relative(torch.zeros(2), torch.zeros(2)) == 0.0
    assert compare.relative(a, torch.zeros(3)) == float("inf")
    assert compare.relative(torch.tensor([float("nan"), 1.0]), a) == float("inf")


def test_a_site_that_one_side_lacks_is_shown_as_such() -> None:
    found = compare.differences(
        side(resid_mid="missing", attn_z="missing"), side(resid_mid="missing", mlp_act="missing")
    )
    assert [str(found[entry]) for entry in ("resid_mid", "attn_z", "mlp_act")] == [
        "lacking",
        "transformers only",
        "vLLM only",
    ]
    assert found["resid_mid"].value is None


def test_an_edit_that_changes_nothing_is_no_success() -> None:
    reference = side(steer=6.0)
    found = compare.differences(side(steer=6.0), reference)
    assert (found["steer"].value, found["steer"].note) == (0.0, "")
    assert (found["patch"].value, found["patch"].note) == (0.0, "no effect")


def test_errors_are_told_from_missing_sites() -> None:
    made = Side()

    def raising(error: Exception) -> Any:
        def fn() -> Any:
            raise error

        return fn

    made.take("a", raising(UnknownSiteError("none")))
    made.take("b", raising(InterventionErrorGroup("two", [UnknownSiteError("none"), UnknownSiteError("none")])))
    made.take("c", raising(InterventionErrorGroup("two", [TraceError("broke\nmore"), UnknownSiteError("none")])))
    made.take("d", raising(TraceError("broke")))
    assert (made.missing, made.failed) == ({"a": "none", "b": "none"}, {"c": "broke", "d": "broke"})


def test_tables() -> None:
    found = compare.differences(side(logits=3.0), side())
    rows = [Comparison(name, "X", "native", (), found) for name in "abcdefg"]
    text = compare.text_table(rows)
    assert text.count("\nlogits ") == 2  # five models across, then two
    assert all(
        line.split()[1:] in (["2.5e-01"] * 5, ["2.5e-01"] * 2)
        for line in text.splitlines()
        if line.startswith("logits")
    )
    table = compare.markdown_table(rows, ("attn_z", "logits")).splitlines()
    assert table[0] == "| model | attn_z | logits |"
    assert table[2] == "| a | 0.0e+00 | 2.5e-01 |"
    assert rows[0].largest(tuple(compare.READS)).where == "logits, prompt 0"
