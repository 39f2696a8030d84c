"""The handle of a recorded run. Its activations stay in the memory of the workers that computed them."""

from __future__ import annotations

from dataclasses import dataclass

from midstream.errors import PlanError
from midstream.plan import fields
from midstream.sites import LAYER_SITES


@dataclass(frozen=True)
class RecordedRun:
    """A recorded run, as `model.record(prompt, ...)` returns it; a source of `Patch`.

    Attributes:
        name: what the user called it.
        id: unique over engines and time.
        prompt_token_ids: what was run.
        sites: the sites that were recorded,
        layers: at each of these layers,
        positions: at these positions, counted from the prompt's begin; ascending.
    """

    name: str
    id: str
    prompt_token_ids: tuple[int, ...]
    sites: tuple[str, ...]
    layers: tuple[int, ...]
    positions: tuple[int, ...]

    def __post_init__(self) -> None:
        fields.text("RecordedRun.name", self.name)
        fields.text("RecordedRun.id", self.id)
        if any(not isinstance(site, str) or site not in LAYER_SITES for site in self.sites):
            raise fields.refuse("RecordedRun.sites", fields.shown(self.sites), ", ".join(LAYER_SITES))
        for name in ("prompt_token_ids", "layers", "positions"):
            checked = tuple(fields.integer(f"RecordedRun.{name}", item, 0) for item in getattr(self, name))
            object.__setattr__(self, name, checked if name == "prompt_token_ids" else tuple(sorted(checked)))
        object.__setattr__(self, "sites", tuple(self.sites))

    def __repr__(self) -> str:
        return f"RecordedRun({self.name!r}, {len(self.prompt_token_ids)} tokens, {list(self.sites)}, {len(self.layers)} layers)"

    def check_point(self, field: str, site: str, layer: int) -> None:
        """Raises PlanError if the run has no rows of that site and layer."""
        if site not in self.sites:
            raise fields.refuse(field, f"{site!r}, which the run {self.name!r} lacks", ", ".join(self.sites) or "none")
        if layer not in self.layers:
            there = ", ".join(map(str, self.layers))
            raise PlanError(f"{field} asks for layer {layer}, which the run {self.name!r} lacks; allowed: {there}.")
