# SPDX-License-Identifier: Apache-2.0
"""Targets that are verified along chains: no tree can share what their layers keep."""

from functools import partial
from pathlib import Path
from typing import Any

import transformers

from redrafter_testing.models.decisive_target import VOCAB_SIZE, trained
from redrafter_testing.models.families.family import HIDDEN, SIZES, Family, random_family


def _make_decisive(config: Any, folder: Path) -> Path:
    """Sure of each token, so that rounding changes no answer."""
    trained(config).save_pretrained(folder)
    return folder


WITHOUT_HEAD_DIM = {name: size for name, size in SIZES.items() if name != "head_dim"}

CHAINED = (
    # vLLM's gated delta net for CPUs knows bfloat16 alone.
    Family(
        "Qwen3NextForCausalLM",
        partial(
            _make_decisive,
            transformers.Qwen3NextConfig(
                **{**SIZES, "initializer_range": 0.1, "vocab_size": VOCAB_SIZE},
                linear_num_key_heads=1,
                linear_num_value_heads=2,
                linear_key_head_dim=128,
                linear_value_head_dim=128,
                layer_types=["linear_attention", "full_attention"],
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=64,
                shared_expert_intermediate_size=64,
            ),
        ),
        "gated delta net",
        VOCAB_SIZE,
        arguments={"dtype": "bfloat16"},
        engines=("v2",),
    ),
    random_family(
        "GraniteMoeHybridForCausalLM",
        transformers.GraniteMoeHybridConfig(
            **{**WITHOUT_HEAD_DIM, "hidden_size": 2 * HIDDEN},
            mamba_n_heads=8,
            mamba_d_head=32,
            mamba_n_groups=1,
            mamba_d_state=16,
            mamba_d_conv=4,
            mamba_expand=2,
            mamba_chunk_size=32,
            layer_types=["mamba", "attention"],
            num_local_experts=0,
            shared_intermediate_size=128,
            position_embedding_type="rope",
        ),
        "Mamba 2",
        engines=("v2",),
    ),
    random_family(
        "Lfm2ForCausalLM",
        transformers.Lfm2Config(
            **WITHOUT_HEAD_DIM | {"hidden_size": 2 * HIDDEN},
            layer_types=["conv", "full_attention"],
            conv_dim=2 * HIDDEN,
            block_dim=2 * HIDDEN,
            block_auto_adjust_ff_dim=False,
        ),
        "short convolutions",
        engines=("v2",),
    ),
    random_family(
        "DeepseekV3ForCausalLM",
        transformers.DeepseekV3Config(
            **WITHOUT_HEAD_DIM | {"num_key_value_heads": 2},
            q_lora_rank=32,
            kv_lora_rank=256,
            qk_nope_head_dim=32,
            qk_rope_head_dim=64,
            v_head_dim=32,
            moe_intermediate_size=64,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            topk_method="noaux_tc",
            scoring_func="sigmoid",
        ),
        "MLA",
        engines=("v2",),
    ),
    random_family(
        "Llama4ForCausalLM",
        transformers.Llama4TextConfig(
            **SIZES,
            intermediate_size_mlp=128,
            num_local_experts=2,
            num_experts_per_tok=1,
            attention_chunk_size=32,
            no_rope_layers=[1, 0],
        ),
        "attention local to chunks",
    ),
)
