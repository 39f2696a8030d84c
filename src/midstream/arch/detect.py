"""Finds the sites of a decoder-only model: names nominate its parts, and one recorded forward shows their roles.

    architecture = detect(model, run=lambda: model(input_ids))
    architecture.binding("resid_post", 3)

If the model scales additions to the residual stream outside of a module (Granite's `residual_multiplier`), `attn_out` and `mlp_out` are the
module's output before scaling. The backends handle the sites `logits` and `samples`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import nn

from midstream.arch.aliases import Aliases, Rename
from midstream.arch.blocks import (
    ROLES,
    DecoderBlock,
    RoleNames,
    bind_embed,
    bind_final_norm,
    bind_streams,
    check_shapes,
    find_layout,
    is_a,
    returns_norm,
    stream_of,
)
from midstream.arch.probe import Plant, ProbeForward, planted_embedding, record, shapes_of
from midstream.errors import ArchitectureError, UnknownSiteError
from midstream.sites import LAYER_SITES, MODEL_SITES, Binding, Kind, Point
from midstream.tree import Ref


class Shard(Protocol):
    """The relation of this process's part of a tensor to the full tensor of all tensor-parallel ranks."""

    @property
    def width(self) -> int | None:
        """The width of the full tensor; None if it equals the part's."""
        ...


Shards = Mapping[tuple[str, Kind], Mapping[Ref, Shard]]


class ShardFinder:
    """Finds the tensors that are sharded over tensor-parallel ranks. This class is for a model in one process, and finds none."""

    def watch(self, modules: Mapping[str, nn.Module]) -> set[str]:
        """The modules whose tensors need snapshots."""
        return set()

    def plants(self, modules: Mapping[str, nn.Module]) -> dict[str, Plant]:
        """path -> the function that replaces the module's output in the probe."""
        return {}

    def find(self, probe: ProbeForward) -> Shards:
        """The sharded tensors in the recorded forward."""
        return {}


@dataclass(frozen=True)
class Architecture:
    """The places of the sites and modules of one model, or of one of its pipeline stages.

    Attributes:
        num_layers: of the full model.
        layers: those in this process.
        hidden_size: width of the residual stream.
        bindings: `(site, layer)`, or `(site, None)` for sites that the model has once -> the place of the value.
        order: `(path, "input" | "output")` -> the first and the last moment of the forward at which the module was called or returned.
            Moments count the inputs and outputs of all modules. The root's path is "".
        shapes: path -> shape of its output, T for the token axis and B for a batch axis.
        widths: for each binding, the number of elements of one token, in all heads together.
        shards: for a module's input or output, the leaves that are sharded. Heads and widths in `bindings` and `widths` are those of the
            full tensors.
        returns_norm: whether the hidden states that the model returns are the value of `final_norm`. If not, the model scales them first.
    """

    num_layers: int
    layers: tuple[int, ...]
    hidden_size: int
    bindings: dict[tuple[str, int | None], Binding]
    order: dict[tuple[str, str], tuple[int, int]]
    shapes: dict[str, str]
    widths: dict[tuple[str, int | None], int]
    shards: Shards = field(default_factory=dict)
    returns_norm: bool = True

    def shard_of(self, binding: Binding) -> Shard | None:
        """The relation of this process's part of a site to the full value; None if this process has the full value."""
        return self.shards.get((binding.path, binding.kind), {}).get(binding.hidden)

    @property
    def head_dims(self) -> dict[Point, int]:
        """(site, layer) -> the width of a head, for the sites that have heads."""
        return {
            (site, layer): binding.heads[1]
            for (site, layer), binding in self.bindings.items()
            if layer is not None and binding.heads is not None
        }

    @property
    def values(self) -> dict[tuple[str, Kind], Point]:
        """`(path, "input" | "output")` -> the layer's site whose value is the module's input or output.

        Values with an axis before the tokens are excluded, since a site's value has none.
        """
        found: dict[tuple[str, Kind], Point] = {}
        for (site, layer), binding in self.bindings.items():
            alone = Binding(binding.path, binding.kind, () if binding.kind == "output" else (0, 0))
            begins_with_tokens = self.shapes.get(binding.path, "").lstrip("(").startswith("[T")
            if layer is not None and binding == alone and begins_with_tokens and not self.shard_of(binding):
                found.setdefault((binding.path, binding.kind), (site, layer))
        return found

    @property
    def sites(self) -> tuple[str, ...]:
        """The names of the sites that this model has, in the order of the forward pass."""
        found = {name for name, _ in self.bindings}
        return tuple(name for name in (*LAYER_SITES, *MODEL_SITES) if name in found)

    def binding(self, site: str, layer: int | None = None) -> Binding:
        """The place of a site's value.

        Raises:
            UnknownSiteError: the model has no such site, the site does not exist at this layer, or it is not in this process.
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
            last = self.num_layers - 1
            return (
                f"the model has no layer {layer}: its layers are 0 to {last}, or from the end -1 to -{self.num_layers}"
            )
        if layer not in self.layers:
            return f"layer {layer} is not in this process, which has layers {list(self.layers)}"
        return f"layer {layer} has no site {site!r}; these have it: {sorted(i for i in at if i is not None)}"


def detect(
    root: nn.Module,
    run: Callable[[], Any],
    *,
    head_dim: int | None = None,
    rename: Rename | None = None,
    shards: ShardFinder | None = None,
) -> Architecture:
    """Find the sites of `root`.

    Args:
        root: the model, or the part of it in this process.
        run: runs one uncompiled forward of a few tokens over `root`. The probe changes values during the forward, so its results, such as a
            prefix cache, must not be reused.
        head_dim: width of a head, for attention modules that do not state it.
        rename: the user's names, such as `{"my_blocks": "layers", "mixer": "attn"}`. Roles are `midstream.arch.ROLES`; other names are only
            aliases.
        shards: finds the tensors that tensor-parallel ranks share.

    Raises:
        ArchitectureError: the model does not have the expected structure. The message names the module and the expected structure.
    """
    modules = dict(root.named_modules())
    aliases = Aliases(rename, modules)
    aliases.check(modules, ROLES)
    names, shards = RoleNames(aliases), shards or ShardFinder()
    containers = {path: found for path in modules if (found := _blocks(path, modules, names))}
    probe = _probed(root, run, containers, names, shards)
    container = _the_container(containers, modules, probe, names)
    calls = {i: call for i, path in containers[container].items() if (call := probe.first(path)) is not None}
    layout = find_layout(probe, list(calls.values()))
    blocks = {i: DecoderBlock(probe, call, layout, names) for i, call in calls.items()}
    first, last = calls[min(calls)], calls[max(calls)]

    bindings: dict[tuple[str, int | None], Binding] = {}
    for index, block in blocks.items():
        bindings |= bind_streams(block.call, index, layout)
        bindings |= block.bind(index, text_config(root), head_dim)
    if (embed := bind_embed(probe, first, layout, names)) is not None:
        bindings["embed", None] = embed
    if (norm := bind_final_norm(probe, last, layout, names)) is not None:
        bindings["final_norm", None] = norm
    arch = Architecture(
        returns_norm=norm is None or returns_norm(probe, norm, stream_of(last)),
        num_layers=max(_indices(modules[container])) + 1,
        layers=tuple(sorted(calls)),
        hidden_size=stream_of(first).shape[-1],
        bindings=bindings,
        order=dict(probe.order),
        shapes=shapes_of(probe, stream_of(first)),
        widths=_widths_of(probe, bindings),
    )
    return _with_shards(arch, shards.find(probe))


def _with_shards(arch: Architecture, shards: Shards) -> Architecture:
    """`arch` with the heads and widths that the sites have on all ranks together."""
    arch = replace(arch, shards=shards)
    widths, bindings = dict(arch.widths), dict(arch.bindings)
    for point, binding in arch.bindings.items():
        shard = arch.shard_of(binding)
        if shard is not None and shard.width is not None:
            widths[point] = shard.width
            if binding.heads is not None:
                bindings[point] = replace(binding, heads=(shard.width // binding.heads[1], binding.heads[1]))
    return replace(arch, widths=widths, bindings=bindings)


def _widths_of(
    probe: ProbeForward, bindings: Mapping[tuple[str, int | None], Binding]
) -> dict[tuple[str, int | None], int]:
    calls = {call.path: call for call in reversed(probe.calls)}
    found: dict[tuple[str, int | None], int] = {}
    for point, binding in bindings.items():
        call = calls[binding.path]
        leaves = call.inputs if binding.kind == "input" else call.returned
        found[point] = next(leaf for leaf in leaves if leaf.ref == binding.hidden).shape[-1]
    return found


def _indices(container: nn.Module) -> list[int]:
    return [int(name) for name, _ in container.named_children() if name.isdigit()]


def _is_placeholder(module: nn.Module) -> bool:
    """Whether `module` stands for a module of another pipeline stage. vLLM's Transformers backend puts a plain Identity in its place."""
    return is_a(module, "PPMissingLayer") or type(module) is nn.Identity


def _blocks(path: str, modules: Mapping[str, nn.Module], names: RoleNames) -> dict[int, str]:
    """index -> path of the layers in this process, if `path` is named like a container of layers."""
    if names.rank(path, "layers") is None:
        return {}
    present = [i for i in _indices(modules[path]) if not _is_placeholder(modules.get(f"{path}.{i}", nn.Identity()))]
    return {i: f"{path}.{i}" for i in present}


def _probed(
    root: nn.Module,
    run: Callable[[], Any],
    containers: Mapping[str, dict[int, str]],
    names: RoleNames,
    shards: ShardFinder,
) -> ProbeForward:
    """Record the forward. If it fails because two streams have different shapes, raise an ArchitectureError that names the shapes."""
    modules, probe = dict(root.named_modules()), ProbeForward()
    blocks = [block for found in containers.values() for block in found.values()]
    children = {f"{block}.{name}" for block in blocks for name, _ in modules[block].named_children()}
    watch = {*blocks, *children, *shards.watch(modules)}
    # A dummy run may skip attention, which then returns zeros. Zeros would hide whether the block uses attention's output.
    plant = shards.plants(modules)
    plant |= {
        path: planted_embedding
        for path, module in modules.items()
        if names.rank(path, "embed") is not None and getattr(getattr(module, "weight", None), "ndim", 0) == 2
    }
    plant |= {attn: torch.ones_like for block in blocks if (attn := names.child(modules[block], block, "attn"))}
    try:
        return record(root, run, watch=watch, plant=plant, probe=probe)
    except Exception as error:
        for layers in containers.values():
            begun = [call for path in layers.values() if (call := probe.first(path)) is not None]
            for block, following in pairwise(begun):
                try:
                    check_shapes(block, following)
                except ArchitectureError as reason:
                    raise reason from error
        raise


def _the_container(
    containers: Mapping[str, dict[int, str]], modules: Mapping[str, nn.Module], probe: ProbeForward, names: RoleNames
) -> str:
    """The list of blocks that the forward used. Raises ArchitectureError unless there is exactly one."""
    called = [path for path, blocks in containers.items() if any(probe.first(block) for block in blocks.values())]
    inner = [path for path in called if any(path.startswith(f"{outer}.") for outer in called if outer != path)]
    called = [path for path in called if path not in inner]
    if own := [path for path in called if (names.rank(path, "layers") or 0) < len(names.own("layers"))]:
        called = own

    def has_parts(block: str) -> bool:
        return any(names.child(modules[block], block, role) for role in ("attn", "mlp"))

    called = [path for path in called if any(map(has_parts, containers[path].values()))] or called
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


def unknown_logits(model: str) -> ArchitectureError:
    """The error of `project_on_vocab` on a model that changes its values between the final norm and the logits."""
    return ArchitectureError(
        f"project_on_vocab: {model} changes its values after the final norm, and midstream does not know how. Read "
        "model.logits, or call the model's own modules."
    )


def show_tree(
    modules: Mapping[str, Any],
    shapes: Mapping[str, str],
    sites: Iterable[str] = (),
    aliases: Mapping[tuple[str, str], str] = MappingProxyType({}),
) -> str:
    """Indented lines `name: Class -> shape`, with equal neighbouring layers on one line.

    `mlp/ffn: ...` is a module with an alias, and `blocks = model.layers` an alias of a module further down.

    Args:
        modules: path -> module, or the name of its class.
        shapes: path -> shape of its output (`shapes_of`).
        aliases: from `Aliases.table`.
    """
    beside: dict[str, str] = {}
    further: dict[str, list[str]] = {}
    for (owner, alias), path in aliases.items():
        below = path.removeprefix(owner).lstrip(".")
        if "." in below:
            further.setdefault(owner, []).append(f"{alias} = {below}")
        else:
            beside[path] = f"{beside.get(path, '')}/{alias}"
    classes = {path: each if isinstance(each, str) else type(each).__name__ for path, each in modules.items()}
    children: dict[str, list[str]] = {}
    for path in filter(None, modules):
        children.setdefault(path.rpartition(".")[0], []).append(path)

    def lines_below(parent: str, indent: str) -> list[str]:
        lines = [f"{indent}{line}" for line in further.get(parent, ())]
        folded: list[str] = []  # the lines of the previous module; the first, lines[at], without its name
        at = 0
        for path in children.get(parent, ()):
            name, below = path.rpartition(".")[2], lines_below(path, f"{indent}  ")
            more = beside.get(path, "")
            head = f"{more}: {classes[path]}{f' -> {shapes[path]}' if path in shapes else ''}"
            if name.isdigit() and [head, *below] == folded:
                first = re.match(r"\s*(\d+)", lines[at])[1]  # type: ignore[index]
                lines[at] = f"{indent}{first}-{name}{head}"
            else:
                folded, at = [head, *below], len(lines)
                lines += [f"{indent}{name}{head}", *below]
        return lines

    last = [f"sites: {', '.join(sites)}, logits, samples"] if sites else []
    return "\n".join([classes.get("", "model"), *lines_below("", "  "), *last])


def text_config(root: nn.Module) -> Any:
    """The configuration of the language model, or None."""
    config = getattr(root, "config", None)
    return getattr(config, "text_config", None) or config


class Sizes:
    """The number of heads and token ids, read from the model's transformers configuration."""

    @property
    def _text_config(self) -> Any:
        """The transformers configuration of the language model."""
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return self._text_config.vocab_size

    @property
    def num_heads(self) -> int:
        """The number of attention heads of a layer, as in `attn_z`."""
        return self._text_config.num_attention_heads

    @property
    def num_kv_heads(self) -> int:
        """The number of key and value heads of a layer."""
        return getattr(self._text_config, "num_key_value_heads", None) or self.num_heads

    @property
    def head_dim(self) -> int:
        """The width of a head of `attn_z`."""
        given = getattr(self._text_config, "head_dim", None)
        return given or self._text_config.hidden_size // self.num_heads
