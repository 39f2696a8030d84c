"""Sparse autoencoders: plans read, steer and clamp their features while the model runs.

    sae = SAE.load("gemma-layer-20")                      # a directory of SAELens's; it names the site and the layer
    plan = [sae.capture(top_k=32, name="features"), sae.clamp(1234, high=0.5)]
    (output,) = model.generate(prompt, plan=plan)
    output.scores["features"], output.scores.indices["features"]   # activations and features, [tokens, 32]

A value that an SAE normalizes first is `h = scale(h) * n(h) + shift(h)`. The encoder reads n(h), and the decoder writes n(h). So one more
unit of a feature's activation changes the value by `scale(h) * direction`, and every edit here does the same.

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
from typing import Any, NamedTuple

import numpy as np
import torch

from midstream import sae_files
from midstream.errors import PlanError
from midstream.plan import fields
from midstream.plan.building import StepWriter
from midstream.plan.ops import Apply, Steer
from midstream.plan.ops.edit import Intervention
from midstream.plan.probes import MAX_CLASSES, Probe
from midstream.plan.program import HELD_BYTES
from midstream.plan.running import run, unpacked
from midstream.plan.steps import INPUT, Constant, DType, Ref

METHODS = ("capture", "steer", "clamp", "ablate")
_LN_EPS = 1e-5
_WRITTEN = "midstream-sae"  # the key of a file's metadata
_FILE_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
MOST_TOP = 32


class _Normed(NamedTuple):
    """A value as the encoder reads it: `h = scale * value + shift`.

    Attributes:
        value: `[R, H]`.
        scale, shift: `[R, 1]`; None for 1 and 0.
    """

    value: Ref
    scale: Ref | None = None
    shift: Ref | None = None


class SAE:
    """A sparse autoencoder of a site's value, in float32. It computes the same activations as `sae_lens.SAE.encode` of SAELens 6, for the
    architectures standard, gated (Rajamanoharan et al. 2024, arXiv:2404.16014), jump-ReLU (arXiv:2407.14435) and top-k (Gao et al. 2024,
    arXiv:2406.04093), and for inputs that are normalized by `layer_norm` or `constant_norm_rescale`.

    Its methods return interventions for plans. An engine of `midstream.VLLM` holds the large matrices once, within its `weight_bytes`,
    whatever the number of requests.

    Args:
        config: SAELens's configuration: `architecture`, `d_in`, `d_sae`, `apply_b_dec_to_input`, `normalize_activations`; of a top-k SAE
            `k` and `rescale_acts_by_decoder_norm`; in `metadata` the `hook_name`.
        weights: by SAELens's names: `W_enc` `[H, S]`, `W_dec` `[S, H]`, `b_dec` `[H]`, and the architecture's others, `[S]`. They are
            copied.
        site, layer: of the value; None takes them from the `hook_name`, such as `blocks.20.hook_resid_post`.

    Raises:
        PlanError: the architecture or the normalization is not known, or the normalization uses numbers that are not among the weights
            (see `load`); a weight is missing, not finite or of another shape; the hook's name does not say the site and the layer.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, torch.Tensor],
        *,
        site: str | None = None,
        layer: int | None = None,
    ) -> None:
        self.architecture = sae_files.architecture(config)
        self.width = fields.integer("SAE.d_in", config.get("d_in"), 1)
        self.features = fields.integer("SAE.d_sae", config.get("d_sae"), 1)
        self._norm = sae_files.normalization(config.get("normalize_activations", "none"))
        self._subtracts = fields.flag("SAE.apply_b_dec_to_input", config.get("apply_b_dec_to_input", True))
        self._k = _within("SAE.k", config.get("k"), 1, self.features) if self.architecture == "topk" else 0
        metadata = config.get("metadata") or {}
        hook = (metadata.get("hook_name") if isinstance(metadata, Mapping) else None) or ""
        if not isinstance(hook, str):
            raise fields.refuse("SAE.metadata", fields.shown(metadata), "a dict with a hook_name")
        self.site, self.layer = sae_files.place(hook, site, layer)
        self._weights = sae_files.checked(self.architecture, self.width, self.features, weights)
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

        A checkpoint of SAELens's trainer may normalize its inputs by fixed numbers: a factor (`expected_average_only_in`) in
        `activation_scaler.json`, or a mean and matrices (`covariance_whitening`; arXiv:2511.13981) in `activation_whitening.safetensors`.
        They become part of the weights, as in the SAE that SAELens saves at the end of the training.

        Args:
            site, layer: as in the constructor.

        Raises:
            PlanError: as the class does; or the files cannot be read; or those of the normalization are missing or of another shape.
        """
        config, weights, norm = sae_files.read(path)
        sae = cls(config, weights, site=site, layer=layer)
        if norm is not None:
            sae_files.fold(norm, sae._weights, sae._subtracts, sae._rescales)
            if sae._rescales and isinstance(norm, sae_files.Whitening):
                sae._rescales = sae._config["rescale_acts_by_decoder_norm"] = False
        return sae

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
        sizes = {name: weight.nbytes for name, weight in self._weights.items()}
        return sum((sizes | {name: constant.nbytes for name, constant in self._constants.items()}).values())

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
        """The vector that one unit of a feature's activation adds to the value, `[hidden]`. If the SAE normalizes its inputs, the vector is
        added to the normalized value: multiply it by the scale(h) of `steer`.
        """
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
            top_k: in place of `features`: the highest activations, up to 32, the highest first. `output.scores.indices[name]` has
                the numbers of their features, -1 for an activation of 0.
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

    def steer(self, feature: int, scale: float, **options: Any) -> Steer | Apply:
        """Change the value as the decoder does for `scale` more units of a feature's activation: `h += scale * direction(feature)`.

        If the SAE normalizes its inputs, `h += scale * scale(h) * direction(feature)`: scale(h) is `||h|| / sqrt(hidden)` for
        `constant_norm_rescale`, and the standard deviation of h for `layer_norm`. The encoder then reads about the same rise as without a
        normalization, `scale * (W_enc[:, feature] @ direction(feature))`. This is `scale` if both are the same unit vector. The
        rise is smaller if the change is as long as h itself, because the change is normalized, too.

        Args:
            scale: in units of the feature's activation, as the encoder computes it.
            options: `phase`, `positions` and `norm_match`, as in `Steer`. With `norm_match`, `scale` is in units of the length of h.

        Returns:
            A `Steer`; an `Apply` if the SAE normalizes its inputs, unless `norm_match` is set.

        Raises:
            PlanError: a feature that the SAE does not have; a field that `Steer` or `Apply` refuses.
        """
        direction_H = self.direction(feature)
        if self._norm == "none" or options.get("norm_match"):
            return Steer(self.site, layers=self.layer, vector=direction_H, scale=scale, **options)
        options.pop("norm_match", None)
        writer = StepWriter(self.width, "float32")
        change_H = writer.constant(fields.number("SAE.steer: scale", scale) * direction_H)
        _, length, _ = self._scaled(writer)
        program = writer.program(writer.step("add.Tensor", INPUT, writer.step("mul.Tensor", length, change_H)))
        return Apply(self.site, layers=self.layer, program=program, **options)

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
        """Keep the activations of features within bounds: change the value as the decoder does when the activations change to the bounds.
        With the error term, a value whose activations are already within bounds stays as it is.

        Args:
            feature: one, or up to 64.
            low, high: bounds of the activation; None for no bound.
            error_term: whether the value keeps what the SAE does not reconstruct: `h += (clip(a) - a) * scale(h) * direction`, with the
                scale(h) of `steer`. Without it, the value becomes the reconstruction from the clamped activations.
            phase, positions: as in `Steer`.

        Raises:
            PlanError: a feature that the SAE does not have; no bound; low is above high; low is above every activation that the feature can
                have on normalized inputs; a field that `Apply` refuses.
        """
        chosen = self._chosen("clamp", feature)
        bounds = [
            fields.number(f"SAE.clamp: {name}", each)
            for name, each in (("low", low), ("high", high))
            if each is not None
        ]
        if not bounds or bounds != sorted(bounds):
            raise fields.refuse("SAE.clamp", f"low={low} and high={high}", "one bound, or low <= high")
        if low is not None:
            self._check_reached(chosen, low)
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
        """Call one of METHODS by its name and return its intervention. Raises PlanError as the method does, or if arguments do not fit."""
        function = getattr(self, fields.one_of("do", method, METHODS))
        try:
            inspect.signature(function).bind(**arguments)
            return function(**arguments)  # type: ignore[no-any-return]
        except TypeError as error:
            raise fields.refuse(f"SAE.{method}", str(error), str(inspect.signature(function))) from error

    # ------------------------------------------------------------------------------------------------------ their programs

    def _scaled(self, writer: StepWriter) -> _Normed:
        """The value minus its shift, the scale and the shift, for an SAE that normalizes its inputs."""
        step = writer.step
        if self._norm == "constant_norm_rescale":
            norm = step("linalg_vector_norm.default", INPUT, 2, (1,), True)
            return _Normed(INPUT, step("div.Tensor", norm, math.sqrt(self.width)))
        mean = step("mean.dim", INPUT, (1,), True)
        x = step("sub.Tensor", INPUT, mean)
        return _Normed(x, step("std.correction", x, (1,), correction=1, keepdim=True), mean)

    def _normed(self, writer: StepWriter) -> _Normed:
        if self._norm == "none":
            return _Normed(INPUT)
        x, scale, shift = self._scaled(writer)
        divisor = writer.step("add.Tensor", scale, _LN_EPS) if self._norm == "layer_norm" else scale
        return _Normed(writer.step("div.Tensor", x, divisor), scale, shift)

    def _check_reached(self, chosen: Sequence[int], low: float) -> None:
        """Raise PlanError if no normalized input gives one of the features an activation of `low`.

        The inputs lie on a sphere, so a feature has a highest pre-activation: at the encoder's own direction.
        """
        if self._norm == "none":
            return
        columns_HC, radius = self._weights["W_enc"][:, chosen], math.sqrt(self.width)
        bias_C = -(self._weights["b_dec"] @ columns_HC) if self._subtracts else torch.zeros(len(chosen))
        if self._norm == "layer_norm":
            columns_HC, radius = columns_HC - columns_HC.mean(0), math.sqrt(self.width - 1)
        most_C = radius * columns_HC.norm(dim=0) + bias_C
        if self.architecture == "gated":
            most_C = most_C * self._tensor("rates")[chosen] + self._weights["b_mag"][chosen]
        else:
            most_C = most_C + self._weights["b_enc"][chosen]
        if self._rescales:
            most_C = most_C * self._tensor("norms")[chosen]
        for feature, most in zip(chosen, most_C.clamp(min=0).tolist(), strict=True):
            if low > most:
                allowed = f"up to {most:.4g}, the highest activation of feature {feature} on inputs that {self._norm} normalizes"
                raise fields.refuse(
                    "SAE.clamp: low", f"{low:g}", f"{allowed}; SAE.steer adds any multiple of its direction"
                )

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
            made = self._constants[name] = Constant.of(self._tensor(name))
            if name in self._weights:  # the weight and the constant share one copy
                self._weights[name] = _over(made.data or b"", torch.float32).view(made.shape)
        return self._constants[name]

    def _tensor(self, name: str) -> torch.Tensor:
        """A weight, or a tensor computed from weights."""
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
