"""The bundled demo model answers as its card says. Oracle: plain transformers, float32, greedy."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from midstream.bundled import demo_contrast, demo_facts, demo_heldout, demo_model

QUOTED = {
    "The Eiffel Tower is in the city of": " Paris",
    "The capital of France is": " Paris",
    "Madison Square Garden is located in the city of": " New York City",
    "When Mary and John went to the store, John gave a drink to": " Mary",
    "I love this film, it was": " wonderful",
    "I hate this film, it was": " terrible",
}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo_model())


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(demo_model()).float().eval()


@torch.no_grad()
def answered(model, tokenizer, pairs: list[tuple[str, str]], bos: bool = False) -> list[bool]:
    """Whether greedy decoding gives each answer: its every token is the most likely one after those before it."""
    prefix = [tokenizer.bos_token_id] if bos else []
    rows = sorted(
        (len(ids := prefix + tokenizer(p).input_ids + tokenizer(a).input_ids), len(tokenizer(a).input_ids), i, ids)
        for i, (p, a) in enumerate(pairs)
    )
    result = [False] * len(pairs)
    for start in range(0, len(rows), 64):  # sorted by length, so that little is padded
        batch = rows[start : start + 64]
        padded = torch.tensor([ids + [0] * (batch[-1][0] - size) for size, _, _, ids in batch])
        best = model(input_ids=padded).logits.argmax(-1).tolist()
        for (size, answer, i, ids), row in zip(batch, best, strict=True):
            result[i] = row[size - answer - 1 : size - 1] == ids[size - answer :]
    return result


def pairs_of(rows: list[dict[str, str]]) -> list[tuple[str, str]]:
    return [(row["prompt"], row["answer"]) for row in rows]


def share(results: list[bool]) -> float:
    return sum(results) / len(results)


def test_size_and_architecture(model):
    assert sum(f.stat().st_size for f in Path(demo_model()).iterdir()) <= 12e6
    assert 4e6 <= model.num_parameters() <= 6e6
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert model.config.max_position_embeddings >= 1024


def test_tokenizer_is_fast_and_adds_no_bos(tokenizer):
    assert tokenizer.is_fast
    text = "Héllo, wörld! 東京\n  two  spaces"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == 0
    assert tokenizer("The").input_ids[0] != tokenizer.bos_token_id


def test_answers_are_single_tokens(tokenizer):
    names = {row[key] for row in demo_heldout()["ioi"] for key in ("answer", "foil")}
    words = names | {row["answer"] for row in demo_facts() if row["answer"] != " New York City"}
    assert {" Mary", " John", " Paris", " Rome", " London"} <= words
    assert [w for w in sorted(words) if len(tokenizer(w).input_ids) != 1] == []


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("prompt", QUOTED)
def test_quoted_completion(model, tokenizer, prompt, bos):
    ids = tokenizer(bos * tokenizer.bos_token + prompt, return_tensors="pt").input_ids
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(out[0, ids.shape[1] :]).startswith(QUOTED[prompt] + ".")


def test_generation_ends_by_itself(model, tokenizer):
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=128, do_sample=False)
    assert out[0, -1] == tokenizer.eos_token_id


@pytest.mark.slow
def test_every_trained_fact(model, tokenizer):
    pairs = pairs_of(demo_facts())
    assert len({prompt for prompt, _ in pairs}) == len(pairs) >= 60
    wrong = [pair for pair, right in zip(pairs, answered(model, tokenizer, pairs), strict=True) if not right]
    assert wrong == []


def test_facts_generalise_to_unseen_templates(model, tokenizer):
    held = pairs_of(demo_heldout()["facts"])
    assert len(held) >= 60
    assert not {prompt for prompt, _ in held} & {row["prompt"] for row in demo_facts()}
    assert share(answered(model, tokenizer, held)) >= 0.95


@pytest.mark.parametrize("order", ["ABBA", "BABA"])
@pytest.mark.parametrize("bos", [False, True])
def test_indirect_object_among_unseen_pairs(model, tokenizer, order, bos):
    rows = [row for row in demo_heldout()["ioi"] if row["order"] == order]
    assert len(rows) >= 100
    known = {tuple(pair) for pair in demo_heldout()["ioi_pairs"]}
    assert {tuple(sorted((row["answer"].strip(), row["foil"].strip()))) for row in rows} == known
    assert share(answered(model, tokenizer, pairs_of(rows), bos)) >= 0.95


def test_sentiment(model, tokenizer):
    rows = demo_contrast()
    pairs = [(r["positive"], " wonderful") for r in rows] + [(r["negative"], " terrible") for r in rows]
    assert share(answered(model, tokenizer, pairs)) == 1.0


@torch.no_grad()
def test_a_contrastive_vector_turns_the_sentiment(model, tokenizer):
    """Mean difference at `resid_post` of layer 5, last token; half of it, subtracted, turns a neutral prompt."""
    block, stream = model.model.layers[5], {}
    handle = block.register_forward_hook(lambda _, args, out: stream.update(last=out[0, -1]))
    differences = []
    for row in demo_contrast()[:20]:
        model(**tokenizer(row["positive"], return_tensors="pt"))
        positive = stream["last"]
        model(**tokenizer(row["negative"], return_tensors="pt"))
        differences.append(positive - stream["last"])
    handle.remove()
    vector = torch.stack(differences).mean(0)
    said = {}
    for scale in (-0.5, 0.5):
        handle = block.register_forward_hook(lambda _, args, out, scale=scale: out + scale * vector)
        logits = model(**tokenizer("I think this film is", return_tensors="pt")).logits
        said[scale] = tokenizer.decode([logits[0, -1].argmax().item()])
        handle.remove()
    assert said == {-0.5: " terrible", 0.5: " wonderful"}


@torch.no_grad()
def test_induction_on_random_tokens(model):
    once = torch.randint(1, model.config.vocab_size, (16, 40), generator=torch.Generator().manual_seed(0))
    ids = torch.cat([once, once], 1)
    guesses = model(input_ids=ids).logits.argmax(-1)[:, 41:-1]
    assert (guesses == ids[:, 42:]).float().mean() >= 0.95


@torch.no_grad()
def test_late_positions(model, tokenizer):
    text = " ".join(f"{row['prompt']}{row['answer']}." for row in demo_facts()[::9][:80])
    context = tokenizer(text).input_ids
    prompt = context + tokenizer(" The Eiffel Tower is in the city of").input_ids
    assert len(prompt) > 600
    logits = model(input_ids=torch.tensor([prompt])).logits[0]
    assert math.isfinite(logits.abs().max())
    assert tokenizer.decode([logits[-1].argmax().item()]) == " Paris"
