"""Detection on stub modules, one per layout (rows B2, B3, B4, B6, B7). No vLLM, no transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stub_blocks import (
    HEADS,
    BareMLP,
    CopyBeforeMLP,
    Dual,
    DualByHand,
    FakeDual,
    H,
    InPlace,
    Keyword,
    Mismatched,
    Model,
    Norm,
    Parallel,
    PostNorm,
    Single,
    SumThenNorm,
    T,
    Tupled,
    WithBias,
    by_keyword,
    by_position,
    first_of_tuple,
    positions_first,
    two_by_keyword,
    two_streams,
)
from torch import nn

from midstream.arch import Architecture, detect
from midstream.errors import ArchitectureError, UnknownSiteError
from midstream.tree import follow

IDS = torch.tensor([3, 1, 4, 1, 5])


def probe(model: nn.Module, **options: Any) -> Architecture:
    return detect(model, lambda: model(IDS), **options)


def read_all(model: nn.Module, architecture: Architecture) -> dict[tuple[str, int | None], torch.Tensor]:
    """Every site's value, by plain forward hooks at the bindings."""
    values, modules, handles = {}, dict(model.named_modules()), []
    for key, binding in architecture.bindings.items():

        def take(tree: Any, key: Any = key, binding: Any = binding) -> None:
            values[key] = binding.read(lambda ref: follow(tree, ref)).detach().clone()

        def before(m: Any, args: Any, kwargs: Any, take: Any = take) -> None:
            take((args, kwargs))

        def after(m: Any, args: Any, output: Any, take: Any = take) -> None:
            take(output)

        module = modules[binding.path]
        if binding.kind == "input":
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        else:
            handles.append(module.register_forward_hook(after))
    with torch.no_grad():
        model(IDS)
    for handle in handles:
        handle.remove()
    return values


LAYOUTS = {
    "single": (Single, by_position),
    "copy_before_mlp": (CopyBeforeMLP, by_position),
    "tuple": (Tupled, first_of_tuple),
    "keyword": (Keyword, by_keyword),
    "positions_first": (Keyword, positions_first),
    "dual": (Dual, two_streams),
    "dual_by_keyword": (Dual, two_by_keyword),
    "dual_by_hand": (DualByHand, two_streams),
    "fake_dual": (FakeDual, two_streams),
    "in_place": (InPlace, by_position),
    "post_norm": (PostNorm, by_position),
    "sum_then_norm": (SumThenNorm, by_position),
    "bias_pair": (WithBias, by_position),
    "bare_mlp": (BareMLP, by_position),
    "parallel": (Parallel, by_position),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_residual_stream(layout: str) -> None:
    """B2, B3, B6: the value at a layer boundary is the stream, whatever carries it; and the parts add up."""
    model = Model(*LAYOUTS[layout])
    architecture = probe(model)
    values = read_all(model, architecture)
    for i in range(3):
        assert torch.equal(values["resid_pre", i], model.stream[i])
        assert torch.equal(values["resid_post", i], model.stream[i + 1])
        assert values["attn_in", i].is_floating_point()
        assert values["attn_z", i].shape == (T, HEADS, H // HEADS)
        assert values["mlp_act", i].shape == (T, 3 * H)
        parts = values["attn_out", i] + values["mlp_out", i]
        torch.testing.assert_close(values["resid_pre", i] + parts, values["resid_post", i])
        if layout == "parallel":
            assert ("resid_mid", i) not in values
        else:
            middle = values["resid_mid", i]
            torch.testing.assert_close(middle, values["resid_pre", i] + values["attn_out", i])
            torch.testing.assert_close(middle + values["mlp_out", i], values["resid_post", i])


@pytest.mark.parametrize("layout", ["single", "dual"])
def test_final_norm_is_one_tensor(layout: str) -> None:
    """B7: a fused norm returns a pair, and the value is its first element."""
    model = Model(*LAYOUTS[layout])
    binding = probe(model).binding("final_norm")
    assert binding.hidden == ((0,) if layout == "dual" else ())
    assert binding.residual is None


@pytest.mark.parametrize("layout", ["dual", "single", "keyword"])
def test_a_stage_with_one_layer(layout: str) -> None:
    """A pipeline stage may have one layer, and the first of a dual-stream model sees no residual."""
    model = Model(*LAYOUTS[layout], num_layers=1)
    values = read_all(model, probe(model))
    assert torch.equal(values["resid_pre", 0], model.stream[0])
    assert torch.equal(values["resid_post", 0], model.stream[1])


def test_a_stream_that_is_changed_between_some_blocks() -> None:
    """Vision features are added to the first layers' outputs (Qwen3-VL): the other hand-overs tell the layout."""

    def with_features(layer: nn.Module, positions: torch.Tensor, h: torch.Tensor, r: Any) -> tuple[torch.Tensor, Any]:
        h, r = layer(positions, h, r)
        return (h + 1 if layer.is_first else h), r

    model = Model(Dual, with_features, num_layers=4)
    for i, layer in enumerate(model.layers):
        layer.is_first = i == 0
    binding = probe(model).binding("resid_post", 0)
    assert (binding.hidden, binding.residual) == ((0,), (1,))


def test_layers_of_other_stages_are_left_out() -> None:
    class PPMissingLayer(nn.Identity):
        def forward(self, positions: Any, h: torch.Tensor, r: Any) -> Any:
            return h, r

    model = Model(Dual, two_streams, num_layers=4)
    model.layers[0], model.layers[3] = PPMissingLayer(), PPMissingLayer()
    architecture = probe(model)
    assert (architecture.num_layers, architecture.layers) == (4, (1, 2))
    with pytest.raises(UnknownSiteError, match=r"layer 3 is not in this process.*\[1, 2\]"):
        architecture.binding("resid_post", 3)


def test_streams_of_different_shapes() -> None:
    """B4: names the module and what was expected, at detection."""
    with pytest.raises(ArchitectureError, match=r"layers\.0 hands two streams of different shapes.*expected"):
        probe(Model(Mismatched, two_streams))


class Scaled(Model):
    """Returns a multiple of its final norm's value, as MiniCPM does on vLLM."""

    def forward(self, *args: Any) -> Any:
        return super().forward(*args) / 2


def test_a_model_that_scales_what_its_final_norm_returns() -> None:
    assert probe(Model(Single, by_position)).returns_norm
    assert not probe(Scaled(Single, by_position)).returns_norm


class Padded(nn.Module):
    """Attention whose values have half the width of its queries, and are padded to it."""

    def __init__(self, padded: bool) -> None:
        super().__init__()
        kernel = type(
            "Attention", (nn.Module,), {"forward": lambda self, q, k, v: v + 0 * q, "head_size": 8, "impl": object()}
        )
        self.attn, self.o_proj, self.padded = kernel(), nn.Linear(H if padded else 2 * H, H), padded

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        wide = torch.cat([hidden_states] * 2, -1)
        z = self.attn(wide, wide + 1, wide + 2)
        return self.o_proj(z[:, :H] if self.padded else z)


@pytest.mark.parametrize("padded", [False, True])
def test_padded_values_are_no_site(padded: bool) -> None:
    """Seen failing without the check: `attn_v` then has heads of the queries' width, half of it padding."""

    class Latent(Single):
        def __init__(self) -> None:
            super().__init__()
            self.self_attn = Padded(padded)

    sites = {name for name, _ in probe(Model(Latent, by_position)).bindings}
    assert {"attn_q", "attn_k"} <= sites and ("attn_v" in sites) != padded


def test_no_hidden_states() -> None:
    """B4: the layer returns nothing of the width that it was given."""

    class Narrow(Single):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states)[..., :1]

    def widened(layer: nn.Module, p: torch.Tensor, h: torch.Tensor, r: Any) -> tuple[torch.Tensor, Any]:
        return layer(h).repeat(1, H), None

    with pytest.raises(ArchitectureError, match=r"layers\.0 \(Narrow\).*expected a floating argument"):
        probe(Model(Narrow, widened))

    class Silent(Single):
        def forward(self, hidden_states: torch.Tensor) -> Any:
            return None

    def ignored(layer: nn.Module, p: torch.Tensor, h: torch.Tensor, r: Any) -> tuple[torch.Tensor, Any]:
        layer(h)
        return h, None

    with pytest.raises(ArchitectureError, match=r"layers\.0 \(Silent\) returned no tensor; expected the hidden states"):
        probe(Model(Silent, ignored))


class Custom(nn.Module):
    """All under the user's own names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lookup, self.ln_last = nn.Embedding(11, H), Norm()
        self.my_blocks = nn.ModuleList(Single() for _ in range(2))
        for block in self.my_blocks:
            block.mixer, block.expander = block.self_attn, block.mlp
            del block.self_attn, block.mlp
            block.forward = lambda h, b=block: self.block(b, h)

    def block(self, b: nn.Module, h: torch.Tensor) -> torch.Tensor:
        h = h + b.mixer(b.input_layernorm(h))
        return h + b.expander(b.post_attention_layernorm(h))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.lookup(ids)
        for block in self.my_blocks:
            h = block(h)
        return self.ln_last(h)


def test_rename() -> None:
    rename = {"my_blocks": "layers", "mixer": "attn", "expander": "mlp", "lookup": "embed", "ln_last": "final_norm"}
    architecture = probe(Custom(), rename=rename)
    assert architecture.sites == probe(Model(Single, by_position)).sites
    assert architecture.binding("attn_in", 1).path == "my_blocks.1.mixer"
    with pytest.raises(ArchitectureError, match=r"no list of layers.*rename=\{'my_blocks': 'layers'\}"):
        probe(Custom(), rename={"my_blocks": "layer"})
    with pytest.raises(
        ArchitectureError, match=r"rename\['mixer'\] is 'expander': my_blocks\.0 has a expander already"
    ):
        probe(Custom(), rename={**rename, "mixer": "expander"})


def test_no_container() -> None:
    with pytest.raises(ArchitectureError, match=r"no list of layers.*my_blocks.*rename=\{'my_blocks': 'layers'\}"):
        probe(Custom())


def test_compiled_forward() -> None:
    """One that calls no module shows nothing."""
    model = Model(Single, by_position)
    with pytest.raises(ArchitectureError, match=r"called no layer of layers.*uncompiled"):
        detect(model, lambda: None)


def test_several_containers() -> None:
    class Two(Model):
        def __init__(self) -> None:
            super().__init__(Single, by_position)
            self.blocks = nn.ModuleList([Single()])

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.blocks[0](super().forward(ids))

    with pytest.raises(ArchitectureError, match=r"several lists of layers.*layers, blocks"):
        probe(Two())
    assert probe(Two(), rename={"blocks": "layers"}).num_layers == 1


def test_embedding_scaled_outside_its_module() -> None:
    scaled = Model(Dual, two_streams, scale=2.5)
    assert probe(scaled).binding("embed").scale == 2.5
    assert torch.equal(read_all(scaled, probe(scaled))["embed", None], scaled.stream[0])

    class Positions(Model):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            h = self.embed_tokens(ids) + torch.ones(T, H)
            return self.norm(self.layers[0](h))

    assert probe(Positions(Single, by_position)).binding("embed").scale == 1.0


def test_own_call_past_the_hooks() -> None:
    """vLLM's compiled models call `self.forward` from their own `__call__`."""

    class Decorated(Model):
        def __call__(self, *args: Any) -> Any:
            return self.forward(*args)

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Decorated(Single, by_position)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.model(ids)

    root = Root()
    order = probe(root).order
    assert order["", "input"] < order["model", "input"] < order["model.layers.0", "input"]
    assert order["model.norm", "output"] < order["model", "output"] < order["", "output"]
    assert "forward" not in vars(root.model)


def test_shapes() -> None:
    shapes = probe(Model(Dual, two_streams)).shapes
    assert shapes["layers.1"] == f"([T, {H}], [T, {H}])"
    assert shapes["layers.1.mlp"] == f"[T, {H}]"
    model = Model(Single, by_position)
    assert detect(model, lambda: model(IDS[None])).shapes["layers.1"] == f"[B, T, {H}]"


def test_the_model_is_left_as_it_was() -> None:
    model = Model(Dual, two_streams)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    probe(model)

    def fail() -> None:
        model(IDS)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        detect(model, fail)
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_unknown_sites() -> None:
    architecture = probe(Model(Parallel, by_position))
    with pytest.raises(UnknownSiteError, match=r"no site 'resid_mid': it has resid_pre, attn_in, attn_z"):
        architecture.binding("resid_mid", 0)
    with pytest.raises(UnknownSiteError, match="did you mean 'resid_post'"):
        architecture.binding("resid_pots", 0)
    with pytest.raises(UnknownSiteError, match=r"no layer 7: its layers are 0 to 2"):
        architecture.binding("attn_out", 7)
    with pytest.raises(UnknownSiteError, match="needs a layer"):
        architecture.binding("attn_out")
    with pytest.raises(UnknownSiteError, match="takes no layer"):
        architecture.binding("embed", 1)
