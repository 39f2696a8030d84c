"""The sites of queries, keys and values and the probabilities of attention (row N1) on vLLM, against plain transformers.

The oracle is the attention function of a copy of the model on plain transformers, recorded or changed (`tests/support/attended.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tiny_models
import torch
from attended import SITES, Attended, pushed
from engines import ENGINE, alive
from forked import forked

from midstream import VLLM, Capture, Patch, Plan, Steer
from midstream.errors import TraceError

pytestmark = pytest.mark.engine

# Longer than the sliding windows of 16 tokens, and than a KV block.
PROMPT = "The river runs from the mountains to the sea; the water is cold in the winter and warm in the summer."
LAYERS, AT = range(tiny_models.LAYERS), 2
STEPS = 4
MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "compiled": {},
    "ranks": {"enforce_eager": True, "tensor_parallel_size": 2},
}


@pytest.fixture(
    scope="module",
    params=[
        ("llama", "eager"),
        ("gemma2", "eager"),
        ("gemma2_transformers", "eager"),  # transformers' modules, and vLLM's attention
        pytest.param(("gemma2", "compiled"), marks=pytest.mark.matrix),
        pytest.param(("qwen3", "eager"), marks=pytest.mark.matrix),
        pytest.param(("gpt2", "eager"), marks=pytest.mark.matrix),
        pytest.param(("gpt_oss", "eager"), marks=pytest.mark.matrix),
        pytest.param(("llama", "ranks"), marks=pytest.mark.matrix),
        pytest.param(("llama_transformers", "compiled"), marks=pytest.mark.matrix),
        pytest.param(("olmo2", "eager"), marks=pytest.mark.matrix),
        pytest.param(("gpt_neox", "eager"), marks=pytest.mark.matrix),
        pytest.param(("llama_transformers", "ranks"), marks=pytest.mark.matrix),
    ],
    ids="-".join,
)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[VLLM, Attended]]:
    name, mode = request.param
    path = tiny_models.build(name, tmp_path_factory.mktemp("models"))
    engine = {
        **ENGINE,
        "max_model_len": 256,
        "gpu_memory_utilization": 0.1,
        "block_size": 32,
        "enable_prefix_caching": True,
    }
    with forked(), VLLM(str(path), **engine, **tiny_models.ARCHITECTURES[name].engine, **MODES[mode]) as model:
        yield model, Attended(path)
        assert not alive(model)


def tokens_of(prompt: str = PROMPT) -> list[int]:
    return tiny_models.tokenizer()(prompt)["input_ids"]


def close(value: torch.Tensor, expected: torch.Tensor, rtol: float = 1e-4) -> None:
    assert value.shape == expected.shape
    torch.testing.assert_close(value, expected, rtol=0, atol=float(rtol * expected.abs().max()))


def test_traces_read_what_transformers_computes(both: tuple[VLLM, Attended]) -> None:
    model, oracle = both

    def read(m: Any) -> Any:
        return [{site: getattr(m, site)[i] for site in reversed(SITES)} for i in LAYERS]

    seen, _ = oracle.run(tokens_of())
    for i, values in enumerate(model.run(read, PROMPT)):
        for site in SITES:
            close(values[site], seen[site, i])


def test_plans_capture_them(both: tuple[VLLM, Attended]) -> None:
    model, oracle = both
    plan = [Capture(site, layers="all", positions="all") for site in SITES]
    (output,) = model.generate(PROMPT, plan=plan, max_tokens=STEPS, temperature=0.0, ignore_eos=True)
    seen, _ = oracle.run([*tokens_of(), *output.outputs[0].token_ids[:-1]])
    for i in LAYERS:
        for site in SITES:
            close(output.captures[site, i], seen[site, i].flatten(1))
    single = Capture("attn_k", layers=1, head=1, positions="all_prompt")
    (output,) = model.generate(PROMPT, plan=single, max_tokens=1, temperature=0.0)
    close(output.captures["attn_k", 1], seen["attn_k", 1][: len(tokens_of()), 1])


def test_probabilities_are_what_transformers_reports(both: tuple[VLLM, Attended]) -> None:
    """Also after a plain request for the same prompt, whose keys are in the prefix cache."""
    model, oracle = both
    model.generate([PROMPT], max_tokens=1, temperature=0.0)
    prompts = [PROMPT, "The river runs from the sea"]
    found = model.run(lambda m: m.attention_probabilities[:], prompts, max_tokens=2, temperature=0.0)
    for prompt, values in zip(prompts, found, strict=True):
        for value, reported in zip(values, oracle.run(tokens_of(prompt))[1].attentions, strict=True):
            close(value, reported[0])


def test_probabilities_are_of_written_keys(both: tuple[VLLM, Attended]) -> None:
    model, oracle = both
    push = torch.randn(model.run(lambda m: m.attn_k[AT], PROMPT).shape[1:], generator=torch.Generator().manual_seed(1))

    def write(m: Any) -> Any:
        m.attn_k[AT][5] += push
        return m.attention_probabilities[AT]

    close(model.run(write, PROMPT), oracle.run(tokens_of(), pushed("attn_k", AT, [5], push))[1].attentions[AT][0])


@pytest.mark.parametrize("layer", [AT, LAYERS[-1]])
@pytest.mark.parametrize("site", SITES)
def test_a_write_changes_this_step_and_all_later_ones(both: tuple[VLLM, Attended], site: str, layer: int) -> None:
    """Written keys and values are in the KV cache, also those of the last layer. Others' requests for the same prompt do not get them."""
    model, oracle = both
    ids = tokens_of()
    seen, _ = oracle.run(ids)
    first = len(ids) - 2  # in the sliding window of the generated tokens
    push = torch.randn(seen[site, layer].shape[1:], generator=torch.Generator().manual_seed(1)) * 3
    expected = oracle.generate(ids, STEPS, pushed(site, layer, [first], push))
    clean = oracle.generate(ids, STEPS, lambda _, *qkv: qkv)

    def traced(m: Any, tracer: Any) -> Any:
        logits = []
        for step in tracer.iter[:]:
            if step == 0:
                getattr(m, site)[layer][first] += push
            logits.append(m.logits[0])
        return logits

    def logits(m: Any, tracer: Any) -> Any:
        return [m.logits[0] for _ in tracer.iter[:]]

    plan = [Steer(site, layers=layer, vector=push.flatten(), positions=[first])]
    settings = {"max_tokens": STEPS, "temperature": 0.0, "ignore_eos": True}
    close(torch.stack(model.run(traced, PROMPT, **settings)), expected)
    close(torch.stack(model.run(logits, PROMPT, plan=plan, **settings)), expected)
    close(torch.stack(model.run(logits, PROMPT, **settings)), clean)


@pytest.mark.parametrize("site", ["attn_k", "attn_v"])
def test_changed_keys_of_the_last_layer_are_never_shared(both: tuple[VLLM, Attended], site: str) -> None:
    """Requests without a plan and with one, in turn, for one prompt, whose blocks are in the prefix cache."""
    model, oracle = both
    ids = tokens_of(PROMPT * 2)
    last = LAYERS[-1]
    push = torch.randn(oracle.run(ids)[0][site, last].shape[1:], generator=torch.Generator().manual_seed(1)) * 10
    positions = [*range(2, len(ids) - 20)]
    clean = oracle.generate(ids, STEPS, lambda _, *qkv: qkv)
    changed = oracle.generate(ids, STEPS, pushed(site, last, positions, push))
    assert (clean - changed).abs().max() > 1e-2 * clean.abs().max()
    plan = [Steer(site, layers=last, vector=push.flatten(), positions=positions)]
    settings = {"max_tokens": STEPS, "temperature": 0.0, "ignore_eos": True, "logprobs": 5}
    for each, expected in [(None, clean), (plan, changed), (None, clean), (plan, changed)]:
        (output,) = model.generate(PROMPT * 2, plan=each, **settings)
        (completion,) = output.outputs
        logprobs = expected.log_softmax(-1)
        assert list(completion.token_ids) == expected.argmax(-1).tolist()
        for step, found in enumerate(completion.logprobs):
            for token, entry in found.items():
                assert abs(entry.logprob - float(logprobs[step, token])) < 1e-3 * float(expected.abs().max())


def test_single_heads_are_written(both: tuple[VLLM, Attended]) -> None:
    model, _ = both
    plan = Plan.of([Patch("attn_v", layer=1, position=-1, head=1, source="zeros")])
    clean = model.run(lambda m: m.attn_v[1], PROMPT)
    patched = model.run(lambda m: m.attn_v[1], PROMPT, plan=plan)
    assert torch.equal(patched[-1, 0], clean[-1, 0]) and (patched[-1, 1] == 0).all()


def test_generated_steps_and_writes_are_refused(both: tuple[VLLM, Attended]) -> None:
    model, _ = both

    def in_later_steps(m: Any, tracer: Any) -> Any:
        return [m.attention_probabilities[1] for _ in tracer.iter[:]]

    with pytest.raises(TraceError, match=r"attention_probabilities are those of the prompt, in step 0; this is step 1"):
        model.run(in_later_steps, PROMPT, max_tokens=2, temperature=0.0)

    def written(m: Any) -> None:
        m.attention_probabilities[1] = torch.zeros(())

    with pytest.raises(TraceError, match="attention_probabilities cannot be written"):
        model.run(written, PROMPT)
    with pytest.raises(TraceError, match="exists only in a trace"):
        _ = model.attention_probabilities
