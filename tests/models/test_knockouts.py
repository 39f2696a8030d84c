"""Edges of attention knocked out (row N2) on transformers, against plain transformers with another attention mask.

`tests/engine/test_attention_engine.py` has vLLM.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from attended import Attended, drawn_knockout, edges, knockouts_of_generated_keys, pushed
from toy_selector import Every

from midstream import Capture, Clamp, GeneratedTokens, Knockout, LanguageModel, Patch, Plan, Probe, Span, Steer, When
from midstream.arch import heads
from midstream.errors import CaptureError, PlanError, TraceError
from midstream.plan.ops.knockout import Knockouts
from midstream.plan.selections import Selector
from midstream.plan.values import ModelFacts, check

# Longer than the sliding windows of 16 tokens.
PROMPT = "The river runs from the mountains to the sea; the water is cold in the winter and warm in the summer."
LAYERS = range(tiny_models.LAYERS)
NAMES = ["llama", "gemma2", "gpt2", "gpt_oss", "qwen3"]
AT = 1


@pytest.fixture(scope="module", params=NAMES)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LanguageModel, Attended]:
    path = tiny_models.build(request.param, tmp_path_factory.getbasetemp() / "attention")
    return LanguageModel(str(path), attn_implementation="eager"), Attended(path)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[LanguageModel, Attended]:
    path = tiny_models.build("llama", tmp_path_factory.getbasetemp() / "attention")
    return LanguageModel(str(path), attn_implementation="sdpa"), Attended(path)


def tokens_of(prompt: str = PROMPT) -> list[int]:
    return tiny_models.tokenizer()(prompt)["input_ids"]


def close(value: torch.Tensor, expected: torch.Tensor, rtol: float = 1e-5) -> None:
    assert value.shape == expected.shape
    torch.testing.assert_close(value, expected, rtol=0, atol=float(rtol * expected.abs().max()))


def test_heads_queries_and_keys(both: tuple[LanguageModel, Attended]) -> None:
    """Several knockouts at one layer, in all tokens of the prompt and of what is generated."""
    model, oracle = both
    ids, steps = tokens_of(), 4
    size = len(ids)
    plan = [
        Knockout(layers=[0, AT], head=[0, 3], queries=[-1, size - 4], keys=[size - 5, -8, 2]),
        Knockout(layers=AT, head=0, queries=-1, keys=[-1, -2]),
        Knockout(layers=2, keys=[size - 3], phase="decode"),
        Knockout(layers=3, head=2, queries=[1], keys=range(size - 9, size), phase="decode"),
        Knockout(layers=3, head=1, keys=range(4, size)),
        Capture("attn_z", layers="all", positions="all"),
    ]
    cut = [
        *edges([0, AT], [0, 3], [size - 1, size - 4], [size - 5, size - 8, 2]),
        *edges([AT], [0], [size - 1], [size - 1, size - 2]),
        *edges([2], range(4), range(size, size + steps), [size - 3]),
        *edges([3], [2], [size + 1], range(size - 9, size)),
        *edges([3], [1], range(size + steps), range(4, size)),
    ]
    expected = oracle.generate(ids, steps, cut=cut)
    clean = oracle.generate(ids, steps)
    assert ((expected - clean).abs().amax(-1) > 1e-2 * clean.abs().max()).all()

    def logits(m: Any, tracer: Any) -> Any:
        return [m.logits[0].clone() for _ in tracer.iter[:]]

    settings = {"max_tokens": steps, "temperature": 0.0}
    with torch.no_grad():
        close(torch.stack(model.run(logits, PROMPT, plan=plan[:-1], ignore_eos=True, **settings)), expected, 1e-4)
        close(torch.stack(model.run(logits, PROMPT, ignore_eos=True, **settings)), clean, 1e-4)
    (output,) = model.generate(PROMPT, plan=plan, ignore_eos=True, **settings)
    assert output.token_ids == expected.argmax(-1).tolist()
    all_ids = [*ids, *output.token_ids[:-1]]
    seen, _ = oracle.run(all_ids, cut=[edge for edge in cut if edge[2] < len(all_ids) and edge[3] <= edge[2]])
    for layer in LAYERS:
        close(output.captures["attn_z", layer], seen["attn_z", layer].flatten(1), 1e-4)


def logits_of(model: LanguageModel, prompts: list[str], plans: list[Any], steps: int) -> list[torch.Tensor]:
    """`[steps, vocab]` for each prompt, of one batch."""

    def logits(m: Any, tracer: Any) -> Any:
        return [m.logits[0].clone() for _ in tracer.iter[:]]

    with torch.no_grad():
        found = model.run(logits, prompts, plan=plans, max_tokens=steps, temperature=0.0, ignore_eos=True)
    return [torch.stack(each) for each in found]


def test_generated_tokens_as_keys(both: tuple[LanguageModel, Attended]) -> None:
    """In a padded batch of two prompts, one of them longer than the sliding windows."""
    model, oracle = both
    steps, prompts = 5, ["The water is cold", PROMPT]
    sizes = [len(tokens_of(prompt)) for prompt in prompts]
    clean = [oracle.generate(tokens_of(prompt), steps) for prompt in prompts]
    for of_each in zip(*(knockouts_of_generated_keys(size, steps) for size in sizes), strict=True):
        found = logits_of(model, prompts, [plan for plan, _ in of_each], steps)
        for prompt, (_, cut), logits, plain in zip(prompts, of_each, found, clean, strict=True):
            expected = oracle.generate(tokens_of(prompt), steps, cut=cut)
            assert (expected - plain).abs().max() > 1e-2 * plain.abs().max()
            close(logits, expected, 1e-4)


@dataclass(frozen=True)
class InTable(Selector):
    """The first generated token. Like a table, it has no answer for the eleventh."""

    kind = "in_table"

    def of_generated(self, numbers: np.ndarray) -> np.ndarray:
        return np.arange(10)[numbers] == 0


def test_a_selector_that_knows_no_later_tokens(llama: tuple[LanguageModel, Attended]) -> None:
    """Selectors are asked ahead; an error there is none of the request."""
    model, _ = llama
    plans = [Knockout(keys=keys, keep_self=True) for keys in (InTable(), GeneratedTokens(0))]
    same = logits_of(model, ["The water is cold"] * 2, plans, 4)
    close(*same, 1e-6)
    with pytest.raises(CaptureError, match="out of bounds"):
        logits_of(model, ["The water is cold"], plans[:1], 14)


def test_random_knockouts(both: tuple[LanguageModel, Attended]) -> None:
    model, oracle = both
    draw, steps = random.Random(7), 6
    prompts = ["The water is cold", PROMPT] * 3
    cases = [[drawn_knockout(draw, len(tokens_of(prompt)), steps) for _ in range(2)] for prompt in prompts]
    found = logits_of(model, prompts, [[knockout for knockout, _ in case] for case in cases], steps)
    for prompt, case, logits in zip(prompts, cases, found, strict=True):
        cut = [edge for _, edges in case for edge in edges]
        close(logits, oracle.generate(tokens_of(prompt), steps, cut=cut), 1e-4)


def test_other_heads_and_queries_keep_their_bits(both: tuple[LanguageModel, Attended]) -> None:
    model, _ = both
    read = Capture("attn_z", layers=AT, positions="all_prompt")
    knockout = Knockout(layers=AT, head=[1, 2], queries=[5, 9], keys=[3, 7])
    (clean,), (cut,) = (model.generate(PROMPT, plan=plan, max_tokens=1) for plan in (read, [read, knockout]))
    differs = (clean.captures["attn_z", AT] != cut.captures["attn_z", AT]).unflatten(-1, (4, -1)).any(-1)
    expected = torch.zeros_like(differs)
    expected[[[5], [9]], [1, 2]] = True
    assert torch.equal(differs, expected)
    # Edges that the model does not have.
    later = Knockout(layers=AT, queries=[5, 9], keys=[10, -1])
    (same,) = model.generate(PROMPT, plan=[read, later], max_tokens=1)
    assert torch.equal(same.captures["attn_z", AT], clean.captures["attn_z", AT])


def test_a_query_without_keys_gets_zeros(both: tuple[LanguageModel, Attended]) -> None:
    model, oracle = both
    size = len(tokens_of())
    plan = [
        Knockout(layers=AT, head=1, queries=[0, -1], keys=range(size)),
        Capture("attn_z", layers=[AT, AT + 1], positions="all_prompt"),
    ]
    (output,) = model.generate(PROMPT, plan=plan, max_tokens=1)
    found = output.captures["attn_z", AT].unflatten(-1, (4, -1))
    assert (found[[0, -1], 1] == 0).all() and (found[1:-1, 1] != 0).any(-1).all()
    seen, _ = oracle.run(tokens_of(), cut=edges([AT], [1], [0, size - 1], range(size)))
    close(output.captures["attn_z", AT + 1], seen["attn_z", AT + 1].flatten(1), 1e-4)


def test_padded_batches_and_other_plans(both: tuple[LanguageModel, Attended]) -> None:
    model, oracle = both
    short = "The water is cold in the winter"
    prompts = [short, PROMPT, short, short]
    plans = [
        [Knockout(layers="all", queries=-1, keys=[1, 2])],
        [Knockout(layers=AT, head=3, keys=[0, -6])],
        None,
        [Knockout(layers="all", queries=-1, keys=[0])],
    ]
    cuts = [
        edges(LAYERS, range(4), [len(tokens_of(short)) - 1], [1, 2]),
        edges([AT], [3], range(200), [0, len(tokens_of()) - 6]),
        [],
        edges(LAYERS, range(4), [len(tokens_of(short)) - 1], [0]),
    ]
    outputs = model.generate(prompts, plan=plans, max_tokens=4, temperature=0.0, ignore_eos=True)
    for prompt, cut, output in zip(prompts, cuts, outputs, strict=True):
        expected = oracle.generate(tokens_of(prompt), 4, cut=cut)
        assert output.token_ids == expected.argmax(-1).tolist()


def test_order_with_other_edits(both: tuple[LanguageModel, Attended]) -> None:
    """Knockouts see edited queries, keys and values. Edits of attn_z come after them."""
    model, oracle = both
    ids = tokens_of()
    last, push = len(ids) - 1, torch.randn(32, generator=torch.Generator().manual_seed(3)) * 2
    for site in ("attn_q", "attn_k", "attn_v"):
        position = last if site == "attn_q" else last - 4
        heads = model.arch.binding(site, AT).heads[0]
        plan = [
            Patch("attn_z", layer=AT, position=-1, head=2, source=push),
            Knockout(layers=AT, queries=-1, keys=[-2, -3, 0]),
            Steer(site, layers=AT, positions=[position], vector=push.repeat(heads)),
            Capture("attn_z", layers=AT, positions=[-1], when="before"),
            Capture("attn_z", layers=AT, positions=[-1], when="after"),
        ]
        change = pushed(site, AT, [position], push.repeat(heads).view(heads, 32))
        seen, _ = oracle.run(ids, change, edges([AT], range(4), [last], [last - 1, last - 2, 0]))
        (output,) = model.generate(PROMPT, plan=plan, max_tokens=1)
        expected = seen["attn_z", AT][last].clone()
        close(output.captures["attn_z", AT, "before"][0].view(4, 32), expected, 1e-4)
        expected[2] = push
        close(output.captures["attn_z", AT, "after"][0].view(4, 32), expected, 1e-4)


def test_other_attention_functions_and_gradients(llama: tuple[LanguageModel, Attended]) -> None:
    model, oracle = llama
    plan = Plan.of([Knockout(layers=AT, queries=[-1, -3], keys=[2, 4]), Capture("attn_z", layers=AT + 1)])
    size = len(tokens_of())
    seen, _ = oracle.run(tokens_of(), cut=edges([AT], range(4), [size - 1, size - 3], [2, 4]))
    (output,) = model.generate(PROMPT, plan=plan, max_tokens=3, temperature=0.0)
    close(output.captures["attn_z", AT + 1][0], seen["attn_z", AT + 1][-1].flatten(), 1e-4)

    values = {}
    for name, keys in (("cut", range(size - 1)), ("whole", [size - 1])):
        with model.trace(PROMPT, plan=Knockout(layers=[-1], queries=-1, keys=keys)):
            value = model.attn_v[LAYERS[-1]]
            with model.logits.sum().backward():
                values[name] = value.grad.save()
    assert values["cut"][:-1].abs().max() == 0 and values["cut"][-1].abs().max() > 0
    assert values["whole"][:-1].abs().max() > 0


def test_probabilities_are_refused(llama: tuple[LanguageModel, Attended]) -> None:
    model, _ = llama
    plan = Knockout(layers=1, keys=0)
    with pytest.raises(
        TraceError, match="attention_probabilities cannot be read at a layer where the plan has a Knockout"
    ):
        model.run(lambda m: m.attention_probabilities[1], [PROMPT] * 2, plan=[None, [plan]])
    with torch.no_grad():
        assert model.run(lambda m: m.attention_probabilities[2], PROMPT, plan=plan).shape[0] == 4
        model.run(lambda m: m.attention_probabilities[1], PROMPT)


def test_spans_wire_and_normal_form(llama: tuple[LanguageModel, Attended]) -> None:
    model, _ = llama
    knockout = Knockout(layers=AT, head=1, queries=Span("water"), keys=Span("river"))
    for each in (knockout, Knockout(keys="all_generated", keep_self=True), Knockout(keys=GeneratedTokens([0, 2]))):
        assert Plan.of(Plan.of([each]).to_json()).interventions == (each,)
    by_hand = {"kind": "knockout", "keys": {"selector": "generated", "options": {"numbers": 2}}, "phase": "decode"}
    assert Plan.of({"interventions": [by_hand]}) == Plan.of(Knockout(keys=GeneratedTokens(2), phase="decode"))
    read = Capture("attn_z", layers=AT, positions="all_prompt")
    (by_span,) = model.generate(PROMPT, plan=[knockout, read], max_tokens=1)
    text, offsets = PROMPT, tiny_models.tokenizer()(PROMPT, return_offsets_mapping=True)["offset_mapping"]
    at = {
        word: [
            i for i, (begin, end) in enumerate(offsets) if begin < text.find(word) + len(word) and text.find(word) < end
        ]
        for word in ("water", "river")
    }
    listed = Knockout(layers=AT, head=1, queries=at["water"], keys=at["river"])
    (by_number,) = model.generate(PROMPT, plan=[listed, read], max_tokens=1)
    (clean,) = model.generate(PROMPT, plan=read, max_tokens=1)
    assert torch.equal(by_span.captures["attn_z", AT], by_number.captures["attn_z", AT])
    assert not torch.equal(by_span.captures["attn_z", AT], clean.captures["attn_z", AT])
    one, two = Knockout(layers=AT, queries=4, keys=[1]), Knockout(layers=AT, queries=4, keys=[2])
    assert Plan.of([one, two]).hash == Plan.of([two, one]).hash != Plan.of([one]).hash
    assert (
        Plan.of(Knockout(layers=1, queries=-1, keys=-3)).normal(4, 9)
        == Plan.of(Knockout(layers=1, queries=8, keys=6)).normal(4, 9)
        != Plan.of(Knockout(layers=1, queries=8, keys=5)).normal(4, 9)
    )


def test_which_edges_are_cut() -> None:
    """Against single edges, at random."""
    draw = random.Random(0)
    for _ in range(200):
        size, steps, layer = draw.randint(5, 9), draw.randint(2, 6), draw.randrange(4)
        given = [drawn_knockout(draw, size, steps) for _ in range(draw.randint(1, 3))]
        normal: Any = Plan.of([knockout for knockout, _ in given]).normal(4, size).edits
        expected = {edge for _, cut in given for edge in cut if edge[0] == layer}
        if not normal:
            assert not expected
            continue
        knockouts, stop = Knockouts(normal, size), size + steps
        first, own, first_key = draw.randrange(stop), range(1, 4), draw.randrange(2)
        keys = range(first_key, stop)
        at = knockouts.queries(layer, first, stop)
        cut = knockouts.cut(layer, at, own, keys)
        found = {(layer, own[n], int(at[q]), keys[k]) for n, q, k in zip(*cut.nonzero(), strict=True)}
        assert {edge for edge in found if edge[3] <= edge[2]} == {
            edge for edge in expected if edge[1] in own and edge[2] >= first and edge[3] in keys
        }
        assert max((edge[2] for edge in expected), default=-1) < knockouts.end


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Knockout(layers=1), r"Knockout needs keys"),
        (lambda: Knockout(keys=[]), r"Knockout\.keys is empty"),
        (
            lambda: Knockout(keys="generated"),
            r"Knockout\.keys is 'generated'; allowed: 'last_prompt', 'all_prompt', 'all_g",
        ),
        (
            lambda: Knockout(keys=GeneratedTokens(-1)),
            r"GeneratedTokens\.numbers is -1; allowed: a whole number, 0 or more",
        ),
        (lambda: Knockout(keys=GeneratedTokens([])), r"GeneratedTokens\.numbers is empty"),
        (lambda: Knockout(keys=Every("x")), r"of_generated raised"),  # type: ignore[arg-type]
        (lambda: Knockout(keys=0, keep_self=1), r"Knockout\.keep_self is 1; allowed: True or False"),
        (lambda: Knockout(keys=[2, 2]), r"Knockout\.keys is \[2, 2\], which has 2 twice"),
        (lambda: Knockout(keys=0, queries=1, phase="prefill"), r"Knockout\.queries is 1 with phase='prefill'"),
        (lambda: Knockout(keys=0, queries=-1, phase="decode"), r"Knockout\.queries is -1; allowed: with phase=\"dec"),
        (lambda: Knockout(keys=0, head=-1), r"Knockout\.head"),
        (lambda: Knockout(keys=0, layers=9), r"Knockout\.layers is 9; allowed: 0 to 3"),
        (lambda: Knockout(keys=0, head=4), r"Knockout\.head is 4; allowed: 0 to 3"),
        (lambda: Knockout(keys=900), r"Knockout\.keys is 900; allowed: from -\d+ to \d+"),
        (lambda: Knockout(keys=0, queries=900), r"Knockout\.queries is 900; allowed: from -\d+ to \d+"),
        (lambda: Knockout(keys=[0, -len(tokens_of())]), r"Knockout\.keys is .*, which has one twice"),
        (lambda: Knockout(keys=Span("ocean")), r"Knockout\.keys is Span\(text='ocean'"),
        (
            lambda: When(
                Probe("resid_pre", layer=0, weight=torch.ones(128), name="p"), above=0.0, then=Knockout(keys=0)
            ),
            r"When\.then\[0\] is a Knockout; allowed: an edit of the rows",
        ),
        (
            lambda: [Knockout(keys=0), Clamp("attn_z", direction=torch.ones(7))],
            r"Clamp\.direction is of width 7",
        ),
    ],
)
def test_mistakes_are_refused(llama: tuple[LanguageModel, Attended], make: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        llama[0].generate(PROMPT, plan=make(), max_tokens=1)


def test_models_without_the_sites_refuse(tmp_path_factory: pytest.TempPathFactory) -> None:
    falcon = LanguageModel(str(tiny_models.build("falcon", tmp_path_factory.getbasetemp() / "attention")))
    with pytest.raises(
        PlanError, match=r"Knockout cannot act at layer 0 \(Knockout\.layers\): the model has no site attn_q"
    ):
        falcon.generate(PROMPT, plan=Knockout(keys=0), max_tokens=1)


@pytest.mark.parametrize(
    ("module", "impl", "reason"),
    [
        ({}, {}, None),
        ({"kv_cache_dtype": "bfloat16"}, {}, None),
        ({"kv_cache_dtype": "fp8_e4m3"}, {}, "it does not support a quantised KV cache (fp8_e4m3)"),
        ({"attn_type": "encoder_only"}, {}, "it does not support attention in both directions"),
        ({"use_mm_prefix": True}, {}, "it does not support attention in both directions"),
        ({}, {"alibi_slopes": torch.ones(4)}, "it does not support position biases"),
        ({}, {"chunk_lookback": 1}, "it does not support chunked attention"),
    ],
)
def test_attention_that_cannot_be_computed_again_is_refused(module: Any, impl: Any, reason: str | None) -> None:
    """Stand-ins for vLLM's attention layers."""
    stock = {"layer_name": "layers.0.attn", "sliding_window": None, "attn_type": "decoder", "kv_cache_dtype": "auto"}
    layer = type("Attention", (SimpleNamespace,), {})(**(stock | module), impl=SimpleNamespace(**impl))
    found = heads.why_not_again(layer)
    assert found is None if reason is None else found is not None and found.startswith(reason)
    widths = {(site, layer): 64 for site in ("attn_q", "attn_k", "attn_v", "attn_z") for layer in range(2)}
    unsupported = {} if found is None else {1: found}
    facts = ModelFacts(2, widths, "float32", unsupported_attention=unsupported)
    known: Any = {"vectors": {}, "runs": {}}
    check(Plan.of(Knockout(layers=0, keys=1)), facts, 5, 1, **known)
    if found is None:
        return check(Plan.of(Knockout(layers="all", keys=1)), facts, 5, 1, **known)
    with pytest.raises(PlanError, match=r"Knockout cannot act at layer 1 \(Knockout\.layers\): it does not support"):
        check(Plan.of(Knockout(layers="all", keys=1)), facts, 5, 1, **known)
