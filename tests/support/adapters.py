"""LoRA adapters for a tiny Llama, written as PEFT writes them, and the models that they make once they are merged into the weights.

base = adapters.base(directory)                     # a tiny model, as in `tiny_models`
red = adapters.write(base, directory / "red", seed=1)
merged = adapters.merged(base, red)                 # on transformers: W + scale * B A
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

RANK, ALPHA = 4, 8
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PREFIX = "base_model.model."


def write(base: Path, to: Path, seed: int, targets: tuple[str, ...] = TARGETS) -> Path:
    """A random adapter of the linear layers called `targets`, as large as the weights that it changes."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in _weights(base):
        if name.rsplit(".", 2)[-2] in targets:
            module = _PREFIX + name.removesuffix(".weight")
            out_size, in_size = weight.shape
            tensors[f"{module}.lora_A.weight"] = torch.randn(RANK, in_size, generator=generator) * 0.1
            tensors[f"{module}.lora_B.weight"] = torch.randn(out_size, RANK, generator=generator) * 0.1
    to.mkdir(parents=True, exist_ok=True)
    save_file(tensors, to / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": list(targets),
        "bias": "none",
        "base_model_name_or_path": str(base),
    }
    (to / "adapter_config.json").write_text(json.dumps(config))
    return to


@torch.no_grad()
def merged(base: Path, adapter: Path | None) -> PreTrainedModel:
    """The model on transformers with the adapter in its weights, by the formula of the LoRA paper (arXiv:2106.09685)."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager").eval()
    if adapter is None:
        return model
    tensors = load_file(adapter / "adapter_model.safetensors")
    scale = ALPHA / RANK
    for name, weight in model.named_parameters():
        module = _PREFIX + name.removesuffix(".weight")
        if (a := tensors.pop(f"{module}.lora_A.weight", None)) is not None:
            weight += scale * tensors.pop(f"{module}.lora_B.weight") @ a
    assert not tensors, sorted(tensors)
    return model


def _weights(base: Path) -> list[tuple[str, torch.Tensor]]:
    return sorted(load_file(base / "model.safetensors").items())
