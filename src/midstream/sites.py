"""The sites: places of a decoder-only model where activations are read and changed.

A site is `(name, layer)`. Its value is the activation in the mathematical sense, independent of how the engine stores it: `[tokens,
hidden]`, the request's own tokens in this step; `[tokens, heads, head_dim]` at the sites of heads, `[tokens, experts]` at `router`. A
`Binding` gives the place of the value in the running model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import torch

    from midstream.tree import Ref

# In the order of the forward pass.
LAYER_SITES = (
    "resid_pre",
    "attn_in",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_z",
    "attn_out",
    "resid_mid",
    "mlp_in",
    "router",
    "mlp_act",
    "mlp_out",
    "resid_post",
)
_PARTS = (LAYER_SITES[1:7], LAYER_SITES[8:12])  # attention and MLP, which some models run side by side
HEAD_SITES = ("attn_q", "attn_k", "attn_v", "attn_z")  # [tokens, heads, head_dim]; plans see the heads side by side
MODEL_SITES = ("embed", "final_norm", "logits", "samples")

# The standard accessors, with nnterp's names.
ACCESSORS = {
    "layers_input": "resid_pre",
    "layers_output": "resid_post",
    "attentions_input": "attn_in",
    "attentions_output": "attn_out",
    "mlps_input": "mlp_in",
    "mlps_output": "mlp_out",
    "token_embeddings": "embed",
}

# TransformerLens's names of activations, without `blocks.3.` before them.
HOOKS = {
    "hook_resid_pre": "resid_pre",
    "hook_resid_mid": "resid_mid",
    "hook_resid_post": "resid_post",
    "hook_attn_out": "attn_out",
    "hook_mlp_out": "mlp_out",
    "hook_mlp_in": "mlp_in",
    "hook_attn_in": "attn_in",
    "ln1.hook_normalized": "attn_in",
    "ln2.hook_normalized": "mlp_in",
    "attn.hook_rot_q": "attn_q",
    "attn.hook_rot_k": "attn_k",
    "attn.hook_v": "attn_v",
    "attn.hook_z": "attn_z",
    "hook_z": "attn_z",
    "mlp.hook_post": "mlp_act",
    "hook_post": "mlp_act",
    "hook_embed": "embed",
    "ln_final.hook_normalized": "final_norm",
}


# The hooks whose value equals a site's. Hooks of norms have the value before the norm's weight is applied, `hook_mlp_in` before the norm.
EXACT_HOOKS = (
    "hook_resid_pre hook_resid_mid hook_resid_post hook_attn_out hook_mlp_out attn.hook_z mlp.hook_post".split()
)


def site_of(name: Any) -> Any:
    """The site that a standard accessor's name stands for: `resid_post` for `layers_output`; else the name itself."""
    return ACCESSORS.get(name, name) if isinstance(name, str) else name


def hook_of(name: str) -> tuple[str, int | None]:
    """`("hook_resid_post", 3)` for TransformerLens's `blocks.3.hook_resid_post`; the name itself and None for names without a layer."""
    parts = name.split(".") if len(name) <= 100 else []
    if len(parts) > 2 and parts[0] == "blocks" and parts[1].isdecimal():
        return ".".join(parts[2:]), int(parts[1])
    return name, None


def hook_at(site: str, layer: int) -> str:
    """TransformerLens's name of the hook whose value a site has: `blocks.3.hook_resid_post`. For a site without one, midstream's own name
    in the same form.
    """
    hook = next((hook for hook in EXACT_HOOKS if HOOKS[hook] == site), site)
    return f"blocks.{layer}.{hook}"


def point_of_hook(name: str) -> tuple[str, int] | None:
    """`("resid_post", 3)` for TransformerLens's `blocks.3.hook_resid_post`; None for a name that stands for no site and layer."""
    hook, layer = hook_of(name)
    return (HOOKS[hook], layer) if hook in EXACT_HOOKS and layer is not None else None


def hook_hint(name: str) -> str:
    """`did you mean 'resid_post', with layer 3?` for TransformerLens's `blocks.3.hook_resid_post`; empty for other names."""
    hook, layer = hook_of(name)
    site = HOOKS.get(hook)
    if site is None:
        return ""
    return f"did you mean {site!r}{f', with layer {layer}' if layer is not None else ''}?"


Kind = Literal["input", "output"]
Point = tuple[str, int]  # (site, layer)
# A point of the forward: (path, "input"), (path, "output"), ("", "logits"), (path, "source", call, "output").
Key = tuple[str, ...]


def module_name(path: str) -> str:
    """The module as a user writes it: `model.model.layers[3].mlp` for `model.layers.3.mlp`."""
    return "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in f"model.{path}".split(".") if part)[1:]


def point_name(key: Key) -> str:
    """The point as a user writes it: `model.model.layers[3].output`; `model.logits`."""
    path, *rest = key
    return ".".join([module_name(path), *rest])


@dataclass(frozen=True)
class Binding:
    """The place of one site's value: a module, its input or output, and the leaves there.

    For `kind="input"` leaves are looked up in the pair `(args, kwargs)`: `(0, 1)` is the second positional argument, `(1, "hidden_states")`
    a keyword argument. For `kind="output"` they are looked up in the module's return value: `()` is the returned tensor itself, `(0,)` the
    first element of a tuple.

    Attributes:
        path: the module's path in the tree, such as `model.layers.3`.
        kind: whether the value goes into the module or comes out of it.
        hidden: the leaf that holds the value, or the first of two streams.
        residual: the leaf of the second stream, if the value is the sum of two. At run time the leaf may be None (first layer of a
            dual-stream model); then the value is `hidden` alone.
        heads: `(heads, head_dim)` if the last axis is to be split, for the sites of heads.
        scale: the value is the leaf times this factor, for embeddings that the model scales outside of their module.
        in_place: whether the block later adds this same tensor to the stream, so that a write has to change the tensor itself.
    """

    path: str
    kind: Kind
    hidden: Ref
    residual: Ref | None = None
    heads: tuple[int, int] | None = None
    scale: float = 1.0
    in_place: bool = False

    @property
    def key(self) -> Key:
        return self.path, self.kind

    def read(self, leaf: Callable[[Ref], torch.Tensor | None]) -> torch.Tensor:
        """The site's value. `leaf` looks up a leaf; the result may share its memory."""
        value = leaf(self.hidden)
        assert value is not None
        second = leaf(self.residual) if self.residual is not None else None
        if second is not None:
            value = value + second
        if self.scale != 1.0:
            value = value * self.scale
        if self.heads is not None:
            value = value.unflatten(-1, self.heads)
        return value

    def leaves(self, value: torch.Tensor, leaf: Callable[[Ref], Any]) -> list[tuple[Ref, torch.Tensor]]:
        """The tensor to write to each leaf, so that `read` then returns exactly `value`."""
        if self.heads is not None:
            value = value.flatten(-2)
        if self.scale != 1.0:
            value = value / self.scale
        second = leaf(self.residual) if self.residual is not None else None
        if self.residual is None or second is None:
            return [(self.hidden, value)]
        if second.ndim == 1:  # a bias next to the output, shared by all requests
            return [(self.hidden, value - second)]
        # v + 0 is v in every dtype; (v - residual) + residual is not.
        return [(self.hidden, value), (self.residual, value.new_zeros(()).expand_as(value))]


def comes_before(one: Point, other: Point) -> bool:
    """Whether every model computes the value at `one` before it reaches `other`."""
    (site, layer), (later, its_layer) = one, other
    if layer != its_layer or site == later:
        return layer < its_layer
    both = next((part for part in _PARTS if site in part and later in part), None)
    return site == "resid_pre" or later == "resid_post" if both is None else both.index(site) < both.index(later)


class NotFinite(NamedTuple):
    """The first place where a request's activations were seen to be infinite or NaN.

    Attributes:
        position: the lowest such position, counted from the start of the prompt.
        point: the first (site, layer) where a plan's edit caused it; None for other causes.
    """

    position: int
    point: Point | None

    def __str__(self) -> str:
        if self.point is None:
            return f"Activations are infinite or NaN at position {self.position}, by the end of the forward pass"
        site, layer = self.point
        return f"Activations are infinite or NaN at {site} of layer {layer}, position {self.position}"
