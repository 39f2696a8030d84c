"""Tiny random-weight models, one per architecture, built from configs alone: no download, no network.

    path = build("qwen3", cache_dir)                  # config.json, model.safetensors (float32), tokenizer
    llm = LLM(str(path), dtype="float32", **ARCHITECTURES["qwen3"].engine)
    hf = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")

The weights are far larger than a fresh model's, norms are off 1 and biases off 0, so that every layer changes the
residual stream by about its own size: a site that is read one layer late, or a norm that is skipped, is a visible
error and not one lost in the tolerance. Compare with transformers in eager attention: its SDPA path ignores soft caps.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

LAYERS = 4  # even, so that two pipeline stages own two each
VOCAB_SIZE = 384  # a multiple of 64, so that vLLM pads no rows
MAX_POSITIONS = 256
EOS_TOKEN = "<|endoftext|>"
EOS_ID = 0

TOKENIZER_TEXT = """
The Eiffel Tower is in the city of Paris, and the Colosseum is in the city of Rome. A model reads one token after
another, and at every layer it writes what it has found into the residual stream, where later layers can read it.
When Mary and John went to the store, John gave a drink to Mary. When Mary and John went to the park, Mary gave the
ball to John. The river runs from the mountains to the sea; the water is cold in the winter and warm in the summer.

To steer a model is to add a direction to its hidden state. To patch it is to replace the state of one prompt by the
state of another. To ablate it is to remove a direction, or to set an output to zero, and to see what changes then.
There are 0 1 2 3 4 5 6 7 8 9 numbers here, some words that start with a capital letter, and a question: what is the
capital of France? The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is Madrid.

def forward(self, hidden_states, residual): return self.norm(hidden_states + residual)
for layer in self.layers: hidden_states, residual = layer(positions, hidden_states, residual)
"""


@dataclass(frozen=True)
class Architecture:
    """A transformers model type, the config options that make it tiny, and the vLLM engine arguments it needs."""

    model_type: str
    options: Mapping[str, Any]
    engine: Mapping[str, Any] = field(default_factory=dict)
    embedding_std: float = 0.4
    rtol: float = 1e-4  # how far vLLM's float32 logprobs may be from transformers', relative to the largest
    zeroed: str = ""  # parameters with this in their names are 0
    dtype: str = "float32"  # in which it is compared

    def config(self) -> PreTrainedConfig:
        special = {"bos_token_id": EOS_ID, "eos_token_id": EOS_ID, "pad_token_id": EOS_ID}
        return AutoConfig.for_model(self.model_type, vocab_size=VOCAB_SIZE, **special, **self.options)


# vLLM's CPU attention takes head sizes 32, 64, 80, 96, ... and nothing smaller. Most configs derive the head size from
# hidden_size; those that state it get one with heads * head_dim != hidden, so that mixing the two up fails.
COMMON = {
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "intermediate_size": 192,
}
WIDE = {**COMMON, "hidden_size": 128}
WIDE_GQA = {**WIDE, "num_key_value_heads": 2}
NARROW_GQA = {**COMMON, "hidden_size": 64, "head_dim": 32, "num_key_value_heads": 2}
_GPT = {"n_layer": LAYERS, "n_head": 4, "n_embd": 128, "n_positions": MAX_POSITIONS}
_FALCON = {
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "hidden_size": 128,
    "max_position_embeddings": MAX_POSITIONS,
}
_GEMMA_SLIDING = {
    **NARROW_GQA,
    "query_pre_attn_scalar": 32,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
}
_GEMMA_STD = 0.05  # Gemma multiplies its embeddings by sqrt(hidden_size)
_OPT = {
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "hidden_size": 128,
    "ffn_dim": 192,
    "max_position_embeddings": MAX_POSITIONS,
}
_QWEN_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "decoder_sparse_step": 1}
_LOCAL_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
# The first layer has no experts, as in DeepSeek's models.
_DEEPSEEK_MOE = {
    "moe_intermediate_size": 96,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_TRANSFORMERS_BACKEND = {"model_impl": "transformers"}

ARCHITECTURES: dict[str, Architecture] = {
    # Those that the requirements name.
    "llama": Architecture("llama", WIDE_GQA),
    "mistral": Architecture("mistral", {**WIDE_GQA, "sliding_window": None}),
    "qwen2": Architecture("qwen2", WIDE_GQA),
    "qwen3": Architecture("qwen3", NARROW_GQA),
    "gemma2": Architecture("gemma2", _GEMMA_SLIDING, embedding_std=_GEMMA_STD),
    "gemma3": Architecture("gemma3_text", _GEMMA_SLIDING, embedding_std=_GEMMA_STD),
    "phi3": Architecture("phi3", {**WIDE_GQA, "original_max_position_embeddings": MAX_POSITIONS}),
    "gpt2": Architecture("gpt2", _GPT),
    "opt": Architecture("opt", {**_OPT, "word_embed_proj_dim": 128}),
    "gpt_neox": Architecture("gpt_neox", WIDE),
    "falcon": Architecture("falcon", _FALCON),
    "olmo2": Architecture("olmo2", WIDE_GQA),
    "mixtral": Architecture("mixtral", {**WIDE_GQA, **_LOCAL_MOE}),
    "qwen3_moe": Architecture("qwen3_moe", {**NARROW_GQA, **_QWEN_MOE}),
    # Through the Transformers backend, where vLLM also has a model of its own.
    "llama_transformers": Architecture("llama", WIDE_GQA, _TRANSFORMERS_BACKEND),
    "qwen3_transformers": Architecture("qwen3", NARROW_GQA, _TRANSFORMERS_BACKEND),
    "gemma2_transformers": Architecture("gemma2", _GEMMA_SLIDING, _TRANSFORMERS_BACKEND, _GEMMA_STD),
    # More families, and the variants of a family that change the shape of its block.
    "smollm3": Architecture("smollm3", WIDE_GQA),
    "gemma": Architecture("gemma", NARROW_GQA, embedding_std=_GEMMA_STD),
    "phi": Architecture("phi", WIDE),
    "stablelm": Architecture("stablelm", WIDE_GQA),
    "starcoder2": Architecture("starcoder2", WIDE_GQA),
    "cohere": Architecture("cohere", {**WIDE_GQA, "logit_scale": 0.5}),
    "gptj": Architecture("gptj", {**_GPT, "rotary_dim": 16}),
    # vLLM runs BLOOM with the exact GELU, transformers with the tanh form that it was trained with.
    "bloom": Architecture("bloom", {"n_layer": LAYERS, "n_head": 4, "hidden_size": 128}, rtol=1e-3),
    "mpt": Architecture("mpt", {"n_layers": LAYERS, "n_heads": 4, "d_model": 128, "max_seq_len": MAX_POSITIONS}),
    "granite": Architecture(
        "granite",
        {**WIDE_GQA, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    ),
    "olmo": Architecture("olmo", WIDE_GQA),
    "olmoe": Architecture("olmoe", {**WIDE_GQA, "num_experts": 4, "num_experts_per_tok": 2}),
    "glm4": Architecture("glm4", NARROW_GQA),
    "qwen2_moe": Architecture("qwen2_moe", {**WIDE_GQA, **_QWEN_MOE, "shared_expert_intermediate_size": 96}),
    "gpt_oss": Architecture("gpt_oss", {**NARROW_GQA, **_LOCAL_MOE, "sliding_window": 16}),
    "granitemoe": Architecture(
        "granitemoe",
        {**WIDE_GQA, **_LOCAL_MOE, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    ),
    "llama4": Architecture(
        "llama4_text",
        {
            **NARROW_GQA,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 192,
            "interleave_moe_layer_step": 1,
        },
    ),
    "glm4_moe": Architecture("glm4_moe", {**NARROW_GQA, **_DEEPSEEK_MOE}),
    "dots1": Architecture("dots1", {**NARROW_GQA, **_DEEPSEEK_MOE}),
    "flex_olmo": Architecture("flex_olmo", {**WIDE_GQA, "num_experts": 4, "num_experts_per_tok": 2}),
    "hunyuan_moe": Architecture("hunyuan_v1_moe", {**NARROW_GQA, "num_experts": 4, "moe_topk": 2}),
    "gpt_neox_serial": Architecture("gpt_neox", {**WIDE, "use_parallel_residual": False}),
    "falcon_serial": Architecture("falcon", {**_FALCON, "parallel_attn": False, "multi_query": False, "bias": True}),
    "falcon_two_norms": Architecture("falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "opt_post_norm": Architecture("opt", {**_OPT, "word_embed_proj_dim": 64, "do_layer_norm_before": False}),
}

# What vLLM's CPU build cannot run, with what it says.
UNSUPPORTED_ON_CPU: dict[str, str] = {
    "mpt": (
        "Model architecture MptForCausalLM was supported in vLLM until v0.28.0, and is not supported anymore. "
        "model_impl='transformers': The Transformers implementation of 'MptForCausalLM' is not compatible with vLLM."
    ),
}


def build(name: str, directory: Path, architecture: Architecture | None = None) -> Path:
    """The directory of the model called `name` under `directory`, made there unless an identical one exists."""
    architecture = architecture or ARCHITECTURES[name]
    path = Path(directory) / f"{name}-{_fingerprint()}"
    if path.is_dir():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=path.parent))
    _model(architecture).save_pretrained(scratch)
    tokenizer().save_pretrained(scratch)
    try:
        os.rename(scratch, path)  # whole or not at all, for test workers that share a cache
    except OSError:
        shutil.rmtree(scratch)
        if not path.is_dir():
            raise
    return path


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """The byte-level BPE that all the models share; it adds no special token to a prompt."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(TOKENIZER_TEXT.splitlines(), trainer)
    special = {"eos_token": EOS_TOKEN, "bos_token": EOS_TOKEN, "pad_token": EOS_TOKEN}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, model_max_length=MAX_POSITIONS, **special)


def restore_transformers() -> None:
    """Undo what an engine on vLLM's Transformers backend leaves behind; call it once that engine is shut down.

    vLLM decorates the transformers decoder class in place. From then on nobody else in the process can make, or call,
    a model of that class: "Current vLLM config is not set".
    """
    wrapper_module = sys.modules.get("vllm.compilation.wrapper")
    if wrapper_module is None:
        return
    wrapper = wrapper_module.TorchCompileWithNoGuardsWrapper
    for cls in [c for c in wrapper.__subclasses__() if issubclass(c, PreTrainedModel)]:
        cls.__init__ = inspect.getclosurevars(cls.__init__).nonlocals["old_init"]
        cls.__bases__ = tuple(base for base in cls.__bases__ if base is not wrapper)
        del cls.__call__


def _model(architecture: Architecture) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_config(architecture.config(), dtype=torch.float32).eval()
    _randomise(model, architecture.embedding_std)
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if architecture.zeroed and architecture.zeroed in name:
            parameter.detach().zero_()
    return model


@torch.no_grad()
def _randomise(model: PreTrainedModel, embedding_std: float) -> None:
    """Matrices are drawn anew; vectors (norm weights, biases) move away from the 1 or 0 that they start at, also those that are buffers of
    the checkpoint: Gemma 4's `layer_scalar`, a router's `e_score_correction_bias`.
    """
    generator = torch.Generator().manual_seed(0)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            parameter.add_(noise, alpha=0.2)
        else:
            parameter.copy_(noise * (embedding_std if id(parameter) in embeddings else 0.15))
    saved = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in saved and buffer.dim() == 1 and buffer.is_floating_point():
            buffer.add_(torch.randn(buffer.shape, generator=generator), alpha=0.2)


@cache
def _fingerprint() -> str:
    """Changes with this file, so that a cache from an older version of it is never used."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]
