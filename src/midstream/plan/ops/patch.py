"""Patch: replace a value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from midstream.errors import PlanError
from midstream.plan import fields
from midstream.plan.fields import Span
from midstream.plan.ops.edit import Edit, Intervention, RowChange, Shape, changed, register
from midstream.plan.vectors import RecordedRun, Zeros, as_mask, as_vector_or_name, is_zero

if TYPE_CHECKING:
    import torch
    import triton.language as tl


@register
@dataclass(frozen=True)
class Patch(Edit):
    """Replace the value at chosen positions of the prompt: `h = (1 - a) * h + a * source`, exactly `source` at a = 1.

    Activation patching (causal tracing): Meng et al. 2022 (arXiv:2202.05262), Wang et al. 2022 (arXiv:2211.00593). Several patches at one
    position are applied in their order.

    Args:
        site: one of `midstream.sites.LAYER_SITES`.
        layer: counted from 0, or from the end: -1.
        position: one or several positions of the prompt, or a `Span`; negative numbers count from its end.
        source: a `RecordedRun`, a vector `[hidden]`, `"zeros"`, or the name of a vector that the engine holds.
        source_position: for a run: a list with one position for each, or one position for all that `position` lists. A `Span` of several
            tokens needs one for each. Negative numbers count from the end of the run's prompt. None means the same numbers as `position`.
        source_layer, source_site: for a run; None means the same as `layer` and `site`.
        alpha: a, from 0 (no effect) to 1 (replace).
        mask: `[hidden]`, from 0 to 1, multiplied with alpha in each dimension; True and False count as 1 and 0. Or a name.
        head: at sites of heads (`attn_z`), patch only this head or these heads, counted from 0, each from the same head of the source. A
            vector or a mask is then `[heads * head_dim]`, with the heads side by side; or `[head_dim]`, the same for each of them.

    Raises:
        PlanError: the value of a field is not allowed, or a `source_...` field is given although the source is not a run.
    """

    kind, order, operands, run_operands = "patch", 10, ("source", "mask"), ("source",)
    layer_field, position_field = "layer", "position"
    place_fields = frozenset({"position", "source_position"})
    limited_by = "mask"
    phase: ClassVar[str] = "prefill"  # type: ignore[misc]

    site: str
    _: KW_ONLY
    layer: int
    position: Any
    source: Any
    source_position: Any = None
    source_layer: int | None = None
    source_site: str | None = None
    alpha: float = 1.0
    mask: Any = None
    head: Any = None

    def __post_init__(self) -> None:
        source = self.source
        if isinstance(source, str) and source == "zeros":
            source = Zeros()
        elif not isinstance(source, (RecordedRun, Zeros)):
            source = as_vector_or_name("Patch.source", source)
        self.settle(
            position=fields.positions("Patch.position", self.position),
            source=source,
            alpha=fields.number("Patch.alpha", self.alpha, 0.0, 1.0),
            mask=None if self.mask is None else as_vector_or_name("Patch.mask", self.mask, as_mask),
        )
        for name in ("source_position", "source_layer", "source_site"):
            given = getattr(self, name)
            if given is not None and not isinstance(source, RecordedRun):
                raise fields.refuse(f"Patch.{name}", fields.shown(given), "None, since the source is no recorded run")
        if self.source_layer is not None:
            fields.settle(self, source_layer=fields.integer("Patch.source_layer", self.source_layer))
        if self.source_site is not None:
            fields.settle(self, source_site=fields.site("Patch.source_site", self.source_site))
        if self.source_position is not None:
            fields.settle(self, source_position=self._checked_source_position())

    def _checked_source_position(self) -> tuple[int, ...]:
        field, allowed = "Patch.source_position", "a position of the run or one for each of Patch.position"
        given = fields.integers(field, self.source_position, allowed, distinct=False)
        if not isinstance(self.position, Span) and len(given) not in (1, len(self.position)):
            raise fields.refuse(field, f"{len(given)} positions for {len(self.position)}", allowed)
        return given

    def with_places(self, **found: tuple[int, ...]) -> Intervention:
        """Raises PlanError if one `source_position` would fill several tokens of a span: the user may take the span for one token."""
        positions, sources = found.get("position", ()), self.source_position
        if sources is not None and len(sources) == 1 < len(positions):
            numbers = list(positions)
            text = (
                f"Patch.source_position is one position, and {self.position} is {len(numbers)} tokens, at {numbers}. Give one for each, in "
                f"a list of {len(numbers)}. If all of them should get the same row, list them: position={numbers}."
            )
            raise PlanError(text, field="Patch.source_position")
        return super().with_places(**found)

    def counted_from_0(self, num_layers: int) -> Patch:
        layers = {
            name: layer + num_layers
            for name in ("layer", "source_layer")
            if (layer := getattr(self, name)) is not None and -num_layers <= layer < 0
        }
        return changed(self, **layers) if layers else self

    def changes_nothing(self) -> bool:
        return self.alpha == 0 or is_zero(self.mask)

    def numbers(self) -> tuple[float, float, float]:
        return self.alpha, 0.0, 0.0

    def shape(self, field: str) -> Shape | None:
        return as_mask if field == "mask" else None

    def _source_point(self) -> tuple[str, int]:
        """The (site, layer) of the run's row."""
        return self.source_site or self.site, self.layer if self.source_layer is None else self.source_layer

    def spread(self, num_layers: int | None, prompt_length: int | None) -> Iterator[Patch]:
        """One patch for each position, with all fields of its source filled in."""
        self.layers_in(num_layers or 0)
        positions, sources = self.place_in(prompt_length), self.source_position or self.position
        patch, run = self, self.source if self.reads_run else None
        if run is not None:
            site, layer = self._source_point()
            patch = changed(self, source_site=site, source_layer=layer)
            if prompt_length is not None:
                length, of = len(run.prompt_token_ids), f"the run {run.name!r}"
                sources = fields.resolved("Patch.source_position", sources, length, of)
        if isinstance(positions, Span):
            yield patch
            return
        for i, position in enumerate(positions):
            source = sources[i] if len(sources) > 1 else sources[0]
            yield changed(patch, position=(position,), source_position=None if run is None else (source,))

    def run_row(self) -> tuple[str, int, int]:
        return *self._source_point(), self.source_position[0]

    def check_run(self, field: str, run: RecordedRun, widths: Mapping[tuple[str, int], int]) -> None:
        site, layer = self._source_point()
        if site not in run.sites:
            raise fields.refuse(field, f"{site!r}, which the run {run.name!r} lacks", ", ".join(run.sites) or "none")
        if layer not in run.layers:
            there = ", ".join(map(str, run.layers))
            text = f"{field} asks for layer {layer}, which the run {run.name!r} lacks; allowed: {there}."
            raise PlanError(text, field=field)
        width, expected = (widths.get(point) for point in ((site, layer), (self.site, self.layer)))
        if width is not None and expected is not None and width != expected:
            given = f"a run's {site} at layer {layer}, of width {width}"
            raise fields.refuse(field, given, f"{expected}, the width of {self.site} at layer {self.layer}")
        positions = self.source_position or self.position
        if isinstance(positions, Span):
            return
        name = "Patch.source_position" if self.source_position else "Patch.position (and so Patch.source_position)"
        recorded = set(run.positions)
        for position in fields.resolved(name, positions, len(run.prompt_token_ids), f"the run {run.name!r}"):
            if position not in recorded:
                given = f"{position}, which the run {run.name!r} did not record"
                raise fields.refuse(name, given, fields.ranges(run.positions))

    @classmethod
    def saying(cls, change: RowChange, site: str, layer: int, where: Mapping[str, Any]) -> Sequence[Edit]:
        if change.scale or change.outers or "positions" not in where:
            return ()
        places, source = where["positions"], change.constant
        if source is None or not bool(source.any()):
            return (cls(site, layer=layer, position=places, source="zeros"),)
        return (cls(site, layer=layer, position=places, source=source.float()),)

    @staticmethod
    def reference(h_TH: torch.Tensor, v_H: Any, w_H: Any, a: float, b: float, c: float) -> torch.Tensor:
        import torch

        weight_H = torch.full_like(v_H, a) if w_H is None else a * w_H
        mixed_TH = (1 - weight_H) * h_TH + weight_H * v_H
        # A recorded half-precision row may hold an infinity, and 0 times that is NaN.
        return v_H.where(weight_H == 1, h_TH.where(weight_H == 0, mixed_TH))

    @staticmethod
    def kernel(h, v, w, a, b, c):  # type: ignore[no-untyped-def]
        weight = a * w
        mixed = (1.0 - weight) * h + weight * v
        return tl.where(weight == 1.0, v, tl.where(weight == 0.0, h, mixed))
