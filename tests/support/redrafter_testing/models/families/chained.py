"""Targets that are verified along chains: no tree can share what their layers keep."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import transformers

from redrafter_testing.models.decisive_target import VOCAB_SIZE, trained
from redrafter_testing.models.families.family import HIDDEN, SIZES, Family
from redrafter_testing.models.tiny_models import make_random_target


def _make_decisive(config: Any, folder: Path) -> Path:
    trained(config).save_pretrained(folder)
    return folder


def _decisive(architecture: str, config: Any, feature: str, **rest: Any) -> Family:
    """Sure of each token, so that rounding changes no answer."""
    return Family(architecture, partial(_make_decisive, config), feature, VOCAB_SIZE, **rest)


def _family(architecture: str, config: Any, feature: str, **rest: Any) -> Family:
    return Family(architecture, partial(make_random_target, config), feature, **rest)


LINEAR = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 32,
}
WITHOUT_HEAD_DIM = {name: size for name, size in SIZES.items() if name != "head_dim"}

CHAINED = (
    # vLLM's gated delta net for CPUs knows bfloat16 alone.
    _decisive(
        "Qwen3NextForCausalLM",
        transformers.Qwen3NextConfig(
            **{**SIZES, "initializer_range": 0.1, "vocab_size": VOCAB_SIZE},
            **LINEAR,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
        ),
        "gated delta net",
        arguments={"dtype": "bfloat16"},
        engines=("v2",),
    ),
    _family(
        "GraniteMoeHybridForCausalLM",
        transformers.GraniteMoeHybridConfig(
            **{**WITHOUT_HEAD_DIM, "hidden_size": 2 * HIDDEN},
            **{**MAMBA, "mamba_n_heads": 8},
            layer_types=["mamba", "attention"],
            num_local_experts=0,
            shared_intermediate_size=128,
            position_embedding_type="rope",
        ),
        "Mamba 2",
        hidden_size=2 * HIDDEN,
        engines=("v2",),
    ),
    _family(
        "NemotronHForCausalLM",
        transformers.NemotronHConfig(
            **{name: size for name, size in SIZES.items() if name != "num_hidden_layers"},
            layers_block_type=["mamba", "attention", "mlp"],
            ssm_state_size=16,
            mamba_num_heads=4,
            mamba_head_dim=32,
            n_groups=1,
            chunk_size=32,
        ),
        "Mamba 2",
        engines=("v2",),
    ),
    _family(
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
