"""Sparse autoencoders of every architecture and normalization that SAELens has, against SAELens's own package (row M4)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from midstream import SAE
from midstream.errors import PlanError
from midstream.plan.running import run, unpacked

sae_lens = pytest.importorskip("sae_lens")
from sae_lens.registry import SAE_CLASS_REGISTRY, SAE_TRAINING_CLASS_REGISTRY  # noqa: E402
from sae_lens.saes.sae import SAEMetadata  # noqa: E402
from sae_lens.training.activation_scaler import ActivationScaler, ActivationWhitening  # noqa: E402

WIDTH, FEATURES, ROWS = 64, 96, 40
METADATA = {"hook_name": "blocks.4.hook_resid_post"}
NORMS = ("none", "layer_norm", "constant_norm_rescale", "expected_average_only_in", "covariance_whitening")
KINDS = {
    "standard": {},
    "gated": {},
    "jumprelu": {},
    "topk": {"k": 9},
    "topk of norms": {"k": 9, "rescale_acts_by_decoder_norm": True},
}
CASES = [(kind, norm, subtracts) for kind in KINDS for norm in NORMS for subtracts in (True, False)]


def rows() -> torch.Tensor:
    """Values as a residual stream has them: long, with a mean and directions that differ in length."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-1, 1, WIDTH) * 3
    return torch.randn(ROWS, WIDTH, generator=generator) * sizes + torch.randn(WIDTH, generator=generator) * 4 + 1.5


def scaler_of(norm: str) -> ActivationScaler:
    """The scaler of SAELens's trainer after it has seen the rows."""
    scaler, batches = ActivationScaler(), iter(lambda: rows(), None)
    if norm == "expected_average_only_in":
        scaler.estimate_scaling_factor(WIDTH, batches, 2)
    if norm == "covariance_whitening":
        scaler.estimate_whitening(WIDTH, batches, 2, eps=0.1)
    return scaler


def made(kind: str, norm: str, subtracts: bool) -> Any:
    """A SAELens SAE with random weights that suit normalized inputs."""
    cls, config = SAE_CLASS_REGISTRY[kind.split()[0]]
    options = {"normalize_activations": norm, "apply_b_dec_to_input": subtracts, **KINDS[kind]}
    sae = cls(config(d_in=WIDTH, d_sae=FEATURES, metadata=SAEMetadata(**METADATA), **options))
    generator = torch.Generator().manual_seed(len(kind) + subtracts)
    with torch.no_grad():
        for name, each in sae.named_parameters():
            each.copy_(torch.randn(each.shape, generator=generator) * (0.05 if name.startswith("W") else 0.1))
        sae.W_dec[:] *= torch.linspace(0.5, 2, FEATURES)[:, None]
        sae.W_enc += 0.2 * sae.W_dec.T
        if kind == "jumprelu":
            sae.threshold.copy_(torch.rand(FEATURES, generator=generator) / 2)
    return sae.eval()


def loaded(kind: str, norm: str, subtracts: bool, path: Path) -> tuple[Any, SAE]:
    """SAELens's SAE, with the trainer's normalization in its weights, and what `SAE.load` reads from the checkpoint before."""
    theirs, scaler = made(kind, norm, subtracts), scaler_of(norm)
    theirs.save_model(path)
    scaler.save(str(path / "activation_scaler.json"))
    mine = SAE.load(path)
    if scaler.scaling_factor is not None:
        theirs.fold_activation_norm_scaling_factor(scaler.scaling_factor)
    if (found := scaler.whitening) is not None:
        theirs.fold_activation_whitening(found.mean, found.matrix, found.inverse_matrix)
    return theirs, mine


@torch.no_grad()
def decoded(sae: Any, h: torch.Tensor, acts: torch.Tensor) -> torch.Tensor:
    sae.encode(h)  # a normalization is undone by the next decode only
    return sae.decode(acts)


def near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=2e-3, atol=2e-4 * float(expected.abs().max()))


@pytest.mark.parametrize(("kind", "norm", "subtracts"), CASES, ids=[f"{k}-{n}-{'b_dec' if s else ''}" for k, n, s in CASES])  # fmt: skip
@torch.no_grad()
def test_every_method_computes_what_saelens_computes(kind: str, norm: str, subtracts: bool, tmp_path: Path) -> None:
    theirs, mine = loaded(kind, norm, subtracts, tmp_path)
    h = rows()
    acts = theirs.encode(h)
    share = (acts > 0).float().mean(0)
    chosen = [int(i) for i in (share - 0.5).abs().argsort()[:4]]  # active in about half of the rows
    assert ((share[chosen] > 0) & (share[chosen] < 1)).all()
    near(mine.encode(h), acts)
    near(mine.reconstruct(h), decoded(theirs, h, acts))
    (found,) = unpacked(mine.capture(chosen).program, run(mine.capture(chosen).program, h))
    near(found, acts[:, chosen])
    top = mine.capture(top_k=5).program
    near(unpacked(top, run(top, h))[0], acts.topk(5).values)
    read = SAE.read(mine.written())
    assert torch.equal(read.encode(h), mine.encode(h)) and read.held == mine.held

    old = decoded(theirs, h, acts)
    level = float(acts[:, chosen[0]].max()) * 0.7
    for features, low, high in (([chosen[0]], None, level), (chosen, level / 2, None), (chosen[:2], 0.0, 0.0)):
        changed = acts.clone()
        changed[:, features] = changed[:, features].clamp(low, high)
        new = decoded(theirs, h, changed)
        near(run(mine.clamp(features, low, high).program, h) - h, new - old)
        near(run(mine.clamp(features, low, high, error_term=False).program, h), new)
    raised = acts.clone()
    raised[:, 7] += 2.5
    near(steered(mine, 7, 2.5, h) - h, decoded(theirs, h, raised) - old)


def steered(sae: SAE, feature: int, scale: float, h: torch.Tensor) -> torch.Tensor:
    edit = sae.steer(feature, scale)
    return run(edit.program, h) if edit.kind == "apply" else h + edit.scale * torch.tensor(edit.vector.data)


def unit(norm: str, width: int = 256) -> tuple[Any, SAE]:
    """An SAE with one unit vector of mean 0 as encoder and decoder of each feature; and its values, of length 14 sqrt(width)."""
    cls, config = SAE_CLASS_REGISTRY["standard"]
    sae = cls(config(d_in=width, d_sae=32, normalize_activations=norm, metadata=SAEMetadata(**METADATA)))
    directions = torch.randn(32, width, generator=torch.Generator().manual_seed(1))
    directions -= directions.mean(1, keepdim=True)
    directions = torch.linalg.qr(directions.T).Q.T
    with torch.no_grad():
        sae.W_dec.copy_(directions)
        sae.W_enc.copy_(directions.T)
        sae.b_enc.fill_(5.0)  # so that every feature is active, also at a low pre-activation
    return sae, SAE.of(sae)


@pytest.mark.parametrize("norm", ["layer_norm", "constant_norm_rescale"])
@torch.no_grad()
def test_a_steer_raises_what_saelens_reads_by_its_scale(norm: str) -> None:
    """To first order: after it, the value is longer. The closed form of both is `(a + c) / sqrt(1 + (2 a c + c^2) / degrees)`."""
    theirs, mine = unit(norm)
    h = torch.randn(20, 256, generator=torch.Generator().manual_seed(2)) * 14
    h -= h.mean(1, keepdim=True)
    degrees = 255 if norm == "layer_norm" else 256
    before = theirs.encode(h)[:, 7] - 5.0

    def raised(scale: Any) -> torch.Tensor:
        return ((before + scale) / (1 + (2 * before * scale + scale**2) / degrees).sqrt() + 5.0).relu()

    for scale in (0.01, 2.0, -1.5, 30.0):
        after = theirs.encode(steered(mine, 7, scale, h))[:, 7]
        torch.testing.assert_close(after, raised(scale), rtol=1e-3, atol=1e-3)
        if abs(scale) <= 2:
            assert ((after - before - 5.0 - scale).abs() < 0.1 * abs(scale)).all()
    for edit, scale in ((mine.ablate(7), -(before + 5.0)), (mine.clamp(7, low=9.0), 9.0 - (before + 5.0))):
        after = theirs.encode(run(edit.program, h))[:, 7]
        torch.testing.assert_close(after, raised(scale), rtol=1e-3, atol=1e-3)
    with pytest.raises(PlanError, match=r"low is 50; allowed: up to (20\.9\d|21), the highest activation of feature 7"):
        mine.clamp(7, low=50)


@pytest.mark.parametrize("kind", [*KINDS])
@pytest.mark.parametrize("norm", ["layer_norm", "constant_norm_rescale"])
@torch.no_grad()
def test_a_clamp_is_refused_above_what_normalized_inputs_reach(kind: str, norm: str, tmp_path: Path) -> None:
    """The bound is the activation at the input that is best for the feature, and no input exceeds it."""
    theirs, mine = loaded(kind, norm, True, tmp_path)
    feature = 5
    best = theirs.W_enc[:, feature] - (theirs.W_enc[:, feature].mean() if norm == "layer_norm" else 0)
    most = float(theirs.encode(1e4 * best[None])[0, feature])
    assert most > 0.2 and float(theirs.encode(torch.randn(2000, WIDTH))[:, feature].max()) <= most
    mine.clamp(feature, low=most * 0.999)
    message = rf"SAE.clamp: low is .*; allowed: up to .*feature {feature} .*{norm}.*SAE.steer"
    with pytest.raises(PlanError, match=message):
        mine.clamp(feature, low=most * 1.001)


def test_a_steer_of_normalized_inputs_takes_the_fields_of_steers(tmp_path: Path) -> None:
    _, mine = loaded("standard", "layer_norm", True, tmp_path)
    edit = mine.steer(3, 2.0, phase="decode", positions=[0, 1], norm_match=False)
    assert (edit.kind, edit.phase, edit.positions) == ("apply", "decode", (0, 1))
    assert mine.steer(3, 2.0, norm_match=True).kind == "steer"
    with pytest.raises(PlanError, match=r"SAE.steer: scale is 'much'"):
        mine.steer(3, "much")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=f"feature is {FEATURES}; allowed: 0 to {FEATURES - 1}"):
        mine.steer(FEATURES, 1.0)


@torch.no_grad()
def test_what_saelens_registers_is_computed_or_refused_by_name(tmp_path: Path) -> None:
    known = {kind.split()[0] for kind in KINDS}
    registered = {**SAE_CLASS_REGISTRY, **SAE_TRAINING_CLASS_REGISTRY}
    assert len(registered) > 8 and known <= registered.keys()
    for name in registered.keys() - known:
        config = {"architecture": name, "d_in": WIDTH, "d_sae": FEATURES, "metadata": METADATA}
        with pytest.raises(PlanError, match=rf"SAE.architecture is '{name}'; allowed: "):
            SAE(config, made("standard", "none", True).state_dict())


def test_a_topk_sae_of_an_older_saelens_is_not_taken_for_a_standard_one(tmp_path: Path) -> None:
    """SAELens 6 reads such a file as a top-k SAE, though its architecture is called standard."""
    made("standard", "none", True).save_model(tmp_path)
    config = json.loads((tmp_path / "cfg.json").read_text())
    config |= {"sae_lens_version": "5.1.0", "activation_fn_str": "topk", "activation_fn_kwargs": {"k": 9}}
    (tmp_path / "cfg.json").write_text(json.dumps({**config, **config.pop("metadata"), "sae_lens_version": "5.1.0"}))
    with pytest.raises(PlanError, match=r"activation_fn is 'topk'; allowed: 'relu'.*SAE.of"):
        SAE.load(tmp_path, site="resid_post", layer=4)
    theirs = sae_lens.SAE.load_from_disk(tmp_path)
    assert theirs.cfg.architecture() == "topk"
    near(SAE.of(theirs).encode(rows()), theirs.encode(rows()).detach())


@pytest.mark.parametrize("norm", ["expected_average_only_in", "covariance_whitening"])
def test_numbers_of_a_normalization_that_are_missing_are_asked_for(norm: str, tmp_path: Path) -> None:
    theirs = made("standard", norm, True)
    for make in (lambda: SAE.of(theirs), lambda: SAE(theirs.cfg.to_dict(), theirs.state_dict())):
        with pytest.raises(PlanError, match=rf"normalize_activations is '{norm}'.*SAE.load.*fold_activation_"):
            make()
    theirs.save_model(tmp_path)
    with pytest.raises(PlanError, match=r"activation_\w+\.(json|safetensors) cannot be read"):
        SAE.load(tmp_path)
    mine = loaded("standard", norm, True, tmp_path)[1]
    assert json.loads((tmp_path / "cfg.json").read_text())["normalize_activations"] == norm
    assert SAE.read(mine.written()).written() == mine.written()


@pytest.mark.parametrize("factor", [None, 0.0, -1.0, "1.0", math.nan, [1.0]])
def test_a_factor_that_is_none_is_refused(factor: Any, tmp_path: Path) -> None:
    made("topk", "expected_average_only_in", True).save_model(tmp_path)
    (tmp_path / "activation_scaler.json").write_text(json.dumps({"scaling_factor": factor}))
    with pytest.raises(PlanError, match=r"scaling_factor in activation_scaler.json is"):
        SAE.load(tmp_path)


@pytest.mark.parametrize("name", ["mean", "matrix", "inverse_matrix"])
def test_a_whitening_of_another_shape_is_refused(name: str, tmp_path: Path) -> None:
    made("gated", "covariance_whitening", False).save_model(tmp_path)
    numbers = {"mean": torch.zeros(WIDTH), "matrix": torch.eye(WIDTH), "inverse_matrix": torch.eye(WIDTH)}
    numbers[name] = numbers[name][:-1].contiguous()
    scaler = ActivationScaler(whitening=ActivationWhitening(**numbers))
    scaler.save(str(tmp_path / "activation_scaler.json"))
    with pytest.raises(PlanError, match=rf"{name} in activation_whitening.safetensors is of shape"):
        SAE.load(tmp_path)
