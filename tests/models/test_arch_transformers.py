"""Detection on every transformers architecture of row B5 (rows B2, B3, B6, B7), against plain forward hooks.

The oracle for the residual stream is transformers' own `output_hidden_states`; the parts must add up to it.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import tiny_models
import torch
from transformers import AutoModelForCausalLM

from midstream.arch import Architecture, detect, split_heads, split_routers
from midstream.sites import LAYER_SITES
from midstream.tree import follow

IDS = torch.tensor([[5, 17, 33, 60, 91, 120, 44]])
T = IDS.shape[1]
NAMES = [name for name in tiny_models.ARCHITECTURES if not name.endswith("_transformers")]

PARALLEL = {"gpt_neox", "falcon", "falcon_two_norms", "phi", "cohere", "gptj"}
MIXTURES = {"mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "gpt_oss", "granitemoe", "llama4", "flex_olmo", "hunyuan_moe"}
# Mixtures with layers that have an MLP instead of experts.
PARTLY = {"glm4_moe": [0], "dots1": [0]}
# The stream is normed after each add (OPT-350m), or what is added is first multiplied outside its module (Granite).
NOT_A_PLAIN_SUM = {"opt_post_norm", "granite", "granitemoe"}

# Their attention does not call one of transformers' attention functions.
OWN_ATTENTION = {"falcon", "falcon_serial", "falcon_two_norms", "gptj", "bloom", "mpt"}
QKV = {"attn_q", "attn_k", "attn_v"}

Values = dict[tuple[str, int | None], torch.Tensor]


@cache
def probed(name: str) -> tuple[Any, Architecture, Values, tuple[torch.Tensor, ...]]:
    """The model, its architecture, every site's value, and transformers' hidden states."""
    torch.manual_seed(0)
    config = tiny_models.ARCHITECTURES[name].config()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    split_routers(model)
    split_heads(model)
    architecture = detect(model, lambda: model(IDS, use_cache=False))
    values, hidden_states = read_all(model, architecture)
    return model, architecture, values, hidden_states


def read_all(model: Any, architecture: Architecture) -> tuple[Values, tuple[torch.Tensor, ...]]:
    values: Values = {}
    modules, handles = dict(model.named_modules()), []
    for key, binding in architecture.bindings.items():

        def take(tree: Any, key: Any = key, binding: Any = binding) -> None:
            values[key] = binding.read(lambda ref: follow(tree, ref)).clone()

        def before(module: Any, args: Any, kwargs: Any, take: Any = take) -> None:
            take((args, kwargs))

        def after(module: Any, args: Any, output: Any, take: Any = take) -> None:
            take(output)

        module = modules[binding.path]
        if binding.kind == "input":
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        else:
            handles.append(module.register_forward_hook(after))
    with torch.no_grad():
        hidden_states = model(IDS, use_cache=False, output_hidden_states=True).hidden_states
    for handle in handles:
        handle.remove()
    return values, hidden_states


@pytest.mark.parametrize("name", NAMES)
def test_sites(name: str) -> None:
    absent = {"resid_mid"} if name in PARALLEL else {"mlp_act"} if name in MIXTURES else set()
    absent |= set() if name in MIXTURES or name in PARTLY else {"router"}
    absent |= QKV if name in OWN_ATTENTION else set()
    _, architecture, _, _ = probed(name)
    layer_sites = [site for site in architecture.sites if site in LAYER_SITES]
    assert set(layer_sites) == set(LAYER_SITES) - absent
    once = {"embed", "final_norm"} - ({"final_norm"} if name == "opt_post_norm" else set())
    assert set(architecture.sites) - set(layer_sites) == once
    assert architecture.layers == tuple(range(architecture.num_layers)) == tuple(range(tiny_models.LAYERS))
    of_layers = {(site, i) for site in layer_sites for i in architecture.layers}
    of_layers -= {("router", i) for i in PARTLY.get(name, ())}
    of_layers -= {("mlp_act", i) for i in architecture.layers if name in PARTLY and i not in PARTLY[name]}
    assert set(architecture.bindings) == of_layers | {(site, None) for site in once}


@pytest.mark.parametrize("name", NAMES)
def test_residual_stream(name: str) -> None:
    _, architecture, values, hidden_states = probed(name)
    for i in architecture.layers:
        assert torch.equal(values["resid_pre", i], hidden_states[i])
    for i in architecture.layers[:-1]:
        assert torch.equal(values["resid_post", i], values["resid_pre", i + 1])
    if name != "opt_post_norm":  # its last hidden state is behind a projection, with no norm
        assert torch.equal(values["final_norm", None], hidden_states[-1])


@pytest.mark.parametrize("name", sorted(set(NAMES) - NOT_A_PLAIN_SUM))
def test_parts_add_up(name: str) -> None:
    _, architecture, values, _ = probed(name)
    for i in architecture.layers:
        pre, post = values["resid_pre", i], values["resid_post", i]
        attn, mlp = values["attn_out", i], values["mlp_out", i].view_as(post)
        close(post, pre + attn + mlp)
        if name not in PARALLEL:
            close(values["resid_mid", i], pre + attn)
            close(post, values["resid_mid", i].view_as(post) + mlp)


def test_granite_multiplies_what_is_added() -> None:
    model, architecture, values, _ = probed("granite")
    factor = model.config.residual_multiplier
    for i in architecture.layers:
        close(values["resid_mid", i], values["resid_pre", i] + factor * values["attn_out", i])
        close(values["resid_post", i], values["resid_mid", i] + factor * values["mlp_out", i])


@pytest.mark.parametrize("name", NAMES)
def test_heads_and_neurons(name: str) -> None:
    """What goes through the output projection gives the part's own output back."""
    model, architecture, values, _ = probed(name)
    for i in architecture.layers:
        z = values["attn_z", i]
        heads = model.config.num_attention_heads
        assert z.shape[-3:-1] == (T, heads)
        projection = model.get_submodule(architecture.binding("attn_z", i).path)
        if "attention_layernorm" not in architecture.binding("attn_out", i).path and name != "glm4":
            close(projection(z.flatten(-2)), values["attn_out", i])
        if ("mlp_act", i) in architecture.bindings:
            down = model.get_submodule(architecture.binding("mlp_act", i).path)
            neurons = down(values["mlp_act", i])
            norm = architecture.binding("mlp_out", i).path
            close(model.get_submodule(norm)(neurons) if "norm" in norm else neurons, values["mlp_out", i])


@pytest.mark.parametrize("name", sorted(MIXTURES | set(PARTLY)))
def test_routers(name: str) -> None:
    """N3: the site is what transformers reports as its router's logits, and a changed value decides which experts run.

    The oracle of the change is a model whose routers have weights three times as large.
    """
    model, architecture, values, _ = probed(name)
    layers = [i for i in architecture.layers if ("router", i) in architecture.bindings]
    assert layers == [i for i in architecture.layers if i not in PARTLY.get(name, ())]
    with torch.no_grad():
        reported = model(IDS, use_cache=False, output_router_logits=True).router_logits
        before = model(IDS, use_cache=False).logits
    for i, logits in zip(layers, reported, strict=True):
        assert torch.equal(values["router", i].view(T, -1), logits.view(T, -1))
        assert architecture.widths["router", i] == logits.shape[-1]
    written = with_changed(model, architecture, layers, lambda tree: tree * 3)
    scaled = copy.deepcopy(model)
    with torch.no_grad():
        for i in layers:
            path = architecture.binding("router", i).path.removesuffix(".midstream_logits")
            for name, parameter in scaled.get_submodule(path).named_parameters():
                parameter *= 3 if name in ("weight", "bias") else 1
        expected = scaled(IDS, use_cache=False).logits
    assert (expected - before).abs().max() > 1e-2 * before.abs().max()
    close(written, expected)
    with torch.no_grad():
        assert torch.equal(model(IDS, use_cache=False).logits, before)


def with_changed(model: Any, architecture: Architecture, layers: list[int], change: Any) -> torch.Tensor:
    """The model's logits with hooks that change its routers' logits."""
    routers = [model.get_submodule(architecture.binding("router", i).path) for i in layers]
    handles = [router.register_forward_hook(lambda module, args, output: change(output)) for router in routers]
    with torch.no_grad():
        logits = model(IDS, use_cache=False).logits
    for handle in handles:
        handle.remove()
    return logits


def test_routers_of_a_plain_model_are_left_out() -> None:
    """N3: transformers' routers choose by themselves, so the logits that they return are no site: to change them would do nothing."""
    model = AutoModelForCausalLM.from_config(tiny_models.ARCHITECTURES["mixtral"].config(), dtype=torch.float32).eval()
    assert "router" not in detect(model, lambda: model(IDS, use_cache=False)).sites
    before = model.state_dict().keys()
    split_routers(model)
    split_routers(model)
    assert model.state_dict().keys() == before
    assert "router" in detect(model, lambda: model(IDS, use_cache=False)).sites


@pytest.mark.parametrize("name", NAMES)
def test_embeddings(name: str) -> None:
    """The token embedding as it enters the stream: where nothing else is added, that is the first block's input."""
    model, _, values, _ = probed(name)
    embed = values["embed", None]
    if name in {"gpt2", "opt", "opt_post_norm", "bloom"}:  # positions, projection or norm come on top
        assert torch.equal(embed, model.get_input_embeddings()(IDS))
    else:
        assert torch.equal(embed, values["resid_pre", 0])


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Within 1e-5 of the largest value. OPT's MLP works on `[batch * tokens, hidden]`."""
    actual, expected = actual.flatten(0, -2), expected.flatten(0, -2)
    scale = expected.abs().max().clamp_min(1.0)
    torch.testing.assert_close(actual / scale, expected / scale, atol=1e-5, rtol=0)
