# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts that read text alone."""

from typing import Any

import transformers

from redrafter_testing.models.families.family import HIDDEN, SIZES, random_family

EXPERTS_PER_ROW = 2
ROUTED: dict[str, Any] = {**SIZES, "num_experts": 4, "num_experts_per_tok": EXPERTS_PER_ROW}
WIDE = {**ROUTED, "hidden_size": 2 * HIDDEN}
"""For classes whose heads' size is that of the hidden states by heads, whatever head_dim says."""

MIXTRAL = random_family(
    "MixtralForCausalLM",
    transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=EXPERTS_PER_ROW),
    "2 of 4 experts",
)

EXPERTS = (
    MIXTRAL,
    random_family(
        "Qwen3MoeForCausalLM",
        transformers.Qwen3MoeConfig(
            **ROUTED, moe_intermediate_size=64, norm_topk_prob=True, mlp_only_layers=[0]
        ),
        "a dense layer before experts",
    ),
    random_family(
        "Qwen2MoeForCausalLM",
        transformers.Qwen2MoeConfig(
            **WIDE, moe_intermediate_size=64, shared_expert_intermediate_size=64
        ),
        "a shared expert",
    ),
    random_family(
        "OlmoeForCausalLM",
        transformers.OlmoeConfig(**WIDE),
        "norms of q and k across heads",
    ),
    random_family(
        "GptOssForCausalLM",
        transformers.GptOssConfig(
            **SIZES,
            num_local_experts=4,
            num_experts_per_tok=EXPERTS_PER_ROW,
            sliding_window=32,
            layer_types=["sliding_attention", "full_attention"],
        ),
        "attention sinks, a sliding window in every other layer, biases",
    ),
    random_family(
        "Glm4MoeForCausalLM",
        transformers.Glm4MoeConfig(
            **SIZES,
            n_routed_experts=4,
            num_experts_per_tok=EXPERTS_PER_ROW,
            moe_intermediate_size=64,
            n_shared_experts=1,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            use_qk_norm=True,
        ),
        "groups of experts, a shared one",
    ),
)
