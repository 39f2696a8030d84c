"""The sites of queries, keys and values and the probabilities of attention (row N1) on transformers, against plain transformers.

The oracle is the model's own `eager_attention_forward`, recorded or changed in a copy of the model that midstream has not touched, and
what it reports with `output_attentions`. `tests/engine/test_attention.py` has vLLM.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch
from attended import SITES, Attended, pushed

from midstream import Capture, LanguageModel, Patch, Steer
from midstream.arch import heads, split_heads
from midstream.errors import ArchitectureError, ParameterError, PlanError, TraceError, UnknownSiteError

# Longer than the sliding windows of 16 tokens.
PROMPT = "The river runs from the mountains to the sea; the water is cold in the winter and warm in the summer."
LAYERS = range(tiny_models.LAYERS)
NAMES = ["llama", "gemma2", "qwen3", "gpt2", "gpt_oss", "opt"]
AT, POSITION = 2, 3  # the layer and the position of the writes


@pytest.fixture(scope="module", params=NAMES)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LanguageModel, Attended]:
    folder = tmp_path_factory.getbasetemp() / "attention"
    path = tiny_models.build(request.param, folder)
    model = LanguageModel(str(path), attn_implementation="eager")
    return model, Attended(path)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return LanguageModel(str(tiny_models.build("llama", tmp_path_factory.getbasetemp() / "attention")))


def tokens_of(model: LanguageModel, prompt: str = PROMPT) -> list[int]:
    return model.tokenizer(prompt)["input_ids"]


def close(value: torch.Tensor, expected: torch.Tensor, rtol: float = 1e-5) -> None:
    assert value.shape == expected.shape
    torch.testing.assert_close(value, expected, rtol=0, atol=float(rtol * expected.abs().max()))


def test_traces_read_what_the_attention_function_gets(both: tuple[LanguageModel, Attended]) -> None:
    model, oracle = both
    seen, _ = oracle.run(tokens_of(model))

    def read(m: Any) -> Any:  # in any order: all three lie at one point
        return [{site: getattr(m, site)[i].clone() for site in reversed(SITES)} for i in LAYERS]

    with torch.no_grad():
        alone = model.run(read, PROMPT)
        generating = model.run(read, PROMPT, max_tokens=3, temperature=0.0)
    for values in (alone, generating):
        for i in LAYERS:
            for site in SITES:
                close(values[i][site], seen[site, i])
    config = model.module.config
    kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    assert alone[0]["attn_q"].shape[1:] == (config.num_attention_heads, 32)
    assert alone[0]["attn_k"].shape[1:] == alone[0]["attn_v"].shape[1:] == (kv_heads, 32)


def test_plans_capture_each_token_once(both: tuple[LanguageModel, Attended]) -> None:
    """With a cache the attention function gets keys of earlier tokens again: those are not this step's."""
    model, oracle = both
    plan = [Capture(site, layers="all", positions="all") for site in SITES]
    (output,) = model.generate(PROMPT, plan=plan, max_tokens=4, temperature=0.0)
    ids = [*tokens_of(model), *output.token_ids[:-1]]
    seen, _ = oracle.run(ids)
    for i in LAYERS:
        for site in SITES:
            close(output.captures[site, i], seen[site, i].flatten(1))
    head = Capture("attn_k", layers=1, head=1, positions="all_prompt")
    (single,) = model.generate(PROMPT, plan=head, max_tokens=1, temperature=0.0)
    close(single.captures["attn_k", 1], seen["attn_k", 1][: len(tokens_of(model)), 1])


def test_probabilities_are_what_transformers_reports(both: tuple[LanguageModel, Attended]) -> None:
    model, oracle = both
    _, output = oracle.run(tokens_of(model))
    with torch.no_grad():
        found = model.run(lambda m: m.attention_probabilities[:], PROMPT, max_tokens=2, temperature=0.0)
    for value, reported in zip(found, output.attentions, strict=True):
        close(value, reported[0])
    window = getattr(model.module.config, "sliding_window", None)
    if window is not None:
        assert (found[0][:, window, 0] == 0).all() and (found[1][:, window, 0] > 0).all()


def test_probabilities_of_padded_prompts(both: tuple[LanguageModel, Attended]) -> None:
    model, oracle = both
    prompts = [PROMPT, "The river runs from the sea"]
    with torch.no_grad(), model.trace() as tracer:
        with tracer.invoke(prompts[0]):
            long = model.attention_probabilities[1].save()
        with tracer.invoke(prompts[1]):
            short = model.attention_probabilities[1].save()
            keys = model.attn_k[2].save()
        with tracer.invoke([prompts[1], prompts[1]]):
            batch = model.attention_probabilities[1].save()
    seen, reported = oracle.run(tokens_of(model, prompts[1]))
    close(long, oracle.run(tokens_of(model))[1].attentions[1][0])
    close(short, reported.attentions[1][0])
    close(keys, seen["attn_k", 2])
    close(batch, reported.attentions[1].expand_as(batch))


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("way", ["trace", "plan"])
def test_a_write_changes_this_step_and_all_later_ones(
    both: tuple[LanguageModel, Attended], site: str, way: str
) -> None:
    """A written key or value stays in the cache. The oracle computes all tokens anew in each step, with the same change."""
    model, oracle = both
    ids, steps = tokens_of(model), 4
    shape = model.arch.binding(site, AT).heads
    push = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3
    first = len(ids) - 2  # within the sliding window of the generated tokens

    expected = oracle.generate(ids, steps, pushed(site, AT, [first], push))
    clean = oracle.generate(ids, steps, lambda _, *qkv: qkv)
    assert (expected[0] - clean[0]).abs().max() > 1e-3 * clean.abs().max()

    def traced(m: Any, tracer: Any) -> Any:
        logits = []
        for step in tracer.iter[:]:
            if step == 0 and way == "trace":
                getattr(m, site)[AT][first] += push
            logits.append(m.logits[0].clone())
        return logits

    plan = [Steer(site, layers=AT, vector=push.flatten(), positions=[first])] if way == "plan" else None
    with torch.no_grad():
        found = model.run(traced, PROMPT, plan=plan, max_tokens=steps, temperature=0.0, ignore_eos=True)
    close(torch.stack(found), expected, 1e-4)


def test_a_write_without_a_cache_keeps_other_values(both: tuple[LanguageModel, Attended]) -> None:
    """Values may lie in the output of a projection, which other code has read."""
    model, _ = both
    with torch.no_grad():
        clean = model.run(lambda m: m.attn_v[AT].clone(), PROMPT)

        def write(m: Any) -> Any:
            name = "c_attn" if hasattr(m, "transformer") else "v_proj"
            block = m.transformer.h[AT].attn if hasattr(m, "transformer") else None
            block = (
                block
                if block is not None
                else (m.model.decoder if hasattr(m.model, "decoder") else m.model).layers[AT].self_attn
            )
            projected = getattr(block, name).output
            before = projected.clone()
            m.attn_v[AT][:] = 0
            logits = m.logits
            return before, projected, logits

        before, after, _ = model.run(write, PROMPT)
    assert torch.equal(before, after) and clean.abs().max() > 0


def test_gradients(llama: LanguageModel) -> None:
    with llama.trace(PROMPT):
        keys, queries = llama.attn_k[1], llama.attn_q[1]
        with llama.logits.sum().backward():
            of_queries, of_keys = queries.grad.save(), keys.grad.save()
    assert of_keys.abs().max() > 0 and of_queries.abs().max() > 0


def test_single_heads_of_keys_and_values(llama: LanguageModel) -> None:
    """`head` counts key-value heads at `attn_k` and `attn_v`; sweeps count the heads of `attn_z`."""
    with torch.no_grad():
        clean = llama.run(lambda m: m.attn_v[1].clone(), PROMPT)
        plan = Patch("attn_v", layer=1, position=-1, head=1, source="zeros")
        patched = llama.run(lambda m: m.attn_v[1].clone(), PROMPT, plan=plan)
    assert torch.equal(patched[:-1], clean[:-1]) and torch.equal(patched[-1, 0], clean[-1, 0])
    assert (patched[-1, 1] == 0).all()
    with pytest.raises(PlanError, match=r"head"):
        llama.generate(PROMPT, plan=Capture("attn_k", layers=1, head=2), max_tokens=1)
    result = llama.sweep(
        "The river runs from the sea",
        "The water runs from the sea",
        " the",
        " a",
        sites="attn_z",
        heads="all",
        layers=[1],
        positions=[-1],
    )
    assert result.values["attn_z"].shape == (1, 4, 1)


def test_what_is_refused(llama: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> None:
    def in_later_steps(m: Any, tracer: Any) -> Any:
        return [m.attention_probabilities[1].clone() for _ in tracer.iter[:]]

    with pytest.raises(TraceError, match=r"attention_probabilities are those of the prompt, in step 0; this is step 1"):
        llama.run(in_later_steps, PROMPT, max_tokens=2, temperature=0.0)

    def written(m: Any) -> None:
        m.attention_probabilities[1] = torch.zeros(())

    with pytest.raises(TraceError, match="attention_probabilities cannot be written"):
        llama.run(written, PROMPT)
    with pytest.raises(UnknownSiteError, match="no layer 9"):
        llama.run(lambda m: m.attention_probabilities[9], PROMPT)
    config = llama.module.generation_config
    config.cache_implementation = "static"
    try:
        with pytest.raises(
            ParameterError, match=r"need transformers' dynamic cache; this model generates with StaticLayer"
        ):
            llama.generate(PROMPT, plan=Capture("attn_k", layers=1), max_tokens=2, temperature=0.0)
    finally:
        config.cache_implementation = None
    falcon = LanguageModel(str(tiny_models.build("falcon", tmp_path_factory.getbasetemp() / "attention")))
    with pytest.raises(UnknownSiteError, match="this model has no site 'attn_q'"):
        falcon.run(lambda m: m.attention_probabilities[1], PROMPT)
    with pytest.raises(PlanError, match="no site 'attn_k'"):
        falcon.generate(PROMPT, plan=Capture("attn_k"), max_tokens=1)


def test_the_model_computes_the_same_bits(both: tuple[LanguageModel, Attended]) -> None:
    model, oracle = both
    ids = torch.tensor([tokens_of(model)])
    with torch.no_grad():
        assert torch.equal(model.module(ids).logits, oracle.module(ids).logits)
    assert model.module.state_dict().keys() == oracle.module.state_dict().keys()
    before = [*model.module.modules()]
    split_heads(model.module)
    assert before == [*model.module.modules()]
    assert all(not isinstance(each, heads.Heads) for each in oracle.module.modules())


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        ({"alibi_slopes": torch.ones(4)}, r"does not support position biases \(ALiBi\), which layers\.0\.attn has"),
        ({"chunk_lookback": 1}, "does not support chunked attention"),
    ],
)
def test_attention_of_other_kinds_is_refused(feature: dict[str, Any], message: str) -> None:
    """Stand-ins for vLLM's attention layers."""
    stock = {"alibi_slopes": None, "scale": 0.5, "logits_soft_cap": 0, "sinks": None}
    layer = {"layer_name": "layers.0.attn", "sliding_window": 16, "use_mm_prefix": False}
    attention = type("Attention", (SimpleNamespace,), {})
    assert heads.settings_of(attention(**layer, impl=SimpleNamespace(**stock))) == heads.AttentionSettings(
        0.5, None, 16
    )
    with pytest.raises(ArchitectureError, match=message):
        heads.settings_of(attention(**layer, impl=SimpleNamespace(**(stock | feature))))
    with pytest.raises(ArchitectureError, match="chunked attention"):
        heads.settings_of(type("ChunkedLocalAttention", (attention,), {})(**layer, impl=SimpleNamespace(**stock)))
