"""Sparse autoencoders in plans on both backends, against SAELens's own package and plain hooks (M4)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Plain, close
from plan_cases import EIFFEL, FRANCE, GREEDY, HIDDEN, ITALY, P, everything, generated_with, tokens

from midstream import SAE, Plan, Probe, Steer, When
from midstream.errors import PlanError

sae_lens = pytest.importorskip("sae_lens")

FEATURES, LAYER = 640, 4
POINT = ("resid_post", LAYER)
KINDS = ["standard", "gated", "jumprelu", "topk"]


def made(kind: str, rows: torch.Tensor, **options: Any) -> Any:
    """A SAELens SAE with random weights. Its features read and write random rows of the model, so that some are active."""
    from sae_lens.saes.sae import SAEMetadata

    classes = {"standard": "Standard", "gated": "Gated", "jumprelu": "JumpReLU", "topk": "TopK"}
    config = getattr(sae_lens, f"{classes[kind]}SAEConfig")
    options |= {"k": 12} if kind == "topk" else {}
    metadata = SAEMetadata(hook_name=f"blocks.{LAYER}.hook_resid_post")
    sae = getattr(sae_lens, f"{classes[kind]}SAE")(config(d_in=HIDDEN, d_sae=FEATURES, metadata=metadata, **options))
    generator = torch.Generator().manual_seed(len(kind))
    scale = rows.norm(dim=-1).mean()
    with torch.no_grad():
        for name, each in sae.named_parameters():
            each.copy_(
                torch.randn(each.shape, generator=generator) * {"W_enc": 0.1, "r_mag": 0.1, "W_dec": 0.1}.get(name, 0.3)
            )
        sae.W_dec[:] *= torch.rand(FEATURES, 1, generator=generator) * scale / 3
        sae.b_dec.copy_(rows.mean(0) / 4)
        if kind == "jumprelu":
            sae.threshold.copy_(torch.rand(FEATURES, generator=generator))
    return sae


@pytest.fixture(scope="module")
def saes(plain: Plain, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Any, SAE]]:
    """Makes a SAELens SAE, and what `SAE.load` reads from the files that it writes."""
    rows, known = plain.run(EIFFEL).sites[POINT], dict[str, Any]()

    def get(kind: str, **options: Any) -> tuple[Any, SAE]:
        key = str((kind, options))
        if key not in known:
            theirs = made(kind, rows, **options)
            path = tmp_path_factory.mktemp("sae")
            theirs.save_model(path)
            known[key] = theirs.eval(), SAE.load(path)
        return known[key]

    return get


@torch.no_grad()
def clamped(
    sae: Any, h: torch.Tensor, features: Any, low: float | None, high: float | None, error: bool
) -> torch.Tensor:
    """By SAELens: decode with and without the change."""
    acts = sae.encode(h)
    old = sae.decode(acts)
    sae.encode(h)  # a normalization is undone by the next decode only
    acts = acts.clone()
    acts[:, features] = acts[:, features].clamp(low, high)
    new = sae.decode(acts)
    return h + new - old if error else new


def active(sae: Any, rows: torch.Tensor) -> list[int]:
    """The features that are active in some of the rows and not in others, the most often active first."""
    share = (sae.encode(rows) > 0).float().mean(0)
    order = [int(i) for i in share.argsort(descending=True) if 0 < share[i] < 1]
    assert len(order) > 5
    return order


VARIANTS = [
    *((kind, {}) for kind in KINDS),
    ("standard", {"apply_b_dec_to_input": False}),
    ("standard", {"normalize_activations": "layer_norm"}),
    ("gated", {"normalize_activations": "constant_norm_rescale"}),
    ("topk", {"rescale_acts_by_decoder_norm": False, "normalize_activations": "layer_norm"}),
    ("topk", {"rescale_acts_by_decoder_norm": True}),
]


@pytest.mark.parametrize(
    ("kind", "options"), VARIANTS, ids=[f"{kind}-{'-'.join(map(str, o.values()))}" for kind, o in VARIANTS]
)
def test_features_are_those_of_saelens(model: Any, plain: Plain, saes: Any, kind: str, options: Any) -> None:
    theirs, mine = saes(kind, **options)
    rows = generated_with(plain, None, 6)[1].sites[POINT]
    acts = theirs.encode(rows).detach()
    close(mine.encode(rows), acts)
    close(mine.reconstruct(rows), theirs.decode(theirs.encode(rows)).detach())
    chosen = active(theirs, rows)[:7]
    plan = [
        mine.capture(chosen, name="chosen", positions="all"),
        mine.capture(chosen[0], name="one", positions="all"),
        mine.capture(top_k=8, name="top", positions="all"),
    ]
    (output,) = model.generate(FRANCE, plan=plan, max_tokens=6, **GREEDY)
    assert output.scores.positions["top"] == list(range(P + 5)) and list(output.scores.indices) == ["top"]
    close(output.scores["chosen"], acts[:, chosen])
    close(output.scores["one"], acts[:, chosen[:1]])
    top, indices = output.scores["top"], output.scores.indices["top"]
    close(top, acts.topk(8).values)
    assert indices.dtype == torch.int64 and ((indices == -1) == (top == 0)).all()
    close(acts.gather(1, indices.clamp(min=0)) * (indices >= 0), top)


@pytest.mark.parametrize("error_term", [True, False], ids=["keeps the error", "reconstruction"])
@pytest.mark.parametrize(
    ("kind", "options"), VARIANTS, ids=[f"{kind}-{'-'.join(map(str, o.values()))}" for kind, o in VARIANTS]
)
def test_clamps_are_those_of_saelens(
    model: Any, plain: Plain, saes: Any, kind: str, options: Any, error_term: bool
) -> None:
    theirs, mine = saes(kind, **options)
    rows = generated_with(plain, None, 6)[1].sites[POINT]
    one, other, third = active(theirs, rows)[:3]
    level = float(theirs.encode(rows)[:, one].detach().max()) / 2
    for features, low, high in (([one], None, level), ([one, other, third], 2 * level, None)):
        edit = mine.clamp(features, low, high, error_term=error_term)
        (output,) = model.generate(FRANCE, plan=[edit, everything(when="after")], max_tokens=4, **GREEDY)
        change = lambda h: clamped(theirs, h, features, low, high, error_term)  # noqa: B023, E731
        ids, ran = generated_with(plain, {POINT: change}, 4)
        close(output.captures[POINT], ran.sites[POINT])
        assert tokens(output) == ids
    assert mine.clamp(one, low=0.0, high=0.0, error_term=error_term) == mine.ablate(one, error_term=error_term)


NORMED = [{}, {"normalize_activations": "layer_norm"}, {"normalize_activations": "constant_norm_rescale"}]


@pytest.mark.parametrize("kind", ["standard", "topk"])
@pytest.mark.parametrize("options", NORMED, ids=lambda options: "".join(options.values()))
def test_steering_adds_what_the_decoder_adds(
    model: Any, plain: Plain, saes: Any, kind: str, options: dict[str, str]
) -> None:
    theirs, mine = saes(kind, **options)
    h = plain.run(FRANCE).sites[POINT]
    acts, raised = (theirs.encode(h).detach() for _ in range(2))
    raised[:, 7] += 5.0
    new = theirs.decode(raised)
    theirs.encode(h)  # a normalization is undone by the next decode only
    expected = (new - theirs.decode(acts)).detach()
    plan = [mine.steer(7, scale=5.0, phase="prefill"), everything(when="after")]
    (output,) = model.generate(FRANCE, plan=plan, max_tokens=1, **GREEDY)
    close(output.captures[POINT] - h, expected)


@pytest.mark.parametrize("options", NORMED, ids=lambda options: "".join(options.values()))
def test_a_feature_under_the_condition_of_another(model: Any, plain: Plain, saes: Any, options: dict[str, str]) -> None:
    """And a feature that ends the request."""
    theirs, mine = saes("jumprelu", **options)
    rows = generated_with(plain, None, 6)[1].sites[POINT]
    condition, clamp_at = active(theirs, rows)[:2]
    level = float(theirs.encode(rows)[:, clamp_at].detach().max()) + 3
    gate = When(mine.capture(condition), above=0.0, then=mine.clamp(clamp_at, low=level))

    def gated(h: torch.Tensor) -> torch.Tensor:
        holds = theirs.encode(h)[:, condition, None] > 0
        return torch.where(holds, clamped(theirs, h, [clamp_at], level, None, True), h)

    (output,) = model.generate(FRANCE, plan=[gate, everything(when="after")], max_tokens=6, **GREEDY)
    ids, ran = generated_with(plain, {POINT: gated}, 6)
    assert tokens(output) == ids
    close(output.captures[POINT], ran.sites[POINT])
    acts = theirs.encode(rows)[P:].detach()
    at = next(f for f in active(theirs, rows[P:]) if acts[0, f] == 0)
    first = int((acts[:, at] > 0).nonzero()[0])
    (stopped,) = model.generate(FRANCE, plan=mine.capture(at, name="f", stop_above=0.0), max_tokens=6, **GREEDY)
    assert stopped.outputs[0].stop_reason == "probe:f" and len(tokens(stopped)) == first + 1


def test_many_requests_with_features_of_their_own(model: Any, plain: Plain, saes: Any) -> None:
    """Beside plain ones and others; the large matrices are sent once."""
    theirs, mine = saes("topk")
    prompts = [FRANCE, ITALY, EIFFEL, FRANCE, ITALY]
    found = active(theirs, torch.cat([plain.run(prompt).sites[POINT] for prompt in prompts[:3]]))
    plans = [
        [mine.capture(top_k=4, name="a", positions="all")],
        [mine.ablate(found[:2]), mine.capture(found[:2], name="a", positions="all", when="after")],
        [mine.ablate(found[2]), mine.capture(found[2], name="b", positions="all_prompt")],
        None,
        [Steer("resid_post", layers=LAYER, vector=mine.direction(3), scale=4.0)],
    ]
    outputs = model.generate(prompts, plan=plans, max_tokens=3, **GREEDY)
    rows = generated_with(plain, None, 3)[1].sites[POINT]
    close(outputs[0].scores["a"], theirs.encode(rows).topk(4).values.detach())
    changes: list[Any] = [
        None,
        lambda h: clamped(theirs, h, found[:2], 0.0, 0.0, True),
        lambda h: clamped(theirs, h, [found[2]], 0.0, 0.0, True),
        None,
        lambda h: h + 4.0 * mine.direction(3),
    ]
    for prompt, output, change in zip(prompts, outputs, changes, strict=True):
        assert tokens(output) == generated_with(plain, {POINT: change} if change else None, 3, prompt)[0]
    close(outputs[2].scores["b"], theirs.encode(plain.run(EIFFEL).sites[POINT])[:, found[2:3]].detach())
    plan = Plan.of(plans[0])
    assert Plan.from_json(plan.to_json()) == plan


REFUSED: list[tuple[Callable[[SAE], Any], str]] = [
    (lambda sae: sae.capture(), "SAE.capture is without features and top_k"),
    (lambda sae: sae.capture([1], top_k=2), "SAE.capture is without features and top_k, or with both"),
    (lambda sae: sae.capture([FEATURES]), f"SAE.capture: feature is {FEATURES}; allowed: 0 to {FEATURES - 1}"),
    (lambda sae: sae.capture(range(65)), "for 65 features"),
    (lambda sae: sae.capture(top_k=33), "top_k is 33; allowed: 1 to 32"),
    (lambda sae: sae.capture([1, 2], stop_above=0.0), "Probe.stop_above is a bound of 2 scores"),
    (lambda sae: sae.steer(-1, 2.0), "SAE.direction: feature is -1"),
    (lambda sae: sae.clamp(1), "SAE.clamp is low=None and high=None"),
    (lambda sae: sae.clamp(1, 2.0, 1.0), "low <= high"),
    (lambda sae: Probe("resid_post", layer=1, program=sae.clamp(1, 0.0).program, name="p"), "Probe.program"),
    (lambda sae: Probe("resid_post", layer=1, weight=[1.0], program=sae.capture(1).program, name="p"), "Probe.weight"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_refused(saes: Any, make: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make(saes("standard")[1])


def test_files_and_weights_that_are_none(model: Any, saes: Any, tmp_path: Path) -> None:
    theirs, _ = saes("standard")
    config, weights = theirs.cfg.to_dict(), theirs.state_dict()
    with pytest.raises(PlanError, match="has no SAE of SAELens's"):
        SAE.load(tmp_path)
    with pytest.raises(PlanError, match=r"SAE.architecture is 'transcoder'"):
        SAE({**config, "architecture": "transcoder"}, weights)
    with pytest.raises(PlanError, match=r"SAE.b_enc is missing"):
        SAE(config, {name: each for name, each in weights.items() if name != "b_enc"})
    with pytest.raises(PlanError, match=r"SAE.W_dec is of shape \[256, 640\]; allowed: \[640, 256\]"):
        SAE(config, {**weights, "W_dec": weights["W_enc"]})
    with pytest.raises(PlanError, match=r"SAE.site is not given, and the hook's name is 'model.layers.4'"):
        SAE({**config, "metadata": {"hook_name": "model.layers.4"}}, weights)
    for name, wrong, message in (
        ("b_enc", [0.0] * FEATURES, r"SAE.b_enc is a list"),
        ("W_dec", torch.full((FEATURES, HIDDEN), float("nan")), r"SAE.W_dec is not finite"),
    ):
        with pytest.raises(PlanError, match=message):
            SAE(config, {**weights, name: wrong})
    for changes, message in (
        ({"metadata": {"hook_name": 5}}, "SAE.metadata"),
        ({"apply_b_dec_to_input": "False"}, "SAE.apply_b_dec"),
    ):
        with pytest.raises(PlanError, match=message):
            SAE({**config, **changes}, weights)
    with pytest.raises(PlanError, match=r"SAE.encode: rows is of shape \[256\]"):
        SAE.of(theirs).encode(torch.ones(HIDDEN))
    assert SAE.of(theirs).encode(torch.ones(0, HIDDEN)).shape == (0, FEATURES)
    dead = {**weights, "W_dec": torch.cat([torch.zeros(1, HIDDEN), weights["W_dec"][1:]])}
    of_top = SAE({**config, "architecture": "topk", "k": 3, "rescale_acts_by_decoder_norm": True}, dead)
    assert not of_top.direction(0).any() and of_top.reconstruct(torch.ones(1, HIDDEN)).isfinite().all()
    assert SAE.of(theirs, layer=2).layer == 2 and SAE.of(theirs, site="mlp_out").site == "mlp_out"
    wide = SAE.of(theirs, site="mlp_act")
    for item in (wide.capture(1), wide.ablate(1)):
        with pytest.raises(PlanError, match="the width of mlp_act at layer 4"):
            model.generate(FRANCE, plan=item, max_tokens=1)
