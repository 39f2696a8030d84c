"""Tiny configs of further decoders in vLLM's registry, for `scripts/supported_models.py`. The tests of vLLM run those of `tiny_models.py`.

`FURTHER` has a config for each decoder that transformers can make from one, also for those that vLLM then cannot run on a CPU.
"""

from __future__ import annotations

from tiny_models import (
    ARCHITECTURES,
    LAYERS,
    MAX_POSITIONS,
    NARROW_GQA,
    UNSUPPORTED_ON_CPU,
    WIDE,
    WIDE_GQA,
    Architecture,
)

_SLIDING = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)}
_LONG_WINDOW = {"sliding_window": 128, "layer_types": ["sliding_attention"] * (LAYERS - 1) + ["full_attention"]}
_SPARSE = {"mlp_layer_types": ["dense", *["sparse"] * (LAYERS - 1)]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_DEEPSEEK_EXPERTS = {
    "moe_intermediate_size": 96,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
# Multi-head latent attention: vLLM's kernel on the CPU takes these widths alone.
_LATENT = {
    "kv_lora_rank": 512,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "num_key_value_heads": 4,
}
_INDEXER = {"index_topk": 16, "index_head_dim": 128, "index_n_heads": 2}
_MAMBA = {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2}
_MAMBA2 = {**_MAMBA, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_chunk_size": 32}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2),
}
_GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}
# vLLM's operator for rotary embeddings on the CPU misreads queries of three axes, and keys that are a part of a wider tensor.
_ROTARY_IN_TORCH = {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}

FURTHER: dict[str, Architecture] = {
    "qwen3_next": Architecture(
        "qwen3_next",
        {
            **NARROW_GQA,
            **_EXPERTS,
            **_DELTA,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "shared_expert_intermediate_size": 96,
        },
        dtype="bfloat16",
    ),
    "qwen3_5": Architecture("qwen3_5_text", {**NARROW_GQA, **_DELTA}),
    "qwen3_5_moe": Architecture(
        "qwen3_5_moe_text", {**NARROW_GQA, **_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 96}
    ),
    "qwen4_exp": Architecture(
        "qwen4_exp_text",
        {
            **NARROW_GQA,
            **_EXPERTS,
            **_DELTA,
            "layer_types": ["linear_attention", "indexed_attention"] * (LAYERS // 2),
            "shared_expert_intermediate_size": 96,
            "indexer_n_heads": 4,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 32,
            "indexer_budget": 64,
            "indexer_compress_ratio": 4,
            "hc_lowrank": 16,
            "ple_embed_dim": 64,
            "ngram_vocab_size_base": 1000,
        },
    ),
    "deepseek_v2": Architecture(
        "deepseek_v2", {**WIDE, **_LATENT, **_DEEPSEEK_EXPERTS, "first_k_dense_replace": 1}, _ROTARY_IN_TORCH
    ),
    "deepseek_v3": Architecture(
        "deepseek_v3",
        {
            **WIDE,
            **_LATENT,
            **_DEEPSEEK_EXPERTS,
            "first_k_dense_replace": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
        },
        _ROTARY_IN_TORCH,
    ),
    "deepseek_v32": Architecture("deepseek_v32", {**WIDE, **_LATENT, **_DEEPSEEK_EXPERTS, **_SPARSE, **_INDEXER}),
    "deepseek_v4": Architecture("deepseek_v4", {**WIDE, **_DEEPSEEK_EXPERTS}),
    "ministral3": Architecture("ministral3", NARROW_GQA),
    "ministral": Architecture("ministral", {**NARROW_GQA, "sliding_window": 16}),
    "phimoe": Architecture(
        "phimoe",
        {**WIDE_GQA, **_LOCAL_EXPERTS, "attention_bias": True, "lm_head_bias": True},
        {"hf_overrides": {"architectures": ["PhiMoEForCausalLM"]}},
        zeroed="lm_head.bias",
    ),
    "ernie4_5": Architecture("ernie4_5", NARROW_GQA),
    "ernie4_5_moe": Architecture(
        "ernie4_5_moe",
        {**WIDE_GQA, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 96, "moe_layer_end_index": LAYERS - 1},
        zeroed="e_score_correction_bias",
    ),
    "olmo3": Architecture("olmo3", {**WIDE_GQA, **_SLIDING}),
    "olmo_hybrid": Architecture("olmo_hybrid", {**WIDE_GQA, **_DELTA, "linear_num_value_heads": 2}),
    "gemma3n": Architecture(
        "gemma3n_text",
        {
            **NARROW_GQA,
            **_SLIDING,
            "vocab_size_per_layer_input": 384,
            "hidden_size_per_layer_input": 32,
            "laurel_rank": 16,
            "num_kv_shared_layers": 2,
            "activation_sparsity_pattern": [0.0] * LAYERS,
        },
        embedding_std=0.05,
    ),
    "gemma4": Architecture(
        "gemma4_text",
        {**NARROW_GQA, **_SLIDING, "vocab_size_per_layer_input": 384, "hidden_size_per_layer_input": 32},
        embedding_std=0.05,
    ),
    "glm": Architecture("glm", NARROW_GQA),
    "glm4_moe_lite": Architecture(
        "glm4_moe_lite",
        {**WIDE, **_LATENT, **_DEEPSEEK_EXPERTS, "first_k_dense_replace": 1, "topk_method": "noaux_tc"},
        _ROTARY_IN_TORCH,
    ),
    "glm_moe_dsa": Architecture("glm_moe_dsa", {**WIDE, **_LATENT, **_DEEPSEEK_EXPERTS, **_INDEXER}),
    "exaone4": Architecture("exaone4", {**WIDE_GQA, **_SLIDING}),
    "exaone_moe": Architecture("exaone_moe", {**WIDE_GQA, **_SLIDING, **_EXPERTS, **_SPARSE}),
    "seed_oss": Architecture("seed_oss", {**NARROW_GQA, "attention_dropout": 0.0, "residual_dropout": 0.0}),
    "nemotron": Architecture("nemotron", {**WIDE_GQA, "head_dim": 32}),
    "nemotron_h": Architecture(
        "nemotron_h",
        {
            "hidden_size": 64,
            "time_step_min": 1e-30,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": MAX_POSITIONS,
            "intermediate_size": 192,
            "ssm_state_size": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "n_groups": 1,
            "chunk_size": 32,
            "n_routed_experts": 4,
            "moe_intermediate_size": 96,
            "moe_shared_expert_intermediate_size": 96,
        },
    ),
    "granitemoeshared": Architecture(
        "granitemoeshared", {**WIDE_GQA, **_LOCAL_EXPERTS, **_GRANITE, "shared_intermediate_size": 96}
    ),
    "granitemoehybrid": Architecture(
        "granitemoehybrid",
        {
            **WIDE_GQA,
            **_LOCAL_EXPERTS,
            **_MAMBA2,
            **_GRANITE,
            "shared_intermediate_size": 96,
            "layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2),
        },
    ),
    "granitemoe_swa": Architecture(
        "granitemoe_swa",
        {**WIDE_GQA, **_LOCAL_EXPERTS, **_GRANITE, **_SLIDING, "layer_rope_theta": [10000.0] * LAYERS},
    ),
    "granite_swa": Architecture(
        "granite_swa", {**WIDE_GQA, **_GRANITE, **_SLIDING, "layer_rope_theta": [10000.0] * LAYERS}
    ),
    "bamba": Architecture("bamba", {**WIDE_GQA, **_MAMBA2, "attn_layer_indices": [1, 3]}),
    "falcon_h1": Architecture("falcon_h1", {**WIDE_GQA, **_MAMBA2, "mamba_d_ssm": 256, "mamba_rms_norm": False}),
    "jamba": Architecture(
        "jamba",
        {
            **WIDE_GQA,
            **_MAMBA,
            "mamba_dt_rank": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "use_mamba_kernels": False,
        },
    ),
    "mamba": Architecture("mamba", {"hidden_size": 128, "num_hidden_layers": LAYERS, "state_size": 16}),
    "falcon_mamba": Architecture("falcon_mamba", {"hidden_size": 128, "num_hidden_layers": LAYERS, "state_size": 16}),
    "mamba2": Architecture(
        "mamba2",
        {
            "hidden_size": 128,
            "num_hidden_layers": LAYERS,
            "state_size": 16,
            "num_heads": 8,
            "head_dim": 32,
            "n_groups": 1,
            "chunk_size": 32,
        },
    ),
    "minicpm3": Architecture(
        "minicpm3",
        {**WIDE, **_LATENT, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64},
    ),
    "arcee": Architecture("arcee", {**WIDE_GQA, "head_dim": 32}),
    "apertus": Architecture("apertus", WIDE_GQA),
    "afmoe": Architecture(
        "afmoe",
        {
            **NARROW_GQA,
            **_EXPERTS,
            **_SLIDING,
            "num_dense_layers": 1,
            "num_shared_experts": 1,
            "score_func": "sigmoid",
            "route_norm": True,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "axk1": Architecture(
        "axk1", {**WIDE, **_LATENT, **_DEEPSEEK_EXPERTS, "first_k_dense_replace": 1}, _ROTARY_IN_TORCH
    ),
    "cohere2": Architecture("cohere2", {**WIDE_GQA, **_LONG_WINDOW, "logit_scale": 0.5}),
    "cohere2_moe": Architecture(
        "cohere2_moe",
        {
            **NARROW_GQA,
            **_LONG_WINDOW,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "logit_scale": 0.5,
            "mlp_layer_types": ["sparse"] * LAYERS,
        },
    ),
    "dbrx": Architecture(
        "dbrx",
        {
            "d_model": 128,
            "n_heads": 4,
            "n_layers": LAYERS,
            "max_seq_len": MAX_POSITIONS,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "hrm_text": Architecture("hrm_text", {**NARROW_GQA, "num_layers_per_stack": 2}),
    "hy_v3": Architecture(
        "hy_v3",
        {
            **NARROW_GQA,
            **_EXPERTS,
            **_SPARSE,
            "first_k_dense_replace": 1,
            "expert_hidden_dim": 96,
            "route_norm": True,
            "qk_norm": True,
        },
    ),
    "hy_v4": Architecture("hy_v4", {**WIDE, **_LATENT, **_DEEPSEEK_EXPERTS, **_SPARSE, **_INDEXER}),
    "hyperclovax": Architecture("hyperclovax", {**WIDE_GQA, "head_dim": 32}),
    "kimi_linear": Architecture(
        "kimi_linear",
        {
            **WIDE,
            **_LATENT,
            "q_lora_rank": None,
            "num_experts": 4,
            "num_experts_per_token": 2,
            "moe_intermediate_size": 96,
            "linear_head_dim": 32,
            "linear_num_heads": 4,
            "layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2),
            **_SPARSE,
        },
        {"enable_prefix_caching": True},
    ),
    "lfm2": Architecture(
        "lfm2",
        {
            **WIDE_GQA,
            "block_multiple_of": 64,
            "conv_dim": 128,
            "block_dim": 128,
            "layer_types": ["conv", "full_attention"] * (LAYERS // 2),
        },
        _ROTARY_IN_TORCH,
    ),
    "lfm2_moe": Architecture(
        "lfm2_moe",
        {**WIDE_GQA, **_EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
        _ROTARY_IN_TORCH,
    ),
    "laguna": Architecture(
        "laguna",
        {
            **NARROW_GQA,
            **_EXPERTS,
            **_SPARSE,
            **_SLIDING,
            "shared_expert_intermediate_size": 96,
            "num_attention_heads_per_layer": [4] * LAYERS,
        },
    ),
    "longcat_flash": Architecture(
        "longcat_flash",
        {
            **_LATENT,
            "mla_scale_q_lora": True,
            "mla_scale_kv_lora": True,
            "zero_expert_type": "identity",
            "hidden_size": 128,
            "num_layers": LAYERS,
            "num_attention_heads": 4,
            "ffn_hidden_size": 192,
            "expert_ffn_hidden_size": 96,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
            "max_position_embeddings": MAX_POSITIONS,
        },
        _ROTARY_IN_TORCH,
    ),
    "minimax_m2": Architecture(
        "minimax_m2",
        {**NARROW_GQA, **_LOCAL_EXPERTS, "rotary_dim": 32, "use_routing_bias": True, "scoring_func": "sigmoid"},
    ),
    "minimax": Architecture(
        "minimax",
        {**NARROW_GQA, **_LOCAL_EXPERTS, "layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2)},
    ),
    "minimax_m3": Architecture(
        "minimax_m3_vl_text",
        {
            **NARROW_GQA,
            **_LOCAL_EXPERTS,
            "dense_intermediate_size": 192,
            "shared_intermediate_size": 96,
            "rotary_dim": 16,
        },
    ),
    "inkling": Architecture(
        "inkling_text",
        {
            **NARROW_GQA,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 32,
            "sliding_window_size": 16,
            "moe_intermediate_size": 96,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
        },
    ),
    "mimo_v2_flash": Architecture(
        "mimo_v2_flash",
        {
            **NARROW_GQA,
            **_SLIDING,
            **_SPARSE,
            **_DEEPSEEK_EXPERTS,
            "v_head_dim": 32,
            "hybrid_layer_pattern": [1, 0] * (LAYERS // 2),
            "moe_layer_freq": [0, *[1] * (LAYERS - 1)],
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "swa_head_dim": 32,
            "swa_v_head_dim": 32,
            "sliding_window_size": 16,
            "layernorm_epsilon": 1e-5,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        },
    ),
    "zamba2": Architecture(
        "zamba2",
        {
            **WIDE,
            **_MAMBA,
            "num_key_value_heads": 4,
            "mamba_ngroups": 1,
            "n_mamba_heads": 8,
            "mamba_headdim": 32,
            "chunk_size": 32,
            "attention_head_dim": 64,
            "kv_channels": 32,
            "layers_block_type": ["linear_attention", "hybrid"] * (LAYERS // 2),
            "adapter_rank": 16,
            "time_step_min": 1e-30,
        },
    ),
    "hunyuan_dense": Architecture("hunyuan_v1_dense", NARROW_GQA),
    "jais2": Architecture("jais2", {**WIDE_GQA, "head_dim": 32}),
    "cwm": Architecture("cwm", {**NARROW_GQA, **_SLIDING}),
    "gpt_bigcode": Architecture(
        "gpt_bigcode", {"n_layer": LAYERS, "n_head": 4, "n_embd": 128, "n_positions": MAX_POSITIONS}
    ),
    "mellum": Architecture(
        "mellum",
        {
            **NARROW_GQA,
            **_SLIDING,
            **_LOCAL_EXPERTS,
            "moe_intermediate_size": 96,
            "mlp_layer_types": ["sparse"] * LAYERS,
        },
    ),
    "vaultgemma": Architecture(
        "vaultgemma", {**NARROW_GQA, **_SLIDING, "query_pre_attn_scalar": 32}, embedding_std=0.05
    ),
    # Not in the registry: vLLM tries its Transformers backend.
    "aria_text": Architecture(
        "aria_text",
        {**WIDE_GQA, "head_dim": 32, "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_num_shared_experts": 1},
    ),
    "biogpt": Architecture("biogpt", WIDE),
    "bitnet": Architecture("bitnet", WIDE_GQA),
    "codegen": Architecture(
        "codegen", {"n_layer": LAYERS, "n_head": 4, "n_embd": 128, "n_positions": MAX_POSITIONS, "rotary_dim": 16}
    ),
    "diffllama": Architecture("diffllama", {**WIDE_GQA, "head_dim": 32}),
    "doge": Architecture("doge", WIDE_GQA),
    "gemma4_unified": Architecture("gemma4_unified_text", {**NARROW_GQA, **_SLIDING}, embedding_std=0.05),
    "gpt_neo": Architecture(
        "gpt_neo",
        {
            "num_layers": LAYERS,
            "num_heads": 4,
            "hidden_size": 128,
            "intermediate_size": 192,
            "attention_types": [[["global", "local"], LAYERS // 2]],
            "max_position_embeddings": MAX_POSITIONS,
            "window_size": 16,
        },
    ),
    "gpt_neox_japanese": Architecture("gpt_neox_japanese", {**WIDE, "intermediate_multiple_size": 2}),
    "helium": Architecture("helium", {**WIDE_GQA, "head_dim": 32}),
    "jetmoe": Architecture(
        "jetmoe",
        {
            "hidden_size": 128,
            "num_hidden_layers": LAYERS,
            "num_key_value_heads": 2,
            "kv_channels": 32,
            "intermediate_size": 96,
            "num_local_experts": 4,
            "max_position_embeddings": MAX_POSITIONS,
        },
    ),
    "nanochat": Architecture("nanochat", WIDE_GQA),
    "openai_gpt": Architecture(
        "openai-gpt", {"n_layer": LAYERS, "n_head": 4, "n_embd": 128, "n_positions": MAX_POSITIONS}
    ),
    "persimmon": Architecture("persimmon", WIDE),
    "recurrent_gemma": Architecture(
        "recurrent_gemma",
        {
            **NARROW_GQA,
            "num_attention_heads": 4,
            "lru_width": 64,
            "attention_window_size": 64,
            "block_types": ["recurrent", "attention"],
        },
        embedding_std=0.05,
    ),
    "rwkv": Architecture(
        "rwkv",
        {
            "hidden_size": 128,
            "num_hidden_layers": LAYERS,
            "context_length": MAX_POSITIONS,
            "attention_hidden_size": 128,
            "intermediate_size": 192,
        },
    ),
    "solar_open": Architecture("solar_open", {**NARROW_GQA, **_DEEPSEEK_EXPERTS}),
    "xglm": Architecture(
        "xglm",
        {
            "d_model": 128,
            "ffn_dim": 192,
            "num_layers": LAYERS,
            "attention_heads": 4,
            "max_position_embeddings": MAX_POSITIONS,
        },
    ),
    "xlstm": Architecture(
        "xlstm",
        {"hidden_size": 128, "embedding_dim": 128, "num_hidden_layers": LAYERS, "num_blocks": LAYERS, "num_heads": 4},
    ),
    "youtu": Architecture("youtu", {**WIDE, **_LATENT}, _ROTARY_IN_TORCH),
    "zamba": Architecture(
        "zamba",
        {
            **WIDE,
            **_MAMBA,
            "num_key_value_heads": 4,
            "attention_hidden_size": 256,
            "attention_head_dim": 64,
            "mamba_dt_rank": 8,
            "layers_block_type": ["linear_attention", "hybrid"] * (LAYERS // 2),
            "use_mamba_kernels": False,
        },
    ),
    "zaya": Architecture(
        "zaya", {**NARROW_GQA, "num_experts": 4, "moe_intermediate_size": 96, "router_hidden_size": 32}
    ),
}

ALL: dict[str, Architecture] = {**ARCHITECTURES, **FURTHER}

_SIGMOID = "vLLM's CPU build has no router with sigmoid scores outside of groups of experts"
_STRIDES = "vLLM's linear layers on the CPU (oneDNN) refuse the strides of this model's projections"
_TORCHVISION = "vLLM's code needs torchvision, which was not installed"
_NOT_THERE = "not in vLLM's registry, and not compatible with its Transformers backend"
_STREAMS = "`ArchitectureError`: its blocks hand on several residual streams side by side"

# Why there are no numbers, where vLLM's own words do not say it. A model here is in no table of numbers.
REASONS: dict[str, str] = {
    "mpt": UNSUPPORTED_ON_CPU["mpt"],
    "qwen3_5": _TORCHVISION,
    "qwen3_5_moe": _TORCHVISION,
    "qwen4_exp": _TORCHVISION,
    "deepseek_v4": _STREAMS,
    "hy_v4": _STREAMS,
    "gemma3n": _STREAMS,
    "zaya": "`ArchitectureError`: its blocks hand on two streams of different widths",
    "hrm_text": "`ArchitectureError`: its forward goes through two lists of layers, several times",
    "olmo_hybrid": "its linear attention in vLLM needs Triton",
    "jamba": _STRIDES,
    "mamba": _STRIDES,
    "falcon_mamba": _STRIDES,
    "axk1": "vLLM's code has a norm, `post_mlp_layernorm`, that transformers' model lacks",
    "dbrx": "vLLM cannot load the experts as transformers saves them",
    "longcat_flash": "vLLM cannot load the experts as transformers saves them",
    "kimi_linear": "vLLM's CPU build does not accept its cache settings",
    "laguna": _SIGMOID,
    "minimax_m2": _SIGMOID,
    "minimax_m3": _SIGMOID,
    "mimo_v2_flash": "vLLM reads other fields of the config than transformers writes, so the first attention differs",
    "inkling": "vLLM needs the special tokens of its own tokenizer",
    "aria_text": "vLLM's Transformers backend cannot load its experts",
    "doge": "vLLM's Transformers backend leaves out the mask that the model computes, so the first attention differs",
    "jetmoe": "vLLM's Transformers backend computes its mixture of attention heads differently",
    "codegen": _NOT_THERE,
    "gpt_neo": _NOT_THERE,
    "gpt_neox_japanese": _NOT_THERE,
    "openai_gpt": _NOT_THERE,
    "rwkv": _NOT_THERE,
    "xglm": _NOT_THERE,
    "xlstm": _NOT_THERE,
}

_IN_TORCH = (
    "run with vLLM's rotary embedding in PyTorch (`custom_ops`), because its operator on the CPU misreads the queries and keys of these "
    "models"
)
_TIME_STEP = "with `time_step_min` near 0, because vLLM does not limit the time step from below as transformers does"
_WINDOW = "with a window longer than the prompts, because vLLM's has one token more than transformers'"

# What a row of the table should be read with.
NOTES: dict[str, str] = {
    "llama4": (
        "vLLM reorders the dimensions within each head of queries and keys to suit its rotary embedding, so `attn_q` and `attn_k` differ "
        "in order. midstream refuses `attention_probabilities` at the layers with attention in chunks."
    ),
    "apertus": "vLLM keeps the parameters of xIELU in bfloat16, and transformers takes the dtype of the model.",
    "qwen3_next": (
        "compared in bfloat16, the only dtype of vLLM's linear attention on the CPU. Rounding alone moves the logits of transformers by "
        "4.5e-02 of the largest, and may choose other experts."
    ),
    "deepseek_v2": f"{_IN_TORCH}.",
    "deepseek_v3": f"{_IN_TORCH}.",
    "glm4_moe_lite": f"{_IN_TORCH}.",
    "lfm2": f"{_IN_TORCH}.",
    "lfm2_moe": f"{_IN_TORCH}.",
    "phimoe": "with a bias of 0 in the output layer, because vLLM leaves it out.",
    "ernie4_5_moe": "with a correction bias of 0 in the routers, because vLLM's CPU build leaves it out.",
    "cohere2": f"{_WINDOW}.",
    "cohere2_moe": f"{_WINDOW}.",
    "falcon_h1": "with `mamba_rms_norm=False`, because vLLM and transformers norm the gated values differently.",
    "zamba2": f"{_TIME_STEP}.",
    "nemotron_h": f"{_TIME_STEP}.",
    "minicpm3": (
        "vLLM pads the values of attention to the width of its keys, so there is no `attn_v`, and scales what the final norm returns, so "
        "there is no `project_on_vocab`."
    ),
}
