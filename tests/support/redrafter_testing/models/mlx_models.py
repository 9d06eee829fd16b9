# SPDX-License-Identifier: Apache-2.0
"""A tiny random model of every class of mlx-lm, by the name of its module."""

from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

ACCEPTED = str.split("""
    cohere2 deepseek_v2 deepseek_v3 exaone4 gemma gemma2 gemma3 gemma3_text gemma4 gemma4_text
    glm4 gpt_oss granite llama llama4_text minicpm3 mistral3 mixtral nemotron-nas
    olmo2 phi3 qwen qwen2 qwen3 qwen3_moe stablelm starcoder2
""")

REFUSED = {
    "recurrent or convolutional layers (`ArraysCache`)": "mamba",
    "several caches in one layer (`CacheList`)": "deepseek_v32",
    "caches of its own (`LayerCache`)": "deepseek_v41",
    "attention within chunks of the context (`ChunkedKVCache`)": "llama4",
    "attention to blocks of rows (`block_sparse`)": "phi3small",
    "positions applied outside of a rope module": "gpt2",
    "several hidden states for a token": "gemma3n",
    "the output layer in the module with the layers": "gpt_neox",
    "layers that are not called as modules": "iquestloopcoder",
    "a final norm outside of the module with the layers": "phixtral",
    "positions that are counted by rows in layers that share K and V": "afm7",
    "no module that returns what all layers make of a token": "plamo",
}
"""By the reason."""

VOCAB = 200
LAYERS = 4
WINDOW = 8
"""Positions that layers with a sliding window see."""

COMMON: dict[str, Any] = dict(
    # sizes, under all the names that they have
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "model_dim", "hidden_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("vocab_size", "num_vocab"), VOCAB),
    intermediate_size=128,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 512),
    head_dim=16,
    # attention
    rope_theta=1e4,
    rope_scaling=None,
    rotary_dim=8,
    partial_rotary_factor=0.5,
    sliding_window=WINDOW,
    layer_types=["full_attention", "sliding_attention"] * (LAYERS // 2),
    attention_bias=False,
    use_qk_norm=True,
    # latent attention
    kv_lora_rank=32,
    q_lora_rank=32,
    qk_rope_head_dim=8,
    qk_nope_head_dim=16,
    v_head_dim=16,
    # norms
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon"), 1e-5),
    layer_norm_epsilon=1e-5,
    # mixtures of experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    num_experts_per_tok=2,
    n_shared_experts=1,
    **dict.fromkeys(("moe_intermediate_size", "intermediate_size_mlp"), 64),
    **dict.fromkeys(("decoder_sparse_step", "moe_layer_freq", "n_group", "topk_group"), 1),
    **dict.fromkeys(("routed_scaling_factor", "first_k_dense_replace"), 1),
    mlp_only_layers=[],
    norm_topk_prob=True,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    # the rest
    hidden_act="silu",
    tie_word_embeddings=True,
    **dict.fromkeys(("mlp_bias", "use_bias", "use_qkv_bias"), False),
    **dict.fromkeys(("logits_scaling", "logit_scale", "residual_multiplier"), 1.0),
    **dict.fromkeys(("embedding_multiplier", "attention_multiplier"), 0.25),
    **dict.fromkeys(("scale_depth", "scale_emb"), 1.5),
    dim_model_base=32,
)
"""What models are given unless `SPECIAL` says otherwise; each takes what it has a name for."""

GEMMA = dict(sliding_window_pattern=2, query_pre_attn_scalar=16.0)
GEMMA4 = dict(
    num_kv_shared_layers=2,
    layer_types=["sliding_attention", "full_attention"] * 2,
    vocab_size_per_layer_input=VOCAB,
    hidden_size_per_layer_input=8,
    global_head_dim=16,
)


def _text(name: str, **special: Any) -> dict[str, Any]:
    """Of a model with images: those of its text model."""
    return {"text_config": {**COMMON, "model_type": name, **special}}


SPECIAL: dict[str, dict[str, Any]] = {
    "afm7": dict(num_kv_reuse_layers=2),
    "deepseek_v2": dict(
        rope_scaling=dict(
            rope_type="yarn",
            type="yarn",
            factor=2.0,
            rope_theta=1e4,
            original_max_position_embeddings=256,
            mscale=1.0,
            mscale_all_dim=1.0,
            beta_fast=32,
            beta_slow=1,
        )
    ),
    "exaone4": dict(sliding_window_pattern="LG"),
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "gemma3": _text("gemma3_text", **GEMMA),
    "gemma3n": _text(
        "gemma3n",
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        vocab_size_per_layer_input=VOCAB,
        rope_local_base_freq=1e4,
        final_logit_softcapping=30.0,
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
        hidden_size_per_layer_input=8,
        altup_num_inputs=2,
        altup_coef_clip=120.0,
        altup_correct_scale=True,
        altup_active_idx=0,
        laurel_rank=8,
    ),
    "gemma4": _text("gemma4_text", **GEMMA4),
    "gemma4_text": GEMMA4,
    "gpt_neox": dict(rotary_emb_base=10000, rotary_pct=0.5),
    "iquestloopcoder": dict(loop_window_size=WINDOW),
    "llama4": _text(
        "llama4_text",
        attention_chunk_size=WINDOW,
        interleave_moe_layer_step=2,
        num_experts_per_tok=1,
    ),
    "llama4_text": dict(no_rope_layers=[1, 1, 1, 0]),
    "mamba": dict(conv_kernel=4, state_size=8, use_conv_bias=True, time_step_rank=8),
    "minicpm3": dict(rope_scaling={"original_max_position_embeddings": 256}),
    "mistral3": _text("llama"),
    "nemotron-nas": dict(
        block_configs=[
            {
                "attention": {"no_op": index == 1, "n_heads_in_group": 2},
                "ffn": {"ffn_mult": 2.0},
            }
            for index in range(LAYERS)
        ]
    ),
    "phi3small": dict(
        dense_attention_every_n_layers=2,
        ff_intermediate_size=128,
        gegelu_limit=20.0,
        blocksparse_block_size=64,
        blocksparse_num_local_blocks=2,
        blocksparse_vert_stride=2,
    ),
    "plamo": dict(n_shared_head=2),
    "qwen": dict(kv_channels=16),
}


def tiny_model(name: str, dtype: mx.Dtype = mx.float32, bits: int = 0, **special: Any) -> nn.Module:
    """The `Model` of `mlx_lm.models.<name>` with random weights; 0 bits: not quantised."""
    module = import_module(f"mlx_lm.models.{name}")
    mx.random.seed(0)
    arguments = {**COMMON, "model_type": name, **SPECIAL.get(name, {}), **special}
    model = module.Model(module.ModelArgs.from_dict(arguments))
    # What begins as zeros, such as biases, would hide what is done with it.
    model.update(tree_map(_without_zeros, model.parameters()))
    model.set_dtype(dtype)
    if bits:
        nn.quantize(model, 32, bits)
    mx.eval(model.parameters())
    return model


def _without_zeros(weights: mx.array) -> mx.array:
    if not mx.issubdtype(weights.dtype, mx.floating) or bool(mx.any(weights)):
        return weights
    return 0.1 * mx.random.normal(weights.shape)
