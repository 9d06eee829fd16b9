"""Targets without experts, that read text alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import transformers

from redrafter_testing.models.families.family import SIZES, Family
from redrafter_testing.models.tiny_models import make_random_target


def _family(architecture: str, config: Any, feature: str = "", **rest: Any) -> Family:
    return Family(architecture, partial(make_random_target, config), feature, **rest)


DENSE = (
    _family("LlamaForCausalLM", transformers.LlamaConfig(**SIZES)),
    _family(
        "Qwen3ForCausalLM",
        transformers.Qwen3Config(**SIZES, attention_bias=True),
        "biases, norms of q and k",
    ),
    _family(
        "MistralForCausalLM",
        transformers.MistralConfig(
            **{**SIZES, "head_dim": 128}, sliding_window=24, tie_word_embeddings=True
        ),
        "a sliding window, heads of 128, tied embeddings",
    ),
    _family(
        "Gemma2ForCausalLM",
        transformers.Gemma2Config(
            **SIZES, sliding_window=32, query_pre_attn_scalar=64, attn_logit_softcapping=5.0
        ),
        "soft caps, a sliding window in every other layer",
    ),
    _family(
        "GraniteForCausalLM",
        transformers.GraniteConfig(
            **SIZES,
            sliding_window=32,
            layer_types=["sliding_attention", "full_attention"],
            attention_sinks=True,
            attention_multiplier=0.125,
        ),
        "attention sinks, a sliding window in every other layer",
    ),
)
