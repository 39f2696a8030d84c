"""Sparse autoencoders as SAELens writes them: which ones `midstream.SAE` takes, and the files of a directory.

A checkpoint of SAELens's trainer may normalize its inputs by fixed numbers, which lie in files beside the weights. `fold` puts them into
the weights, as SAELens does at the end of the training.

Legend: H the site's width, S the features.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from midstream.errors import PlanError
from midstream.plan import fields
from midstream.sites import hook_of, point_of_hook

ARCHITECTURES = ("standard", "gated", "jumprelu", "topk")
NORMS = ("none", "constant_norm_rescale", "layer_norm")  # computed from each value
_FIXED_NORMS = {  # a normalization by fixed numbers -> SAELens's method that puts the numbers into the weights
    "expected_average_only_in": "fold_activation_norm_scaling_factor",
    "covariance_whitening": "fold_activation_whitening",
}
_TRAINED_ONLY = ("batchtopk", "matryoshka_batchtopk")
_SHAPES = {
    "W_enc": "HS", "W_dec": "SH", "b_dec": "H", "b_enc": "S", "threshold": "S", "b_gate": "S", "b_mag": "S", "r_mag": "S",
}  # fmt: skip
_NEEDED = {
    "standard": ("b_enc",),
    "jumprelu": ("b_enc", "threshold"),
    "topk": ("b_enc",),
    "gated": ("b_gate", "b_mag", "r_mag"),
}


class Whitening(NamedTuple):
    """An encoder reads `(h - mean) @ matrix` (arXiv:2511.13981).

    Attributes:
        mean: float64 `[H]`.
        matrix, inverse: float64 `[H, H]`.
    """

    mean: torch.Tensor
    matrix: torch.Tensor
    inverse: torch.Tensor


def architecture(config: Mapping[str, Any]) -> str:
    """The architecture of a configuration. Raises PlanError for one that `midstream.SAE` does not have."""
    given = config.get("architecture")
    function = config.get("activation_fn", config.get("activation_fn_str", "relu"))
    if function != "relu":  # SAELens before 6 named the function apart from the architecture, which may be "standard"
        allowed = (
            "'relu'. Load files of an older SAELens with sae_lens.SAE.load_from_disk, and pass the object to SAE.of"
        )
        raise fields.refuse("SAE.activation_fn", fields.shown(function), allowed)
    if isinstance(given, str) and given in _TRAINED_ONLY:
        allowed = "the JumpReLU SAE that the training makes of it; save_inference_model of SAELens's training SAE writes that one"
        raise fields.refuse("SAE.architecture", repr(given), allowed)
    return fields.one_of("SAE.architecture", given, ARCHITECTURES)


def normalization(given: Any) -> str:
    """The normalization. Raises PlanError for one that `midstream.SAE` does not have, or whose numbers lie in other files."""
    if isinstance(given, str) and given in _FIXED_NORMS:
        allowed = (
            f"{' or '.join(map(repr, NORMS))}, since the numbers of this normalization are not among the weights. SAE.load reads them in a "
            f"checkpoint's directory, and {_FIXED_NORMS[given]} of SAELens's SAE puts them into the weights"
        )
        raise fields.refuse("SAE.normalize_activations", repr(given), allowed)
    return fields.one_of("SAE.normalize_activations", given, NORMS)


def place(hook: str, site: str | None, layer: int | None) -> tuple[str, int]:
    """The site and the layer. The hook's name gives those that are None."""
    if site is None:
        point = point_of_hook(hook)
        site = point[0] if point is not None else None
        if site is None:
            raise fields.refuse(
                "SAE.site", f"not given, and the hook's name is {fields.shown(hook)}", "site= and layer="
            )
    layer = hook_of(hook)[1] if layer is None else layer
    if layer is None:
        raise fields.refuse("SAE.layer", f"not given, and the hook's name is {fields.shown(hook)}", "layer=")
    return fields.site("SAE.site", site), fields.integer("SAE.layer", layer)


def checked(architecture: str, width: int, features: int, given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Copies of the weights that an architecture needs, float32. Raises PlanError if one is missing, not finite or of another shape."""
    found: dict[str, torch.Tensor] = {}
    for name in ("W_enc", "W_dec", "b_dec", *_NEEDED[architecture]):
        weight = given.get(name)
        if not isinstance(weight, torch.Tensor):
            text = fields.shown(weight) if name in given else "missing"
            raise fields.refuse(f"SAE.{name}", text, f"a tensor of {_SHAPES[name]}")
        shape = [{"H": width, "S": features}[axis] for axis in _SHAPES[name]]
        if list(weight.shape) != shape:
            raise fields.refuse(f"SAE.{name}", f"of shape {list(weight.shape)}", str(shape))
        found[name] = weight.detach().float().cpu().clone(memory_format=torch.contiguous_format)
    _check_finite(found)
    return found


def _check_finite(weights: Mapping[str, torch.Tensor]) -> None:
    for name, weight in weights.items():
        if not bool(torch.isfinite(weight).all()):
            raise fields.refuse(f"SAE.{name}", "not finite", "finite numbers")


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, torch.Tensor], float | Whitening | None]:
    """The configuration and the weights in a directory, and the normalization that is not in the weights yet: a factor of the input, or a
    whitening; None for no such normalization. With one, the returned configuration says "none".

    Raises:
        PlanError: a file is missing or cannot be read, or lacks the numbers of the normalization.
    """
    directory = Path(path)
    config = _read(directory, "cfg.json")
    weights = _read(directory, "sae_weights.safetensors")
    if not isinstance(config, dict):
        raise fields.refuse("SAE.config", fields.shown(config), "a dict")
    norm: float | Whitening | None = None
    match config.get("normalize_activations"):
        case "expected_average_only_in":
            scaler = _read(directory, "activation_scaler.json")
            factor = scaler.get("scaling_factor") if isinstance(scaler, dict) else None
            norm = fields.number("SAE: scaling_factor in activation_scaler.json", factor)
            if norm <= 0:
                raise fields.refuse("SAE: scaling_factor in activation_scaler.json", f"{norm:g}", "a number above 0")
        case "covariance_whitening":
            norm = _whitening(_read(directory, "activation_whitening.safetensors"), config.get("d_in"))
        case _:
            return config, weights, None
    return {**config, "normalize_activations": "none"}, weights, norm


def _read(directory: Path, name: str) -> Any:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        path = directory / name
        return load_file(path) if path.suffix == ".safetensors" else json.loads(path.read_text())
    except (OSError, ValueError, SafetensorError) as error:
        raise PlanError(f"{os.fspath(directory)!r} has no SAE of SAELens's: {name} cannot be read: {error}.") from error


def _whitening(given: Mapping[str, torch.Tensor], width: Any) -> Whitening:
    for name, shape in (("mean", [width]), ("matrix", [width, width]), ("inverse_matrix", [width, width])):
        if name not in given or list(given[name].shape) != shape:
            found = f"of shape {list(given[name].shape)}" if name in given else "missing"
            raise fields.refuse(f"SAE: {name} in activation_whitening.safetensors", found, str(shape))
    return Whitening(given["mean"].double(), given["matrix"].double(), given["inverse_matrix"].double())


@torch.no_grad()
def fold(norm: float | Whitening, weights: dict[str, torch.Tensor], subtracts: bool, rescales: bool) -> None:
    """Change the weights so that the SAE takes values that are not normalized.

    With a whitening, the caller has to set `rescale_acts_by_decoder_norm` to false. The matrix changes the decoder's norms, so this
    function first makes the rescaling part of the weights.

    Args:
        weights: by SAELens's names, float32.
        subtracts, rescales: `apply_b_dec_to_input` and `rescale_acts_by_decoder_norm`.

    Raises:
        PlanError: a weight becomes infinite or NaN.
    """
    if isinstance(norm, float):
        weights["W_enc"] *= norm
        weights["W_dec"] /= norm
        weights["b_dec"] /= norm
        _check_finite(weights)
        return
    own = {name: weight.double() for name, weight in weights.items()}
    if rescales:
        norms_S = own["W_dec"].norm(dim=-1).clamp(min=1e-8)
        own["W_enc"] *= norms_S
        own["b_enc"] *= norms_S
        own["W_dec"] /= norms_S[:, None]
    own["W_enc"] = norm.matrix @ own["W_enc"]
    if not subtracts:
        shift_S = norm.mean @ own["W_enc"]
        for name in own.keys() & {"b_enc", "b_gate"}:
            own[name] -= shift_S
        if "b_mag" in own:
            own["b_mag"] -= shift_S * own["r_mag"].exp()
    own["W_dec"] = own["W_dec"] @ norm.inverse
    own["b_dec"] = own["b_dec"] @ norm.inverse + norm.mean
    weights |= {name: weight.float().contiguous() for name, weight in own.items()}
    _check_finite(weights)
