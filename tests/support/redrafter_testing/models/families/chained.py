# SPDX-License-Identifier: Apache-2.0
"""Targets that are verified along chains: no tree can share what their layers keep."""

from functools import partial
from pathlib import Path
from typing import Any

import transformers

from redrafter_testing.models.decisive_target import VOCAB_SIZE, trained
from redrafter_testing.models.families.family import SIZES, Family, families


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
    *families("chained"),
)
