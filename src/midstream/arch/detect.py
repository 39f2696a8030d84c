"""Places the sites of a decoder-only model: nominate parts by name, run one forward, and bind what it shows.

    architecture = detect(model, run=lambda: model(input_ids))
    architecture.binding("resid_post", 3)

Where the residual stream is multiplied by something outside a module (Granite's `residual_multiplier`), `attn_out` and
`mlp_out` are the module's output, before it. The sites `logits` and `samples` belong to the backends, which may add
them to `bindings`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import nn

from midstream.arch.blocks import Block
from midstream.arch.ends import bind_embed, bind_final_norm, planted_embedding
from midstream.arch.names import Names, is_placeholder, text_config
from midstream.arch.probe import Plant, Probe, record
from midstream.arch.shapes import shapes_of, widths_of
from midstream.arch.streams import bind_streams, check_shapes, find_layout, stream_of
from midstream.errors import ArchitectureError, UnknownSiteError
from midstream.sites import LAYER_SITES, MODEL_SITES, Binding, Kind, Ref


class Part(Protocol):
    """A leaf of which this process has a part, being one of several tensor-parallel ranks (`layouts.Layout`)."""

    @property
    def width(self) -> int | None:
        """How many elements one token of the whole has, or None if it is as many as here."""
        ...


Parts = Mapping[tuple[str, Kind], Mapping[Ref, Part]]


class PartsFinder(Protocol):
    """Tells which leaves are parts (`shards.Finder`)."""

    def watch(self, modules: Mapping[str, nn.Module]) -> set[str]:
        """The modules whose tensors it wants snapshots of."""
        ...

    def plants(self, modules: Mapping[str, nn.Module]) -> dict[str, Plant]:
        """What it wants the outputs of some modules replaced by."""
        ...

    def __call__(self, probe: Probe) -> Parts: ...


@dataclass(frozen=True)
class Architecture:
    """Where everything is in one model, or in one pipeline stage of it.

    Attributes:
        num_layers: of the whole model.
        layers: those in this process.
        hidden_size: width of the residual stream.
        bindings: `(site, layer)`, or `(site, None)` for what the model has once, to where the value lies.
        parts: role to path: `layers`, `embed`, `final_norm`, `lm_head` as far as they exist here, and `attn` and `mlp`
            with `{}` for the layer.
        order: `(path, "input" | "output")` to the first and last moment of the forward at which this happened, counted
            over the inputs and outputs of all modules that were called. The root's path is "".
        shapes: path to the shape of its output, with T for the token axis and B for a batch axis.
        widths: for each binding, how many elements one token has; heads counted together.
        shards: by module's input or output, the leaves that this process has only a part of. Heads and widths are those of the whole.
    """

    num_layers: int
    layers: tuple[int, ...]
    hidden_size: int
    bindings: dict[tuple[str, int | None], Binding]
    parts: dict[str, str]
    order: dict[tuple[str, str], tuple[int, int]]
    shapes: dict[str, str]
    widths: dict[tuple[str, int | None], int]
    shards: Parts = field(default_factory=dict)

    def part_of(self, binding: Binding) -> Part | None:
        """How this process's part of a site makes up the whole; None if it has the whole."""
        return self.shards.get((binding.path, binding.kind), {}).get(binding.hidden)

    @property
    def sites(self) -> tuple[str, ...]:
        """The names of the sites that there are, in the vocabulary's order."""
        found = {name for name, _ in self.bindings}
        return tuple(name for name in (*LAYER_SITES, *MODEL_SITES) if name in found)

    def binding(self, site: str, layer: int | None = None) -> Binding:
        """Where a site's value lies.

        Raises:
            UnknownSiteError: the model has no such site, or not at this layer, or not in this process.
        """
        found = self.bindings.get((site, layer))
        if found is not None:
            return found
        raise UnknownSiteError(self._why_not(site, layer))

    def _why_not(self, site: str, layer: int | None) -> str:
        have = f"it has {', '.join(self.sites)}"
        if site not in self.sites:
            near = difflib.get_close_matches(site, [*self.sites, *LAYER_SITES, *MODEL_SITES], n=1)
            known = site in LAYER_SITES or site in MODEL_SITES
            hint = f"; did you mean {near[0]!r}?" if near and not known else ""
            return f"this model has no site {site!r}: {have}{hint}"
        at = [index for name, index in self.bindings if name == site]
        if at == [None]:
            return f"site {site!r} exists once per model and takes no layer, but layer {layer} was given"
        if layer is None:
            return f"site {site!r} needs a layer, 0 to {self.num_layers - 1}"
        if not 0 <= layer < self.num_layers:
            return f"layer {layer} is out of range for site {site!r}: the model has layers 0 to {self.num_layers - 1}"
        if layer not in self.layers:
            return f"layer {layer} is not in this process, which has layers {list(self.layers)}"
        return f"layer {layer} has no site {site!r}; these have it: {sorted(i for i in at if i is not None)}"


def detect(
    root: nn.Module,
    run: Callable[[], Any],
    *,
    num_heads: int | None = None,
    head_dim: int | None = None,
    rename: Mapping[str, str] | None = None,
    find_parts: PartsFinder | None = None,
) -> Architecture:
    """Finds the sites of `root`.

    Args:
        root: the model, or the part of it that this process has.
        run: performs one forward of a few tokens over `root`, uncompiled. Its values do not matter and are changed on
            the way, so nothing that is kept, such as a prefix cache, may come from it.
        num_heads: attention heads in this process, if the model does not say how wide a head is.
        head_dim: width of a head, where the model's own word is not to be taken.
        rename: the user's names, as `{"my_blocks": "layers", "mixer": "attn"}`; roles are `midstream.arch.ROLES`.
        find_parts: where several ranks share each layer: which leaves this one has a part of.

    Raises:
        ArchitectureError: the structure cannot be placed; the message names the module and what was expected.
    """
    names = Names(rename)
    modules = dict(root.named_modules())
    containers = {path: found for path in modules if (found := _blocks(path, modules, names))}
    probe = _probed(root, run, containers, names, find_parts)
    container = _the_container(containers, modules, probe, names)
    calls = {i: call for i, path in containers[container].items() if (call := probe.first(path)) is not None}
    layout = find_layout(probe, list(calls.values()))
    blocks = {i: Block(probe, call, layout, names) for i, call in calls.items()}
    first, last = calls[min(calls)], calls[max(calls)]

    bindings: dict[tuple[str, int | None], Binding] = {}
    for index, block in blocks.items():
        bindings |= bind_streams(block.call, index, layout)
        bindings |= block.bind(index, text_config(root), num_heads, head_dim)
    if (embed := bind_embed(probe, first, layout, names)) is not None:
        bindings["embed", None] = embed
    if (norm := bind_final_norm(probe, last, layout, names)) is not None:
        bindings["final_norm", None] = norm
    arch = Architecture(
        num_layers=max(_indices(modules[container])) + 1,
        layers=tuple(sorted(calls)),
        hidden_size=stream_of(first).shape[-1],
        bindings=bindings,
        parts=_parts(root, container, blocks, bindings, names),
        order=dict(probe.order),
        shapes=shapes_of(probe, stream_of(first)),
        widths=widths_of(probe, bindings),
    )
    return arch if find_parts is None else _widened(arch, find_parts(probe))


def _widened(arch: Architecture, shards: Parts) -> Architecture:
    """With the heads and widths that the sites have on all ranks together."""
    arch = replace(arch, shards=shards)
    widths, bindings = dict(arch.widths), dict(arch.bindings)
    for point, binding in arch.bindings.items():
        part = arch.part_of(binding)
        if part is not None and part.width is not None:
            widths[point] = part.width
            if binding.heads is not None:
                bindings[point] = replace(binding, heads=(part.width // binding.heads[1], binding.heads[1]))
    return replace(arch, widths=widths, bindings=bindings)


def _parts(
    root: nn.Module,
    container: str,
    blocks: Mapping[int, Block],
    bindings: Mapping[tuple[str, int | None], Binding],
    names: Names,
) -> dict[str, str]:
    """Role to path, for the roles that one module has."""
    parts = {"layers": container}
    for block in blocks.values():
        for role, part in (("attn", block.attn), ("mlp", block.mlp)):
            if part is not None and part.first is part.last:
                parts.setdefault(role, f"{container}.{{}}{part.first.path[len(block.call.path) :]}")
    for role in ("embed", "final_norm"):
        if (role, None) in bindings:
            parts[role] = bindings[role, None].path
    # Tied heads are the embedding itself, under a second path.
    paths = [path for path, module in root.named_modules(remove_duplicate=False) if not is_placeholder(module)]
    heads = [(path.count("."), rank, path) for path in paths if (rank := names.rank(path, "lm_head")) is not None]
    if outside := [path for _, _, path in sorted(heads) if not path.startswith(f"{container}.")]:
        parts["lm_head"] = outside[0]
    return parts


def _indices(container: nn.Module) -> list[int]:
    return [int(name) for name, _ in container.named_children() if name.isdigit()]


def _blocks(path: str, modules: Mapping[str, nn.Module], names: Names) -> dict[int, str]:
    """The layers of a container that has a container's name, by index; those of other pipeline stages left out."""
    if names.rank(path, "layers") is None:
        return {}
    present = [i for i in _indices(modules[path]) if not is_placeholder(modules.get(f"{path}.{i}", nn.Identity()))]
    return {i: f"{path}.{i}" for i in present}


def _probed(
    root: nn.Module,
    run: Callable[[], Any],
    containers: Mapping[str, dict[int, str]],
    names: Names,
    find_parts: PartsFinder | None,
) -> Probe:
    """The recorded forward. One that fails because two streams do not fit together is told as that."""
    modules, probe = dict(root.named_modules()), Probe()
    watch, plant = _watched(containers, modules), _plants(containers, modules, names)
    if find_parts is not None:
        watch, plant = watch | find_parts.watch(modules), find_parts.plants(modules) | plant
    try:
        return record(root, run, watch=watch, plant=plant, probe=probe)
    except Exception as error:
        for blocks in containers.values():
            begun = [call for path in blocks.values() if (call := probe.first(path)) is not None]
            for block, following in pairwise(begun):
                try:
                    check_shapes(block, following)
                except ArchitectureError as reason:
                    raise reason from error
        raise


def _watched(containers: Mapping[str, dict[int, str]], modules: Mapping[str, nn.Module]) -> set[str]:
    blocks = {block for blocks in containers.values() for block in blocks.values()}
    children = {f"{block}.{name}" for block in blocks for name, _ in modules[block].named_children()}
    return blocks | children


def _plants(
    containers: Mapping[str, dict[int, str]], modules: Mapping[str, nn.Module], names: Names
) -> dict[str, Plant]:
    """Attention must leave a mark, since one that returns zeros cannot be told from one that nobody reads."""
    plants: dict[str, Plant] = {
        path: planted_embedding
        for path, module in modules.items()
        if names.rank(path, "embed") is not None and getattr(getattr(module, "weight", None), "ndim", 0) == 2
    }
    for blocks in containers.values():
        for block in blocks.values():
            if attn := names.child(modules[block], block, "attn"):
                plants[attn] = torch.ones_like
    return plants


def _the_container(
    containers: Mapping[str, dict[int, str]], modules: Mapping[str, nn.Module], probe: Probe, names: Names
) -> str:
    """The one list of blocks that the forward went through."""
    called = [path for path, blocks in containers.items() if any(probe.first(block) for block in blocks.values())]
    inner = [path for path in called if any(path.startswith(f"{outer}.") for outer in called if outer != path)]
    called = [path for path in called if path not in inner]
    if own := [path for path in called if (names.rank(path, "layers") or 0) < len(names.own("layers"))]:
        called = own
    with_parts = [path for path in called if _has_parts(containers[path].values(), modules, names)]
    called = with_parts or called
    if len(called) == 1:
        return called[0]
    if called:
        raise ArchitectureError(
            f"{type(modules['']).__name__} has several lists of layers that its forward goes through: "
            f"{', '.join(called)}; expected one. Name it by its path, as rename={{{called[0]!r}: 'layers'}}"
        )
    if containers:
        raise ArchitectureError(
            f"the forward of {type(modules['']).__name__} called no layer of {', '.join(containers)}; expected it to "
            f"go through one of them, uncompiled and not replayed from a graph"
        )
    lists = [path for path, module in modules.items() if isinstance(module, (nn.ModuleList, nn.Sequential))]
    raise ArchitectureError(
        f"{type(modules['']).__name__} has no list of layers under a standard name (layers, h, blocks, ...); its "
        f"lists are {', '.join(lists) or 'none'}. "
        f"Name it by rename={{{(lists[0] if lists else 'my_blocks')!r}: 'layers'}}"
    )


def _has_parts(blocks: Any, modules: Mapping[str, nn.Module], names: Names) -> bool:
    return any(names.child(modules[b], b, "attn") or names.child(modules[b], b, "mlp") for b in blocks)
