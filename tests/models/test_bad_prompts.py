"""Prompts that a model cannot take are refused with their number and the reason, in every call; `on_bad` leaves them out (rows F1, G7)."""

from __future__ import annotations

import itertools
import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch

from midstream import Capture, LanguageModel, Plan
from midstream.capture.directory import open_captures
from midstream.commands.collect import main
from midstream.errors import MidstreamError, ParameterError, PromptError

GOOD, OTHER = [5, 6, 7], [8, 9]
HALF = "half a pair: \ud83d"
# A prompt, and what the error says of it.
BAD: dict[str, tuple[Any, str]] = {
    "None": (None, "None was given"),
    "nested": (["a", "b"], r"\['a', 'b'\] was given"),
    "nested ids": ([[5, 6], [7]], "was given"),
    "a float": ([5, 6.7], r"whole numbers; the prompt has 6\.7, of the type float"),
    "a whole float": ([5, 6.0], "whole numbers; the prompt has 6.0"),
    "a tensor of floats": (torch.tensor([5.5, 6.0]), "whole numbers; the prompt has 5.5"),
    "an array of floats": (np.array([5.5, 6.0]), "whole numbers; the prompt has 5.5"),
    "a bool": ([True, 6], "whole numbers; the prompt has True, of the type bool"),
    "a tensor of bools": (torch.tensor([True, False]), "whole numbers; the prompt has True"),
    "empty": ([], "at least one token"),
    "an empty text": ("", "has no tokens"),
    "negative": ([5, -1], "the prompt has -1"),
    "out of the vocabulary": ([5, 384], "token id 384; this model's are 0 to 383"),
    "half of a pair": (HALF, "half of a surrogate pair, .* at character 13"),
    "bytes": (b"abc", "was given"),
}
REASONS = {"empty": "empty", "an empty text": "empty", "negative": "out of the vocabulary"}
REASONS["out of the vocabulary"] = "out of the vocabulary"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("llama", tmp_path_factory.mktemp("prompts"))


@pytest.fixture(scope="module")
def model(path: Path) -> LanguageModel:
    return LanguageModel(str(path), dtype=torch.float32)


def traced(model: Any, prompts: Any) -> Any:
    with model.trace(prompts):
        model.logits.save()


def invoked(model: Any, prompts: Any) -> Any:
    with model.trace() as tracer, tracer.invoke(prompts):
        model.logits.save()


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "generate": lambda model, prompts: model.generate(prompts, max_tokens=1),
    "run": lambda model, prompts: model.run(lambda m: m.logits, prompts),
    "call": lambda model, prompts: model(prompts),
    "trace": traced,
    "invoke": invoked,
    "collect": lambda model, prompts: model.collect(prompts, plan=Capture("resid_post"), to="never"),
    "estimate": lambda model, prompts: model.estimate(prompts, plan=Capture("resid_post")),
    "activations": lambda model, prompts: list(model.activations(prompts, "resid_post", 1)),
    "iterator": lambda model, prompts: list(model.activations(iter(prompts), "resid_post", 1, shuffle=False)),
    "sweep": lambda model, prompts: model.sweep(prompts, [GOOD] * 3, 7, 8),
    "corrupt": lambda model, prompts: model.sweep([GOOD] * 3, prompts, 7, 8),
    "path_patching": lambda model, prompts: model.path_patching(prompts, [GOOD] * 3, 7, 8),
    "edge_attribution": lambda model, prompts: model.edge_attribution(prompts, [GOOD] * 3, 7, 8),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("call", CALLS)
def test_each_call_names_the_bad_prompt(model: LanguageModel, call: str, bad: str) -> None:
    """Seen: `generate` and `run` gave a batch of the other prompts for None and for a nested list, and cut floats to integers."""
    prompt, said = BAD[bad]
    with pytest.raises(MidstreamError) as raised:
        CALLS[call](model, [GOOD, prompt, OTHER])
    assert isinstance(raised.value, PromptError) and not Path("never").exists()
    raised.match(rf"^prompts\[1\]: .*{said}")


@pytest.mark.parametrize("call", ["generate", "run", "trace", "invoke", "collect"])
@pytest.mark.parametrize("bad", ["None", "a float", "a bool", "empty", "negative", "out of the vocabulary", "bytes"])
def test_a_single_prompt_has_no_number(model: LanguageModel, call: str, bad: str) -> None:
    prompt, said = BAD[bad]
    if prompt is None and call in ("trace", "invoke"):
        pytest.skip("it asks for invokes, or for the whole batch")
    with pytest.raises(PromptError, match=said) as raised:
        CALLS[call](model, prompt)
    assert not str(raised.value).startswith("prompts[")


def test_record_takes_one_prompt(model: LanguageModel) -> None:
    for given, said in (
        (None, "None was given"),
        ([GOOD, OTHER], "record runs one prompt; 2 were given"),
        ([5, 6.5], "6.5"),
    ):
        with pytest.raises(PromptError, match=said):
            model.record(given, ["resid_post"])
    with pytest.raises(PromptError, match="half of a surrogate pair"):
        model.generate([{"role": "user", "content": [{"type": "text", "text": HALF}]}], max_tokens=1)


def test_ids_of_any_integer_type_are_taken(model: LanguageModel) -> None:
    forms = [np.array(GOOD, np.int32), torch.tensor(GOOD, dtype=torch.int16), [np.int64(each) for each in GOOD]]
    forms += [
        tuple(GOOD),
        torch.tensor([GOOD]),
        np.array(GOOD, np.uint8),
        [torch.tensor(each) for each in GOOD],
        range(5, 8),
    ]
    outputs = model.generate([GOOD, *forms], max_tokens=2)
    assert [output.tolist() for output in outputs] == [outputs[0].tolist()] * 9


def test_a_prompt_beyond_the_positions_of_the_model_warns(model: LanguageModel) -> None:
    most = tiny_models.MAX_POSITIONS
    with pytest.warns(
        UserWarning, match=rf"prompts\[1\] has {most + 1} tokens, and this model was made for {most} .* 1 others"
    ):
        model.generate([GOOD, [5] * (most + 1), [5] * (most + 2)], max_tokens=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.run(lambda m: m.logits, [5] * most)


@pytest.mark.engine
@pytest.mark.parametrize("bad", [*BAD, "too long"])
def test_an_engine_names_the_bad_prompt(engine: Any, bad: str) -> None:
    """On `VLLM`, and with `--remote` on `Remote`."""
    prompt, said = BAD.get(bad, ([5] * 600, "600 tokens; this model takes prompts of up to 511 tokens"))
    if bad == "out of the vocabulary":
        prompt, said = [5, 10**6], "token id 1000000; this model's are 0 to"
    for call in ("generate", "run", "trace"):
        with pytest.raises(PromptError) as raised:
            CALLS[call](engine, [GOOD, prompt, OTHER])
        raised.match(rf"^prompts\[1\]: .*{said}")


# Leaving them out.

LONG = list(itertools.islice(itertools.cycle(range(5, 300)), tiny_models.MAX_POSITIONS + 3))
MIXED = [GOOD, *(prompt for prompt, _ in BAD.values()), LONG, OTHER]
EXPECTED = {1 + i: REASONS.get(name, "not a prompt") for i, name in enumerate(BAD)} | {1 + len(BAD): "too long"}


@pytest.mark.parametrize("on_bad", ["skip", "truncate"])
def test_collect_leaves_out_bad_prompts_and_counts_them(
    model: LanguageModel, tmp_path: Path, on_bad: str, caplog: pytest.LogCaptureFixture
) -> None:
    plan, ids = Capture("resid_post", layers=1, positions="all_prompt"), [f"p{i}" for i in range(len(MIXED))]
    with caplog.at_level(logging.WARNING), warnings.catch_warnings():
        warnings.simplefilter("error")
        store = model.collect(MIXED, plan=plan, to=tmp_path, ids=ids, on_bad=on_bad)
    left = ["p0", *(["p16"] if on_bad == "truncate" else []), "p17"]
    assert list(store) == list(open_captures(tmp_path)) == left and dict(store.bad) == EXPECTED
    assert ("1 too long" in caplog.text) == (on_bad == "skip")
    assert "11 not a prompt, 2 empty, 2 out of the vocabulary" in caplog.text
    if on_bad == "truncate":
        assert store["p16"].prompt_token_ids == LONG[: tiny_models.MAX_POSITIONS]
        assert "1 prompts were cut to their first 256 tokens" in caplog.text
    again = model.collect(MIXED, plan=plan, to=tmp_path, ids=ids, on_bad=on_bad)
    assert list(again) == left and dict(again.bad) == EXPECTED


@pytest.mark.parametrize("on_bad", ["skip", "truncate"])
@pytest.mark.parametrize("make", [list, iter], ids=["list", "iterator"])
def test_activations_leave_out_bad_prompts(model: LanguageModel, on_bad: str, make: Any) -> None:
    found = model.activations(make(MIXED), "resid_post", 1, batch_size=8, with_context=True, on_bad=on_bad)
    rows = [(int(r), int(p)) for batch in found for r, p in zip(batch.requests, batch.positions, strict=True)]
    lengths = {0: 3, 17: 2} | ({16: tiny_models.MAX_POSITIONS} if on_bad == "truncate" else {})
    assert sorted(rows) == [(number, at) for number in sorted(lengths) for at in range(lengths[number])]
    assert dict(found.bad) == EXPECTED


def test_activations_of_bad_prompts_alone_end(model: LanguageModel) -> None:
    with pytest.raises(MidstreamError, match="no rows"):
        next(model.activations([None, []], "resid_post", 1, on_bad="skip", epochs=None))


@pytest.mark.parametrize("on_bad", ["skip", "truncate"])
def test_an_actor_of_ray_leaves_out_bad_prompts(model: LanguageModel, tmp_path: Path, on_bad: str) -> None:
    actor = pytest.importorskip("midstream.ray")
    plan = Plan.of(Capture("resid_post", layers=1, positions="all_prompt")).to_json()
    engine = actor.Engine(lambda: model, {"plan": plan, "to": str(tmp_path), "on_bad": on_bad})
    asked = {"good": GOOD, "none": None, "empty": [], "long": LONG, "other": OTHER}
    given = [[*asked], [json.dumps(prompt) for prompt in asked.values()]]
    rows = {
        row["id"]: row["rows"] for row in engine(actor.pa.table(given, actor.ASKED)).to_pylist() if not row["error"]
    }
    left = {"good": 3, "other": 2} | ({"long": tiny_models.MAX_POSITIONS} if on_bad == "truncate" else {})
    assert rows == {**dict.fromkeys(asked, 0), **left} and {*open_captures(tmp_path)} == {*left}


def test_other_values_of_on_bad_are_refused(model: LanguageModel, tmp_path: Path) -> None:
    for call in (
        lambda: model.collect([GOOD], plan=Capture("resid_post"), to=tmp_path, on_bad="drop"),
        lambda: model.activations([GOOD], "resid_post", 1, on_bad="drop"),
    ):
        with pytest.raises(ParameterError, match="on_bad is 'drop'; allowed: 'raise', 'skip', 'truncate'"):
            call()


def test_the_command_leaves_out_lines(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, to = tmp_path / "prompts.jsonl", tmp_path / "acts"
    file.write_text('"The river runs"\n{"text": null}\n[5, 6.5]\n[]\n{"text": "to the sea"}\n[5, 9999]\n')
    asked = [str(path), "--prompts", str(file), "--to", str(to), "--site", "resid_post", "--backend", "transformers"]
    with pytest.raises(PromptError, match=r"prompts.jsonl:2: the columns are text"):
        main(asked)
    assert main([*asked, "--on-bad", "skip"]) == 0
    assert list(open_captures(to)) == ["1", "5"] and "2 of 6 prompts" in capsys.readouterr().out
