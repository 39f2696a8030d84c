"""A tiny Llama in the formats of quantised checkpoints, and the model that each of them stands for, on transformers.

path, oracle = quantised.build("gptq", directory)     # for vLLM; a transformers model in float32 with the dequantised weights

The arithmetic is this file's own. Where a format also rounds activations or KV, so does the oracle.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny_models
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import eager_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

GROUP = 64  # inputs that share a scale and a zero point in the formats with 4 bits
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # of the eight numbers in an int32, from the lowest bits
FP8 = torch.float8_e4m3fn
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # layers that vLLM computes as one
HIDDEN, LAYERS = 128, 4

Tensors = dict[str, torch.Tensor]


def base() -> LlamaForCausalLM:
    """The model that is quantised. The sizes suit all kernels."""
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    size = {
        "hidden_size": HIDDEN,
        "intermediate_size": 256,
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": 256,
    }
    config = LlamaConfig(vocab_size=tiny_models.VOCAB_SIZE, **special, **heads, **size)
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config).float().eval()
    tiny_models._randomise(model, 0.4)
    for name, weight in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            weight.data *= 0.4  # else a softmax in bfloat16 differs by its rounding alone
    return model


def build(name: str | None, directory: Path) -> tuple[Path, LlamaForCausalLM]:
    """The checkpoint called `name` in `FORMATS`, or the model as it is; and the oracle.

    With the names in `ONLINE`, the checkpoint is the model as it is, and the oracle is what vLLM makes of it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    model = base()
    tiny_models.tokenizer().save_pretrained(directory)
    if name is None or name in ONLINE:
        model.save_pretrained(directory)
        if name is not None:
            ONLINE[name](model)
        return directory, model
    quantise, config, rounding = FORMATS[name]
    tensors: Tensors = {key: value.contiguous() for key, value in model.state_dict().items()}
    for path, linear in linears(model):
        del tensors[f"{path}.weight"]
        stored, dequantised = quantise(linear.weight.detach())
        tensors |= {f"{path}.{key}": value.contiguous() for key, value in stored.items()}
        linear.weight.data = dequantised
        if rounding is not None:
            round_inputs(linear, rounding)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    written = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"], "quantization_config": config}
    (directory / "config.json").write_text(json.dumps(written))
    return directory, model


def eagle_head(directory: Path) -> Path:
    """A random draft model for EAGLE (arXiv:2401.15077): one layer on the target's last residual stream and the next token's embedding."""
    config = base().config.to_dict() | {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]}
    generator = torch.Generator().manual_seed(5)
    layer = {k: v for k, v in base().state_dict().items() if k.startswith("model.layers.0.") and "input_layer" not in k}
    tensors = {key.removeprefix("model."): value.contiguous() for key, value in layer.items()}
    tensors["fc.weight"] = torch.randn(HIDDEN, 2 * HIDDEN, generator=generator) * 0.1
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def linears(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """The layers that are quantised."""
    return [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and not n.endswith("lm_head")]


def round_inputs(linear: nn.Linear, rounding: Callable[[torch.Tensor], torch.Tensor]) -> None:
    linear.register_forward_pre_hook(lambda module, args: (rounding(args[0]),))


def per_token_int8(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


def per_token_fp8(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(FP8).float() * scale


def int8_channels(weight_NK: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale_N1 = weight_NK.abs().amax(1, keepdim=True) / 127
    numbers = (weight_NK / scale_N1).round().to(torch.int8)
    return {"weight": numbers, "weight_scale": scale_N1}, numbers * scale_N1


def fp8_channels(weight_NK: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale_N1 = weight_NK.abs().amax(1, keepdim=True) / 448
    numbers = (weight_NK / scale_N1).to(FP8)
    return {"weight": numbers, "weight_scale": scale_N1}, numbers.float() * scale_N1


def packed(numbers: torch.Tensor, axis: int, order: list[int]) -> torch.Tensor:
    """Eight numbers of 4 bits along an axis as one int32: the one at `order[i]` in the bits from 4 i on."""
    eights = numbers.movedim(axis, -1).unflatten(-1, (-1, 8))[..., order].long()
    whole = (eights << (4 * torch.arange(8))).sum(-1)
    return whole.where(whole < 1 << 31, whole - (1 << 32)).to(torch.int32).movedim(-1, axis).contiguous()


def grouped(weight_NK: torch.Tensor, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers `[K, N]` from 0 to 15, scales and zero points `[K / GROUP, N]`, and the weight that they make, `[N, K]`."""
    groups = weight_NK.T.unflatten(0, (-1, GROUP))
    if symmetric:
        scale, zero = groups.abs().amax(1) / 7, torch.full_like(groups[:, 0], 8)
    else:
        low, high = groups.amin(1), groups.amax(1)
        scale = (high - low) / 15
        zero = (-low / scale).round()
    scale = scale.bfloat16().float()  # exact in float16 and in bfloat16
    numbers = (groups / scale[:, None] + zero[:, None]).round().clamp(0, 15)
    weight = ((numbers - zero[:, None]) * scale[:, None]).flatten(0, 1).T.contiguous()
    return numbers.flatten(0, 1), scale, zero, weight


def gptq(weight_NK: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    numbers_KN, scale, zero, weight = grouped(weight_NK, True)
    in_order, group = list(range(8)), torch.arange(weight_NK.shape[1], dtype=torch.int32) // GROUP
    words = {"qweight": packed(numbers_KN, 0, in_order), "qzeros": packed(zero - 1, 1, in_order)}
    return {**words, "scales": scale.half(), "g_idx": group}, weight


def awq(weight_NK: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    numbers_KN, scale, zero, weight = grouped(weight_NK, False)
    words = {"qweight": packed(numbers_KN, 1, AWQ_ORDER), "qzeros": packed(zero, 1, AWQ_ORDER)}
    return {**words, "scales": scale.half()}, weight


def compressed_tensors(kind: str, layout: str) -> dict[str, Any]:
    each = {"num_bits": 8, "type": kind, "symmetric": True}
    weights, inputs = {"strategy": "channel", "dynamic": False}, {"strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": {**each, **weights}, "input_activations": {**each, **inputs}}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


# By name: a function of a weight, the part of config.json, and what becomes of the layers' inputs.
FORMATS: dict[str, tuple[Callable[..., Any], dict[str, Any], Callable[..., Any] | None]] = {
    "compressed-tensors int8": (int8_channels, compressed_tensors("int", "int-quantized"), per_token_int8),
    "compressed-tensors fp8": (fp8_channels, compressed_tensors("float", "float-quantized"), per_token_fp8),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}, None),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, None),
}


def make_fp8(model: LlamaForCausalLM) -> None:
    """One scale for each of vLLM's layers, in which several of the checkpoint's may be fused; inputs are rounded for each token."""
    for path, linear in linears(model):
        parent, name = model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
        fused = next((names for names in FUSED if name in names), (name,))
        linear.largest = max(getattr(parent, each).weight.abs().max() for each in fused)  # type: ignore[assignment]
    for _, linear in linears(model):
        scale: Any = linear.largest / 448  # type: ignore[operator]
        linear.weight.data = (linear.weight.data / scale).to(FP8).float() * scale
        round_inputs(linear, per_token_fp8)


def keep_kv_as_fp8(model: LlamaForCausalLM) -> None:
    """vLLM's kernel for the CPU rounds towards zero (0.32)."""

    def kept(x: torch.Tensor) -> torch.Tensor:
        nearest = x.to(FP8)
        if torch.cuda.is_available():
            return nearest.float()
        is_beyond = nearest.float().abs() > x.abs()
        return (nearest.view(torch.uint8) - is_beyond.to(torch.uint8)).view(FP8).float()

    def attend(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return eager_attention_forward(module, q, kept(k), kept(v), *args, **kwargs)

    AttentionInterface.register("fp8_kv", attend)
    AttentionMaskInterface.register("fp8_kv", eager_mask)
    model.set_attn_implementation("fp8_kv")


ONLINE: dict[str, Callable[[LlamaForCausalLM], None]] = {"fp8": make_fp8, "kv fp8": keep_kv_as_fp8}
