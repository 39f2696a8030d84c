"""Sparse autoencoders: their features read, steered and clamped while the model runs, by plans.

    sae = SAE.load("gemma-layer-20")                      # a directory of SAELens's; it names the site and the layer
    plan = [sae.capture(top_k=32, name="features"), sae.clamp(1234, high=0.5)]
    (output,) = model.generate(prompt, plan=plan)
    output.scores["features"], output.scores.indices["features"]   # activations and features, [tokens, 32]

Legend: R rows, H the site's width, S the features, C the chosen ones.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import math
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from midstream.errors import PlanError
from midstream.plan import fields
from midstream.plan.building import StepWriter
from midstream.plan.ops import Apply, Steer
from midstream.plan.ops.edit import Intervention
from midstream.plan.probes import MAX_CLASSES, Probe
from midstream.plan.program import HELD_BYTES
from midstream.plan.running import run, unpacked
from midstream.plan.steps import INPUT, Constant, DType, Ref
from midstream.sites import hook_of, point_of_hook

METHODS = ("capture", "steer", "clamp", "ablate")
ARCHITECTURES = ("standard", "gated", "jumprelu", "topk")
_NORMS = ("none", "expected_average_only_in", "constant_norm_rescale", "layer_norm", "covariance_whitening")
_LN_EPS = 1e-5
_WRITTEN = "midstream-sae"  # the key of a file's metadata
_FILE_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
MOST_TOP = 32
_SHAPES = {
    "W_enc": "HS", "W_dec": "SH", "b_dec": "H", "b_enc": "S", "threshold": "S", "b_gate": "S", "b_mag": "S", "r_mag": "S",
}  # fmt: skip
_NEEDED = {
    "standard": ("b_enc",),
    "jumprelu": ("b_enc", "threshold"),
    "topk": ("b_enc",),
    "gated": ("b_gate", "b_mag", "r_mag"),
}


class _Normed(NamedTuple):
    """A value as the encoder sees it.

    Attributes:
        value: `[R, H]`.
        scale, shift: what makes the decoder's output comparable with the site's value again: `scale * out + shift`; None for 1 and 0.
    """

    value: Ref
    scale: Ref | None = None
    shift: Ref | None = None


class SAE:
    """A sparse autoencoder of a site's value, in float32. It computes the same activations as `sae_lens.SAE.encode` of SAELens 6, for the
    architectures standard, gated (Rajamanoharan et al. 2024, arXiv:2404.16014), jump-ReLU (arXiv:2407.14435) and top-k (Gao et al. 2024,
    arXiv:2406.04093).

    Its methods return interventions for plans. An engine of `midstream.VLLM` holds the large matrices once, within its `weight_bytes`,
    whatever the number of requests.

    Args:
        config: SAELens's configuration: `architecture`, `d_in`, `d_sae`, `apply_b_dec_to_input`, `normalize_activations`; of a top-k SAE
            `k` and `rescale_acts_by_decoder_norm`; in `metadata` the `hook_name`.
        weights: by SAELens's names: `W_enc` `[H, S]`, `W_dec` `[S, H]`, `b_dec` `[H]`, and the architecture's others, `[S]`. They are
            copied.
        site, layer: of the value; None takes them from the `hook_name`, such as `blocks.20.hook_resid_post`.

    Raises:
        PlanError: the architecture or the normalization is not known; a weight is missing, not finite or of another shape; the hook's name
            does not say the site and the layer.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, torch.Tensor],
        *,
        site: str | None = None,
        layer: int | None = None,
    ) -> None:
        self.architecture = fields.one_of("SAE.architecture", config.get("architecture"), ARCHITECTURES)
        self.width = fields.integer("SAE.d_in", config.get("d_in"), 1)
        self.features = fields.integer("SAE.d_sae", config.get("d_sae"), 1)
        self._norm = fields.one_of("SAE.normalize_activations", config.get("normalize_activations", "none"), _NORMS)
        self._subtracts = fields.flag("SAE.apply_b_dec_to_input", config.get("apply_b_dec_to_input", True))
        self._k = _within("SAE.k", config.get("k"), 1, self.features) if self.architecture == "topk" else 0
        metadata = config.get("metadata") or {}
        hook = (metadata.get("hook_name") if isinstance(metadata, Mapping) else None) or ""
        if not isinstance(hook, str):
            raise fields.refuse("SAE.metadata", fields.shown(metadata), "a dict with a hook_name")
        self.site, self.layer = _place(hook, site, layer)
        self._weights: dict[str, torch.Tensor] = {}
        for name in ("W_enc", "W_dec", "b_dec", *_NEEDED[self.architecture]):
            if not isinstance(weights.get(name), torch.Tensor):
                given = fields.shown(weights[name]) if name in weights else "missing"
                raise fields.refuse(f"SAE.{name}", given, f"a tensor of {_SHAPES[name]}")
            shape = [{"H": self.width, "S": self.features}[axis] for axis in _SHAPES[name]]
            if list(weights[name].shape) != shape:
                raise fields.refuse(f"SAE.{name}", f"of shape {list(weights[name].shape)}", str(shape))
            weight = weights[name].detach().float().cpu()
            if not bool(torch.isfinite(weight).all()):
                raise fields.refuse(f"SAE.{name}", "not finite", "finite numbers")
            self._constants[name] = Constant.of(weight)
            self._weights[name] = _over(self._constants[name].data or b"", torch.float32).view(weight.shape)
        self._rescales = self.architecture == "topk" and fields.flag(
            "SAE.rescale_acts_by_decoder_norm", config.get("rescale_acts_by_decoder_norm", False)
        )
        self._config = {
            "architecture": self.architecture,
            "d_in": self.width,
            "d_sae": self.features,
            "apply_b_dec_to_input": self._subtracts,
            "normalize_activations": self._norm,
            "metadata": {"hook_name": hook},
            **({"k": self._k, "rescale_acts_by_decoder_norm": self._rescales} if self._k else {}),
        }

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, site: str | None = None, layer: int | None = None) -> SAE:
        """The SAE in a directory that SAELens has written: `cfg.json` and `sae_weights.safetensors`.

        Args:
            site, layer: as in the constructor.

        Raises:
            PlanError: as the class does; or the files cannot be read.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            config = json.loads((Path(path) / "cfg.json").read_text())
            weights = load_file(Path(path) / "sae_weights.safetensors")
        except (OSError, ValueError, SafetensorError) as error:
            raise PlanError(f"{os.fspath(path)!r} has no SAE of SAELens's: {error}.") from error
        return cls(config, weights, site=site, layer=layer)

    @classmethod
    def of(cls, sae: Any, *, site: str | None = None, layer: int | None = None) -> SAE:
        """The SAE of an object of SAELens's, such as `sae_lens.SAE.from_pretrained` returns. Raises PlanError as the class does."""
        return cls(sae.cfg.to_dict(), sae.state_dict(), site=site, layer=layer)

    @classmethod
    def read(cls, data: bytes | bytearray) -> SAE:
        """The SAE that `written` wrote. Raises PlanError as the class does, or if the data is of something else."""
        try:
            size = 8 + int.from_bytes(data[:8], "little")
            header = json.loads(bytes(data[8:size]))
            config, site, layer = json.loads(header.pop("__metadata__")[_WRITTEN])
            weights = {}
            for name, entry in header.items():  # without a copy: a server holds the data meanwhile
                begin, end = (size + fields.integer(name, each, 0) for each in entry["data_offsets"])
                values = _over(memoryview(data)[begin:end], _FILE_DTYPES[entry["dtype"]])
                weights[name] = values.view(entry["shape"])
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise PlanError(f"The data is no SAE that SAE.written wrote: {error}.") from error
        if not isinstance(config, dict):
            raise fields.refuse("SAE.config", fields.shown(config), "a dict")
        return cls(config, weights, site=site, layer=layer)

    def written(self) -> bytes:
        """The SAE as a safetensors file, for a server: see `read`."""
        from safetensors.torch import save

        return save(self._weights, {_WRITTEN: json.dumps([self._config, self.site, self.layer])})

    @property
    def nbytes(self) -> int:
        """The bytes of memory that it takes."""
        return sum(constant.nbytes for constant in self._constants.values())

    @property
    def held(self) -> dict[str, Constant]:
        """Its large constants, by the digest under which an engine holds them: `Constant.held`."""
        made = [self._constant(name) for name in ("W_enc", "directions")]
        return {each.without_data.held: each for each in made if each.nbytes >= HELD_BYTES}

    def __repr__(self) -> str:
        return f"SAE({self.architecture}, {self.features} features of {self.site} at layer {self.layer})"

    # ------------------------------------------------------------------------------------------------------ on rows

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """The activations of all features, float32 `[R, S]`, of rows `[R, hidden]` on any device."""
        writer, rows = StepWriter(self.width, "float32"), self._checked_rows("encode", rows)
        program = writer.program(self._activations(writer, self._normed(writer), None), keeps=True)
        return unpacked(program, run(program, rows))[0] if len(rows) else rows.new_empty(0, self.features)

    def reconstruct(self, rows: torch.Tensor) -> torch.Tensor:
        """The reconstructions of rows `[R, hidden]`, float32 `[R, hidden]`."""
        writer, rows = StepWriter(self.width, "float32"), self._checked_rows("reconstruct", rows)
        normed = self._normed(writer)
        return run(writer.program(self._decoded(writer, self._activations(writer, normed, None), normed)), rows)

    def _checked_rows(self, method: str, rows: torch.Tensor) -> torch.Tensor:
        if rows.ndim != 2 or rows.shape[1] != self.width:
            raise fields.refuse(f"SAE.{method}: rows", f"of shape {list(rows.shape)}", f"[rows, {self.width}]")
        return rows.float()

    # ------------------------------------------------------------------------------------------------------ interventions

    def direction(self, feature: int) -> torch.Tensor:
        """What one unit of a feature's activation adds to the value, `[hidden]`; to the normalized value, if the SAE normalizes values."""
        return self._directions[self._checked("direction", feature)].clone()

    def capture(
        self,
        features: int | Sequence[int] | None = None,
        *,
        top_k: int | None = None,
        name: str = "sae",
        positions: Any = "all_generated",
        **options: Any,
    ) -> Probe:
        """Activations of each selected token, as a `Probe`: `output.scores[name]` is float32 `[tokens, C]`. A single feature may also end a
        request, and be the condition of `When`.

        Args:
            features: which ones, up to 64.
            top_k: in place of `features`: the highest activations, up to 32, the highest first. `output.scores.indices[name]` says of
                which features, -1 for an activation of 0.
            name, positions, options: as in `Probe`.

        Raises:
            PlanError: a feature that the SAE does not have, or a field that `Probe` refuses.
        """
        if (features is None) == (top_k is None):
            raise fields.refuse("SAE.capture", "without features and top_k, or with both", "one of them")
        writer = StepWriter(self.width, "float32")
        if top_k is None:
            chosen = self._chosen("capture", features)
            program = writer.program(self._activations(writer, self._normed(writer), chosen), keeps=True)
        else:
            count = _within("SAE.capture: top_k", top_k, 1, min(MOST_TOP, self.features))
            acts = self._activations(writer, self._normed(writer), None)
            top = writer.step("topk.default", acts, count, 1)
            values, places = Ref(top.step, 0), Ref(top.step, 1)
            is_active = writer.step("gt.Scalar", values, 0.0)
            indices = writer.step("where.ScalarOther", is_active, places, -1)
            indices = writer.step("_to_copy.default", indices, dtype=DType("int32"))
            program = writer.program(values, indices, keeps=True)
        return Probe(self.site, layer=self.layer, program=program, name=name, positions=positions, **options)

    def steer(self, feature: int, scale: float, **options: Any) -> Steer:
        """Add a feature's direction: `h += scale * direction(feature)`. Raises PlanError for a feature that the SAE does not have.

        Args:
            scale: in units of the feature's activation.
            options: `phase`, `positions` and `norm_match`, as in `Steer`.
        """
        return Steer(self.site, layers=self.layer, vector=self.direction(feature), scale=scale, **options)

    def clamp(
        self,
        feature: int | Sequence[int],
        low: float | None = None,
        high: float | None = None,
        *,
        error_term: bool = True,
        phase: str = "both",
        positions: Any = None,
    ) -> Apply:
        """Keep the activations of features within bounds. With the error term, a value whose activations are already within bounds stays as
        it is.

        Args:
            feature: one, or up to 64.
            low, high: bounds of the activation; None for no bound.
            error_term: whether the value keeps what the SAE does not reconstruct: `h += (clip(a) - a) * direction`. Without it, the value
                becomes the reconstruction from the clamped activations.
            phase, positions: as in `Steer`.

        Raises:
            PlanError: a feature that the SAE does not have; no bound; low is above high; a field that `Apply` refuses.
        """
        chosen = self._chosen("clamp", feature)
        bounds = [
            fields.number(f"SAE.clamp: {name}", each)
            for name, each in (("low", low), ("high", high))
            if each is not None
        ]
        if not bounds or bounds != sorted(bounds):
            raise fields.refuse("SAE.clamp", f"low={low} and high={high}", "one bound, or low <= high")
        writer = StepWriter(self.width, "float32")
        normed = self._normed(writer)
        if error_term:
            acts = self._activations(writer, normed, chosen)
        else:
            every = self._activations(writer, normed, None)
            acts = writer.step("index_select.default", every, 1, writer.constant(torch.tensor(chosen)))
        least, most = -math.inf if low is None else float(low), math.inf if high is None else float(high)
        delta = writer.step("sub.Tensor", writer.step("clamp.default", acts, least, most), acts)
        directions_CH = self._directions[chosen]
        if len(chosen) == 1:
            change = writer.step("mul.Tensor", delta, writer.constant(directions_CH[0]))
        else:
            change = writer.step("mm.default", delta, writer.constant(directions_CH))
        if normed.scale is not None:
            change = writer.step("mul.Tensor", change, normed.scale)
        old = INPUT if error_term else self._decoded(writer, every, normed)
        program = writer.program(writer.step("add.Tensor", old, change))
        return Apply(self.site, layers=self.layer, program=program, phase=phase, positions=positions)

    def ablate(self, feature: int | Sequence[int], **options: Any) -> Apply:
        """Set the activations of features to 0. `options`: as in `clamp`. Raises PlanError as `clamp` does."""
        return self.clamp(feature, low=0.0, high=0.0, **options)

    def made(self, method: Any, arguments: Mapping[str, Any]) -> Intervention:
        """What one of these methods returns, by its name and from data. Raises PlanError as they do, and for arguments that it lacks."""
        function = getattr(self, fields.one_of("do", method, METHODS))
        try:
            inspect.signature(function).bind(**arguments)
            return function(**arguments)  # type: ignore[no-any-return]
        except TypeError as error:
            raise fields.refuse(f"SAE.{method}", str(error), str(inspect.signature(function))) from error

    # ------------------------------------------------------------------------------------------------------ their programs

    def _normed(self, writer: StepWriter) -> _Normed:
        step, x = writer.step, INPUT
        if self._norm == "constant_norm_rescale":
            norm = step("linalg_vector_norm.default", x, 2, (1,), True)
            scale = step("div.Tensor", norm, math.sqrt(self.width))
            return _Normed(step("div.Tensor", x, scale), scale)
        if self._norm == "layer_norm":
            mean = step("mean.dim", x, (1,), True)
            x = step("sub.Tensor", x, mean)
            std = step("std.correction", x, (1,), correction=1, keepdim=True)
            return _Normed(step("div.Tensor", x, step("add.Tensor", std, _LN_EPS)), std, mean)
        return _Normed(x)  # SAELens folds other normalizations into the weights when it saves them

    def _activations(self, writer: StepWriter, normed: _Normed, chosen: list[int] | None) -> Ref:
        """The activations of the chosen features, or of all: `[R, C]`."""
        step, x = writer.step, normed.value
        if self._subtracts:
            x = step("sub.Tensor", x, writer.constant(self._constant("b_dec")))
        if self.architecture == "topk":
            acts = self._top_activations(writer, x)
            return (
                acts if chosen is None else step("index_select.default", acts, 1, writer.constant(torch.tensor(chosen)))
            )

        def of(name: str) -> Any:
            return writer.constant(self._constant(name) if chosen is None else self._tensor(name)[chosen])

        pre = self._encoded(writer, x, chosen)
        if self.architecture == "gated":
            is_active = step("gt.Scalar", step("add.Tensor", pre, of("b_gate")), 0.0)
            pre = step("add.Tensor", step("mul.Tensor", pre, of("rates")), of("b_mag"))
            return step("where.ScalarOther", is_active, step("relu.default", pre), 0.0)
        pre = step("add.Tensor", pre, of("b_enc"))
        acts = step("relu.default", pre)
        if self.architecture == "jumprelu":
            acts = step("where.ScalarOther", step("gt.Tensor", pre, of("threshold")), acts, 0.0)
        return acts

    def _encoded(self, writer: StepWriter, x: Ref, chosen: list[int] | None) -> Ref:
        """The product with the encoder's columns, `[R, C]`."""
        if chosen is None:
            return writer.step("mm.default", x, writer.constant(self._constant("W_enc")))
        return writer.product(x, self._weights["W_enc"][:, chosen])

    def _top_activations(self, writer: StepWriter, x: Ref) -> Ref:
        step = writer.step
        pre = step("add.Tensor", self._encoded(writer, x, None), writer.constant(self._constant("b_enc")))
        if self._rescales:
            pre = step("mul.Tensor", pre, writer.constant(self._constant("norms")))
        top = step("topk.default", pre, self._k, 1)
        values = step("relu.default", Ref(top.step, 0))
        return step("scatter.src", step("zeros_like.default", pre), 1, Ref(top.step, 1), values)

    def _decoded(self, writer: StepWriter, acts: Ref, normed: _Normed) -> Ref:
        step = writer.step
        out = step("mm.default", acts, writer.constant(self._constant("directions")))
        out = step("add.Tensor", out, writer.constant(self._constant("b_dec")))
        if normed.scale is not None:
            out = step("mul.Tensor", out, normed.scale)
        return out if normed.shift is None else step("add.Tensor", out, normed.shift)

    def _constant(self, name: str) -> Constant:
        if name == "directions" and not self._rescales:
            name = "W_dec"
        if name not in self._constants:
            self._constants[name] = Constant.of(self._tensor(name))
        return self._constants[name]

    def _tensor(self, name: str) -> torch.Tensor:
        """A weight, or what is computed from weights."""
        if name == "rates":
            return self._weights["r_mag"].exp()
        if name == "norms":
            return self._weights["W_dec"].norm(dim=-1)
        if name == "directions":
            norms_S1 = self._weights["W_dec"].norm(dim=-1, keepdim=True)
            norms_S1 = norms_S1.where(norms_S1 > 0, torch.ones_like(norms_S1))  # a dead feature adds nothing
            return self._weights["W_dec"] / norms_S1
        return self._weights[name]

    @cached_property
    def _directions(self) -> torch.Tensor:
        """What one unit of each feature's activation adds, `[S, H]`."""
        return _over(self._constant("directions").data or b"", torch.float32).view(self.features, self.width)

    @cached_property
    def _constants(self) -> dict[str, Constant]:
        return {}

    def _chosen(self, method: str, given: Any) -> list[int]:
        features = list(given) if isinstance(given, (list, tuple, range)) else [given]
        if not 0 < len(features) <= MAX_CLASSES or len(set(features)) < len(features):
            raise fields.refuse(f"SAE.{method}", f"for {len(features)} features", f"1 to {MAX_CLASSES} different ones")
        return [self._checked(method, feature) for feature in features]

    def _checked(self, method: str, feature: Any) -> int:
        return _within(f"SAE.{method}: feature", feature, 0, self.features - 1)


def _over(data: bytes | memoryview, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor over this memory, which it keeps alive. PyTorch's own way warns if the memory is read-only."""
    raw = np.frombuffer(data, np.uint8)
    if not raw.size:
        return torch.empty(0, dtype=dtype)
    buffer = (ctypes.c_char * raw.size).from_address(raw.ctypes.data)
    buffer.owner = raw  # type: ignore[attr-defined]
    return torch.frombuffer(buffer, dtype=dtype)


def _within(field: str, value: Any, low: int, high: int) -> int:
    number = fields.integer(field, value)
    if not low <= number <= high:
        raise fields.refuse(field, str(number), f"{low} to {high}")
    return number


def _place(hook: str, site: str | None, layer: int | None) -> tuple[str, int]:
    """The site and the layer, those of a hook's name where they are not given."""
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
