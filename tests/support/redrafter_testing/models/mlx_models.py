# SPDX-License-Identifier: Apache-2.0
"""A tiny random model of every class of mlx-lm, by the name of its module."""

from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

VOCAB = 200
LAYERS = 4
WINDOW = 8
"""Positions that layers with a sliding window see."""

COMMON: dict[str, Any] = dict(
    # sizes, under all the names that they have
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "model_dim", "hidden_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("num_transformer_layers",), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("vocab_size", "num_vocab", "embedding_size"), VOCAB),
    **dict.fromkeys(("intermediate_size", "n_inner", "mlp_hidden_size"), 128),
    **dict.fromkeys(("max_position_embeddings", "max_seq_len", "n_positions", "n_ctx"), 512),
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
    **dict.fromkeys(("layer_norm_epsilon", "layernorm_epsilon"), 1e-5),
    # mixtures of experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_num_experts",), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "num_shared_expert"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("expert_ffn_hidden_size", "shared_intermediate_size"), 64),
    **dict.fromkeys(("intermediate_size_mlp", "ffn_hidden_size"), 64),
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
MAMBA = dict(conv_kernel=4, state_size=8, use_conv_bias=True, time_step_rank=8)
LINEAR = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_conv_kernel_dim=4,
)
CONV = dict(
    conv_bias=False,
    conv_L_cache=3,
    block_dim=64,
    block_multiple_of=8,
    block_ffn_dim_multiplier=1.0,
    block_auto_adjust_ff_dim=False,
    use_expert_bias=True,
    num_dense_layers=1,
    layer_types=["full_attention", "conv"] * (LAYERS // 2),
)
YARN = dict(
    rope_type="yarn",
    type="yarn",
    factor=2.0,
    rope_theta=1e4,
    original_max_position_embeddings=256,
    llama_4_scaling_beta=0.1,
)


def _text(name: str, **special: Any) -> dict[str, Any]:
    """Of a model with images: those of its text model."""
    return {"text_config": {**COMMON, "model_type": name, **special}}


SPECIAL: dict[str, dict[str, Any]] = {
    "afm7": dict(num_kv_reuse_layers=2),
    "deepseek_v2": dict(
        rope_scaling=dict(YARN, mscale=1.0, mscale_all_dim=1.0, beta_fast=32, beta_slow=1)
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
    "lfm2": CONV,
    "llama4": _text(
        "llama4_text",
        attention_chunk_size=WINDOW,
        interleave_moe_layer_step=2,
        num_experts_per_tok=1,
    ),
    "llama4_text": dict(no_rope_layers=[1, 1, 1, 0]),
    "mamba": MAMBA,
    "mimo_v2_flash": dict(
        hybrid_layer_pattern=[0, 1, 0, 1],
        moe_layer_freq=[0, 1, 1, 1],
        add_swa_attention_sink_bias=True,
        add_full_attention_sink_bias=False,
        sliding_window_size=WINDOW,
        swa_rope_theta=1e4,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=16,
        swa_v_head_dim=16,
    ),
    "minicpm3": dict(rope_scaling={"original_max_position_embeddings": 256}),
    "ministral3": dict(rope_parameters=YARN),
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
    "openelm": dict(
        ffn_dim_divisor=16,
        num_query_heads=[4] * LAYERS,
        num_kv_heads=[2] * LAYERS,
        ffn_multipliers=[2.0] * LAYERS,
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
    "qwen3_next": LINEAR,
    "step3p5": dict(
        num_attention_groups=2, moe_top_k=2, share_expert_dim=64, moe_layers_enum="1,2,3"
    ),
}


def tiny_model(name: str, dtype: mx.Dtype = mx.float32, bits: int = 0, **special: Any) -> nn.Module:
    """A model of the class `Model` in `mlx_lm.models.<name>`, with random weights.

    Args:
        name: of the module.
        dtype: of its weights.
        bits: of quantised weights; 0 for none.
        special: arguments of its configuration.
    """
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
