"""Chat messages as prompts (row F9), on both backends and, with --remote, on a server. Expected texts are written out by hand."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from oracle import Plain, close
from plan_cases import tokens, vector
from tokenizers.processors import TemplateProcessing

from midstream import Capture, Patch, Span, Steer
from midstream.errors import PromptError

TEMPLATE = (
    "<|endoftext|>{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
ASKED = [{"role": "user", "content": "The capital of France?"}]
ITALY = [{"role": "user", "content": "The capital of Italy?"}]
BEGUN = [*ASKED, {"role": "assistant", "content": "The capital of France is"}]
TEXTS = {  # of ASKED, ITALY and BEGUN
    "asked": "<|endoftext|>user: The capital of France?\nassistant:",
    "italy": "<|endoftext|>user: The capital of Italy?\nassistant:",
    "begun": "<|endoftext|>user: The capital of France?\nassistant: The capital of France is",
}


@pytest.fixture
def chats(model: Any, plain: Plain) -> Iterator[dict[str, list[int]]]:
    """The token ids of the chats, by names."""
    before, model.tokenizer.chat_template = model.tokenizer.chat_template, TEMPLATE
    yield {name: plain.ids(text) for name, text in TEXTS.items()}
    model.tokenizer.chat_template = before


def test_generate(model: Any, plain: Plain, chats: dict[str, list[int]]) -> None:
    (output,) = model.generate(ASKED, max_tokens=3, ignore_eos=True)
    assert list(output.prompt_token_ids) == chats["asked"]
    assert tokens(output) == plain.generate(chats["asked"], 3)
    outputs = model.generate([ASKED, "Paris", BEGUN], max_tokens=1)
    assert [list(each.prompt_token_ids) for each in outputs] == [chats["asked"], plain.ids("Paris"), chats["begun"]]
    outputs = model.generate((chat for chat in (ASKED, BEGUN)), plan=Capture("resid_post", layers=3), max_tokens=1)
    assert [list(each.prompt_token_ids) for each in outputs] == [chats["asked"], chats["begun"]]


def test_trace_and_invoke(model: Any, plain: Plain, chats: dict[str, list[int]]) -> None:
    with model.trace(BEGUN):
        h = model.layers_output[3].save()
    close(h.reshape(-1, 256), plain.run(chats["begun"]).sites["resid_post", 3])
    with model.trace() as tracer:
        with tracer.invoke(ASKED):
            first = model.logits.save()
        with tracer.invoke(BEGUN):
            second = model.logits.save()
    close(first[0], plain.run(chats["asked"]).logits[-1])
    close(second[0], plain.run(chats["begun"]).logits[-1])
    output = model(ASKED)
    assert list(output.prompt_token_ids) == chats["asked"]


def test_run(model: Any, plain: Plain, chats: dict[str, list[int]]) -> None:
    def logits(model: Any) -> Any:
        return model.logits

    close(model.run(logits, ASKED)[0], plain.run(chats["asked"]).logits[-1])
    for name, found in zip(("asked", "begun"), model.run(logits, [ASKED, BEGUN]), strict=True):
        close(found[0], plain.run(chats[name]).logits[-1])


def test_record_and_collect(model: Any, plain: Plain, chats: dict[str, list[int]], tmp_path: Path) -> None:
    run = model.record(ASKED, "resid_post", layers=[2], name="chat")
    assert list(run.prompt_token_ids) == chats["asked"]
    model.runs.delete("chat")
    store = model.collect([ASKED, BEGUN], plan=Capture("resid_post", layers=2), to=tmp_path)
    assert [capture.prompt_token_ids for capture in store.values()] == [chats["asked"], chats["begun"]]


def test_a_span_in_a_chat(model: Any, plain: Plain, chats: dict[str, list[int]]) -> None:
    v, ids = vector(1), chats["begun"]
    plan = [
        Patch("resid_post", layer=2, position=Span("France", 1), source=v),
        Capture("resid_post", layers=2, positions="all_prompt", when="after"),
    ]
    (output,) = model.generate(BEGUN, plan=plan, max_tokens=1)
    place = [number for number, token in enumerate(ids) if "France" in plain.decode([token])][-1]
    expected = plain.run(ids).sites["resid_post", 2].clone()
    expected[place] = v
    close(output.captures["resid_post", 2, "after"], expected)


def test_sweep(model: Any, plain: Plain, chats: dict[str, list[int]]) -> None:
    for clean, corrupt in ((ASKED, ITALY), ([ASKED, ASKED], [ITALY, ITALY])):
        result = model.sweep(clean, corrupt, " Paris", " Rome", layers=[3], positions=[-1], progress=False)
        pairs = result.outline.pairs
        assert len(pairs) == (1 if clean is ASKED else 2)
        assert all("".join(pair.clean) == TEXTS["asked"] for pair in pairs)
        assert all("".join(pair.corrupt) == TEXTS["italy"] for pair in pairs)
        logits = plain.run(chats["asked"]).logits[-1]
        expected = float(logits[plain.token(" Paris")] - logits[plain.token(" Rome")])
        assert float(result.clean[0, 0] - result.clean[0, 1]) == pytest.approx(expected, abs=2e-3)


def test_a_plan_for_each_chat(model: Any, plain: Plain, chats: dict[str, list[int]]) -> None:
    v = vector(2)
    plans = [[Steer("resid_post", layers=4, vector=v)], None]
    outputs = model.generate([ASKED, BEGUN], plan=plans, max_tokens=3, ignore_eos=True)
    assert tokens(outputs[0]) == plain.generate(chats["asked"], 3, {("resid_post", 4): lambda h: h + v})
    assert tokens(outputs[1]) == plain.generate(chats["begun"], 3)


def test_what_is_no_chat_is_refused_in_words(model: Any, chats: dict[str, list[int]]) -> None:
    model.tokenizer.chat_template = None
    with pytest.raises(PromptError, match=r"no chat template. Set one, model.tokenizer.chat_template = "):
        model.generate(ASKED)
    model.tokenizer.chat_template = "{{ raise_exception('users and assistants take turns') }}"
    with pytest.raises(PromptError, match="does not take these messages: users and assistants take turns"):
        model.generate(ASKED)
    with pytest.raises(PromptError, match="images, sound or video"):
        model.generate([{"role": "user", "content": [{"type": "image", "url": "cat.png"}]}])
    with pytest.raises(PromptError, match="or a list of chat messages"):
        model.generate([ASKED[0], "and a text"])


def test_a_second_token_of_the_beginning_warns_wherever_a_prompt_is_text(
    model: Any, plain: Plain, tmp_path: Path
) -> None:
    """A rendered chat has the token that the tokenizer adds again. The warning's text is constant, so Python shows it once."""
    backend = model.tokenizer._tokenizer
    before, bos = backend.post_processor, model.tokenizer.bos_token
    assert bos is not None
    backend.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, model.tokenizer.bos_token_id)]
    )
    rendered, run = f"{bos}user: The capital of France?", {"max_tokens": 1}
    calls = {
        "generate": lambda text: model.generate(text, **run),
        "run": lambda text: model.run(lambda m: m.logits, text),
        "record": lambda text: model.record(text, sites=["resid_post"], name="text"),
        "activations": lambda text: list(model.activations([text], "resid_post", 3)),
        "collect": lambda text: model.collect(
            [text], plan=Capture("resid_post", layers=3), to=tmp_path / str(len(text))
        ),
        "sweep": lambda text: model.sweep(
            text, text.replace("France", "Italy"), " Paris", " Rome", layers=[3], positions=[0]
        ),
    }
    try:
        for name, call in calls.items():
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                call("user: The capital of France?")
                assert not [each for each in seen if "has put another one" in str(each.message)], name
                call(rendered)
            assert [each for each in seen if "has put another one before it" in str(each.message)], name
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            with model.trace(rendered):
                model.logits.save()
            assert any("has put another one before it" in str(each.message) for each in seen)
    finally:
        backend.post_processor = before
    model.runs.delete("text")  # the model is that of other tests, too
