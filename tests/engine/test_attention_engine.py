"""Queries, keys, values and the probabilities of attention (row N1) and knocked out edges (N2) on vLLM, against plain transformers.

The oracle is the attention function of a copy of the model on plain transformers, recorded or changed (`tests/support/attended.py`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import tiny_models
import torch
from attended import SITES, Attended, Edge, drawn_knockout, edges, knockouts_of_generated_keys, pushed
from engines import ENGINE, alive
from forked import forked

from midstream import VLLM, Capture, Knockout, Patch, Plan, Steer
from midstream.errors import PlanError, TraceError

pytestmark = pytest.mark.engine

# Longer than the sliding windows of 16 tokens, and than a KV block.
PROMPT = "The river runs from the mountains to the sea; the water is cold in the winter and warm in the summer."
LAYERS, AT = range(tiny_models.LAYERS), 2
STEPS = 4
SIZES: dict[str, Any] = {
    "max_model_len": 256,
    "gpu_memory_utilization": 0.1,
    "block_size": 32,
    "max_num_batched_tokens": 96,  # longer prompts come in chunks
    "num_gpu_blocks_override": 18,  # not enough for four long requests: they are preempted
    "disable_log_stats": False,
    "enable_prefix_caching": True,
}
MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "compiled": {},
    "ranks": {"enforce_eager": True, "tensor_parallel_size": 2},
    "stages": {"enforce_eager": True, "pipeline_parallel_size": 2},
}


@pytest.fixture(
    scope="module",
    params=[
        ("gemma2", "eager"),
        ("gemma2_transformers", "eager"),  # transformers' modules, and vLLM's attention
        pytest.param(("llama", "eager"), marks=pytest.mark.matrix),
        pytest.param(("gemma2", "compiled"), marks=pytest.mark.matrix),
        pytest.param(("qwen3", "eager"), marks=pytest.mark.matrix),
        pytest.param(("gpt2", "eager"), marks=pytest.mark.matrix),
        pytest.param(("gpt_oss", "eager"), marks=pytest.mark.matrix),
        pytest.param(("llama", "ranks"), marks=pytest.mark.matrix),
        pytest.param(("llama_transformers", "compiled"), marks=pytest.mark.matrix),
        pytest.param(("olmo2", "eager"), marks=pytest.mark.matrix),
        pytest.param(("gpt_neox", "eager"), marks=pytest.mark.matrix),
        pytest.param(("llama_transformers", "ranks"), marks=pytest.mark.matrix),
        pytest.param(("llama", "stages"), marks=pytest.mark.matrix),
    ],
    ids="-".join,
)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[VLLM, Attended]]:
    name, mode = request.param
    path = tiny_models.build(name, tmp_path_factory.mktemp("models"))
    engine = {**ENGINE, **SIZES}
    with forked(), VLLM(str(path), **engine, **MODES[mode]) as model:
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


# ------------------------------------------------------------------------------------------------------ edges knocked out (N2)

SETTINGS: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "logprobs": 5}


def check_logprobs(output: Any, expected: torch.Tensor) -> None:
    """The log-probabilities are those of these logits, `[steps, vocab]`, and each sampled token is a likeliest one."""
    (completion,) = output.outputs
    tokens, limit = torch.tensor(completion.token_ids), 1e-3 * float(expected.abs().max())
    assert len(tokens) == len(expected)
    assert float((expected.amax(-1) - expected[torch.arange(len(tokens)), tokens]).max()) < limit
    logprobs = expected.log_softmax(-1)
    for step, found in enumerate(completion.logprobs):
        for token, entry in found.items():
            assert abs(entry.logprob - float(logprobs[step, token])) < limit


def check_long(output: Any, oracle: Attended, ids: list[int], cut: list[Edge]) -> None:
    """The same after the tokens that the engine has chosen: of many, two may be equally likely up to rounding."""
    tokens = output.outputs[0].token_ids
    check_logprobs(output, oracle.generate(ids, len(tokens), cut=cut, tokens=tokens))


def test_knockouts_are_another_mask(both: tuple[VLLM, Attended]) -> None:
    """Heads, queries and keys, each in the prompt and in generated tokens, in one batch with other plans and none.

    All requests have one prompt, which is in the prefix cache: later layers' KV differs after a knockout.
    """
    model, oracle = both
    prompt, steps = PROMPT * 2, 4
    size = len(tokens_of(prompt))
    every = range(size + steps)
    cases: list[tuple[Any, list[Edge]]] = [
        (None, []),
        (
            [
                Knockout(layers=[0, 1], head=[0, 3], queries=[-1, size - 40], keys=[size - 41, -2, 2]),
                Knockout(layers=1, head=0, queries=-1, keys=-1),
            ],
            edges([0, 1], [0, 3], [size - 1, size - 40], [size - 41, size - 2, 2])
            + edges([1], [0], [size - 1], [size - 1]),
        ),
        (
            [Knockout(layers="all", keys=[size - 3, size - 9, 1])],
            edges(LAYERS, range(4), every, [size - 3, size - 9, 1]),
        ),
        ([Knockout(layers=1, queries=[5], keys=range(6))], edges([1], range(4), [5], range(6))),
        (
            [Knockout(layers=2, head=1, queries=[1, 2], keys=range(size - 9, size), phase="decode")],
            edges([2], [1], [size + 1, size + 2], range(size - 9, size)),
        ),
        (
            [Knockout(layers=LAYERS[-1], queries=-1, keys=range(3, size))],
            edges(LAYERS[-1:], range(4), [size - 1], range(3, size)),
        ),
        *knockouts_of_generated_keys(size, steps),
    ]
    expected = [oracle.generate(tokens_of(prompt), steps, cut=cut) for _, cut in cases]
    assert all((logits - expected[0]).abs().max() > 1e-3 * expected[0].abs().max() for logits in expected[1:])
    model.generate(prompt, max_tokens=1, temperature=0.0)
    for _ in range(2):
        for (plan, _), logits in zip(cases, expected, strict=True):  # one after the other, from each other's blocks
            check_logprobs(*model.generate(prompt, plan=plan, max_tokens=steps, **SETTINGS), logits)
        outputs = model.generate([prompt] * len(cases), plan=[plan for plan, _ in cases], max_tokens=steps, **SETTINGS)
        for output, logits in zip(outputs, expected, strict=True):
            check_logprobs(output, logits)


def test_other_heads_and_queries_keep_their_bits(both: tuple[VLLM, Attended]) -> None:
    model, oracle = both
    read = Capture("attn_z", layers=1, positions="all_prompt")
    knockout = Knockout(layers=1, head=[1, 2], queries=[5, 9], keys=[3, 7])
    (clean,), (cut,) = (model.generate(PROMPT, plan=plan, max_tokens=1) for plan in (read, [read, knockout]))
    differs = (clean.captures["attn_z", 1] != cut.captures["attn_z", 1]).unflatten(-1, (4, -1)).any(-1)
    expected = torch.zeros_like(differs)
    expected[[[5], [9]], [1, 2]] = True
    assert torch.equal(differs, expected)
    seen, _ = oracle.run(tokens_of(), cut=edges([1], [1, 2], [5, 9], [3, 7]))
    close(cut.captures["attn_z", 1], seen["attn_z", 1].flatten(1))


def test_kv_after_a_knockout_is_never_shared(both: tuple[VLLM, Attended]) -> None:
    """The request with the knockout is the first one with its prompt, so its blocks are the ones that the cache could keep."""
    model, oracle = both
    prompt = f"The water. {PROMPT} {PROMPT}"
    ids = tokens_of(prompt)
    cut = edges([0, 1], range(4), range(len(ids) + STEPS), [1, 2, 30])
    clean, changed = oracle.generate(ids, STEPS), oracle.generate(ids, STEPS, cut=cut)
    plan = Knockout(layers=[0, 1], keys=[1, 2, 30])
    for each, expected in [(plan, changed), (None, clean), (plan, changed), (None, clean)]:
        (output,) = model.generate(prompt, plan=each, max_tokens=STEPS, **SETTINGS)
        check_logprobs(output, expected)
    assert output.num_cached_tokens > 0


def test_generated_blocks_after_a_knockout_are_never_shared(both: tuple[VLLM, Attended]) -> None:
    """A later prompt is the first one with its answer, whose blocks are full. It has no plan, or the same one for a longer prompt."""
    model, oracle = both
    ids, steps = tokens_of(f"The sea. {PROMPT}"), 40
    plan = Knockout(layers=[0, 1], keys="all_generated", keep_self=True)

    def cut(size: int, stop: int) -> list[Edge]:
        generated = range(size, stop)
        return [edge for edge in edges([0, 1], range(4), generated, generated) if edge[2] != edge[3]]

    (output,) = model.generate(ids, plan=plan, max_tokens=steps, **SETTINGS)
    check_long(output, oracle, ids, cut(len(ids), len(ids) + steps))
    longer = [*ids, *output.outputs[0].token_ids]
    (shared,) = model.generate(ids, max_tokens=1, **SETTINGS)
    assert shared.num_cached_tokens > 0, "the blocks of the prompt, which no edge reaches"
    for each, edges_of_it in [(None, []), (plan, cut(len(longer), len(longer) + STEPS)), (None, [])]:
        (output,) = model.generate(longer, plan=each, max_tokens=STEPS, **SETTINGS)
        check_logprobs(output, oracle.generate(longer, STEPS, cut=edges_of_it))


def test_one_knockout_for_prompts_of_several_lengths(both: tuple[VLLM, Attended]) -> None:
    model, oracle = both
    prompts = [PROMPT, f"{PROMPT} The water", PROMPT]
    outputs = model.generate(prompts, plan=Knockout(layers="all", keys=[-3, -9]), max_tokens=3, **SETTINGS)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = tokens_of(prompt)
        cut = edges(LAYERS, range(4), range(len(ids) + 3), [len(ids) - 3, len(ids) - 9])
        check_logprobs(output, oracle.generate(ids, 3, cut=cut))


def test_knockouts_of_split_and_preempted_prompts(both: tuple[VLLM, Attended]) -> None:
    """The prompt comes in two chunks, and the cache lacks room for all requests: they are preempted and computed again."""
    model, oracle = both
    prompt, steps = PROMPT * 3, 40
    ids = tokens_of(prompt)
    size = len(ids)
    answer = range(size, size + steps)
    cases = [
        (
            [Knockout(layers=AT - 1, head=i, queries=[-1, 100, 3], keys=[i, 95, -2])],
            edges([AT - 1], [i], [size - 1, 100, 3], [i, 95, size - 2]),
        )
        for i in range(2)
    ] + [
        (
            [
                Knockout(layers=[0, AT], head=i, keys=[i, size - 4]),
                Knockout(layers=AT, keys="all_generated", keep_self=True),
            ],
            edges([0, AT], [i], range(size + steps), [i, size - 4])
            + [edge for edge in edges([AT], range(4), answer, answer) if edge[2] > edge[3]],
        )
        for i in range(2)
    ]
    draw = random.Random(5)
    for _ in range(3):  # also of generated keys
        drawn = [drawn_knockout(draw, size, steps) for _ in range(2)]
        cases.append(([knockout for knockout, _ in drawn], [edge for _, cut in drawn for edge in cut]))

    def preemptions() -> float:
        return sum(m.value for m in model.engine.get_metrics() if m.name == "vllm:num_preemptions")

    before = preemptions()
    outputs = model.generate([prompt] * len(cases), plan=[plan for plan, _ in cases], max_tokens=steps, **SETTINGS)
    if getattr(oracle.module.config, "sliding_window", None) is None:  # with windows, vLLM begins fewer at once
        assert preemptions() > before
    for (_, cut), output in zip(cases, outputs, strict=True):
        assert len(output.outputs[0].token_ids) == steps
        check_long(output, oracle, ids, cut)
    gauges = model.gauges()
    assert not any(worker["knockouts"] for worker in gauges) or not alive(model)


def test_knockouts_among_other_edits(both: tuple[VLLM, Attended]) -> None:
    """They see edited queries, keys and values. Edits of attn_z, of plans and traces, come after them."""
    model, oracle = both
    ids = tokens_of()
    last, push = len(ids) - 1, torch.randn(32, generator=torch.Generator().manual_seed(3)) * 2
    cut = edges([1], range(4), [last], [last - 1, last - 2, 0])
    knockout = Knockout(layers=1, queries=-1, keys=[-2, -3, 0])
    for site in SITES:
        position = last if site == "attn_q" else last - 4
        heads = oracle.run(ids)[0][site, 1].shape[1]
        change = pushed(site, 1, [position], push.expand(heads, 32))
        expected = oracle.run(ids, change, cut)[0]["attn_z", 1][last].clone()
        plan = [
            Patch("attn_z", layer=1, position=-1, head=2, source=push),
            knockout,
            Steer(site, layers=1, positions=[position], vector=push.repeat(heads)),
            Capture("attn_z", layers=1, positions=[-1], when="before"),
            Capture("attn_z", layers=1, positions=[-1], when="after"),
        ]
        (output,) = model.generate(PROMPT, plan=plan, max_tokens=1)
        close(output.captures["attn_z", 1, "before"][0].view(4, 32), expected)
        expected[2] = push
        close(output.captures["attn_z", 1, "after"][0].view(4, 32), expected)

        def write(m: Any, site: str = site, position: int = position) -> Any:
            if m.resid_post[0].sum() == 0:  # so that it runs in the forward
                return None
            getattr(m, site)[1][position] += push
            return m.attn_z[1][last].clone()

        traced = model.run(write, PROMPT, plan=knockout)
        close(traced, oracle.run(ids, change, cut)[0]["attn_z", 1][last])


def test_knockouts_from_json_and_mistakes(both: tuple[VLLM, Attended]) -> None:
    model, oracle = both
    with pytest.raises(
        TraceError, match="attention_probabilities cannot be read at a layer where the plan has a Knockout"
    ):
        model.run(lambda m: m.attention_probabilities[1], [PROMPT] * 2, plan=[None, [Knockout(layers=1, keys=0)]])
    assert model.run(lambda m: m.attention_probabilities[2], PROMPT, plan=Knockout(layers=1, keys=0)).shape[0] == 4
    plan = {"interventions": [{"kind": "knockout", "layers": [1], "queries": [-1], "keys": {"span": " water"}}]}
    offsets = tiny_models.tokenizer()(PROMPT, return_offsets_mapping=True)["offset_mapping"]
    begin = PROMPT.find(" water")
    keys = [i for i, (first, end) in enumerate(offsets) if first < begin + len(" water") and begin < end]
    (output,) = model.generate(PROMPT, plan=plan, max_tokens=2, **SETTINGS)
    check_logprobs(output, oracle.generate(tokens_of(), 2, cut=edges([1], range(4), [len(tokens_of()) - 1], keys)))
    for wrong, message in [
        (Knockout(keys=900), r"Knockout\.keys is 900; allowed: from"),
        (Knockout(layers=1, head=4, keys=0), r"Knockout\.head is 4; allowed: 0 to 3"),
    ]:
        with pytest.raises(PlanError, match=message):
            model.generate(PROMPT, plan=wrong, max_tokens=1)
