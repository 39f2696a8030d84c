"""LoRA adapters for a tiny Llama, written as PEFT writes them, and the models that they make once they are merged into the weights.

base = adapters.base(directory)                     # a tiny model, as in `tiny_models`
red = adapters.write(base, directory / "red", seed=1)
merged = adapters.merged(base, red)                 # on transformers: W + scale * B A
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny_models
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

RANK, ALPHA = 4, 8
LAYER = 2  # whose sites `Merged` has
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PREFIX = "base_model.model."


def write(
    base: Path,
    to: Path,
    seed: int,
    targets: tuple[str, ...] = TARGETS,
    named: Callable[[str], str | None] = lambda module: module,
) -> Path:
    """A random adapter of the linear layers called `targets`, as large as the weights that it changes.

    `named`: the name that the file has for a module of the model; None leaves the module out.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in _weights(base):
        if name.rsplit(".", 2)[-2] in targets:
            module = named(name.removesuffix(".weight"))
            out_size, in_size = weight.shape
            a = torch.randn(RANK, in_size, generator=generator) * 0.1
            b = torch.randn(out_size, RANK, generator=generator) * 0.1
            if module is not None:
                tensors[f"{_PREFIX}{module}.lora_A.weight"] = a
                tensors[f"{_PREFIX}{module}.lora_B.weight"] = b
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


class Merged:
    """The model on transformers with one adapter in its weights, or without, and the activations of its forward hooks."""

    def __init__(self, base: Path, adapter: Path | None) -> None:
        self.model = merged(base, adapter)
        self.tokenizer = tiny_models.tokenizer()

    def ids(self, prompt: str) -> torch.Tensor:
        return torch.tensor([self.tokenizer(prompt)["input_ids"]])

    @torch.no_grad()
    def run(self, prompt: str, change: Any = None) -> dict[str, torch.Tensor]:
        """The sites of layer `LAYER`, and the logits. `change` edits the layer's output, `[tokens, hidden]`, in place."""
        layer, found, handles = self.model.model.layers[LAYER], dict[str, torch.Tensor](), []

        def note(name: str, value: torch.Tensor) -> None:
            found[name] = value[0].clone()

        def before(name: str, module: Any) -> None:
            def hook(_: Any, args: Any, kwargs: Any) -> None:
                note(name, args[0] if args else kwargs["hidden_states"])

            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

        def after(name: str, module: Any) -> None:
            handles.append(
                module.register_forward_hook(lambda _, args, out: note(name, out[0] if isinstance(out, tuple) else out))
            )

        def changed(_: Any, args: Any, out: Any) -> None:
            hidden = out[0] if isinstance(out, tuple) else out
            if change is not None:
                change(hidden[0])

        handles.append(layer.register_forward_hook(changed))
        before("resid_pre", layer)
        before("attn_in", layer.self_attn)
        before("attn_z", layer.self_attn.o_proj)
        after("attn_out", layer.self_attn)
        before("resid_mid", layer.post_attention_layernorm)
        before("mlp_in", layer.mlp)
        before("mlp_act", layer.mlp.down_proj)
        after("mlp_out", layer.mlp)
        after("resid_post", layer)
        logits = self.model(self.ids(prompt)).logits
        note("logits", logits)
        for handle in handles:
            handle.remove()
        return found

    @torch.no_grad()
    def generate(self, prompt: str, count: int) -> list[int]:
        ids = self.ids(prompt)
        made = self.model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)
        return made[0, ids.shape[1] :].tolist()


def _weights(base: Path) -> list[tuple[str, torch.Tensor]]:
    return sorted(load_file(base / "model.safetensors").items())
