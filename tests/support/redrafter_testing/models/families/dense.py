# SPDX-License-Identifier: Apache-2.0
"""Targets without experts, that read text alone."""

from functools import partial
from typing import Any

import transformers

from redrafter_testing.models.families.family import HIDDEN, SIZES, VOCAB, Family
from redrafter_testing.models.tiny_models import make_random_target


def _family(architecture: str, config: Any, feature: str = "", **rest: Any) -> Family:
    return Family(architecture, partial(make_random_target, config), feature, **rest)


DENSE = (
    _family("LlamaForCausalLM", transformers.LlamaConfig(**SIZES)),
    _family(
        "Qwen2ForCausalLM",
        transformers.Qwen2Config(**{**SIZES, "hidden_size": 2 * HIDDEN}),
        hidden_size=2 * HIDDEN,
    ),
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
    _family("Phi3ForCausalLM", transformers.Phi3Config(**SIZES, partial_rotary_factor=0.5)),
    _family("Glm4ForCausalLM", transformers.Glm4Config(**SIZES)),
    _family(
        "GPT2LMHeadModel",
        transformers.GPT2Config(
            vocab_size=VOCAB,
            n_embd=2 * HIDDEN,
            n_layer=2,
            n_head=2,
            n_positions=512,
            initializer_range=0.3,
            bos_token_id=0,
            eos_token_id=1,
        ),
        "learned positions",
        hidden_size=2 * HIDDEN,
    ),
    _family(
        "BloomForCausalLM",
        transformers.BloomConfig(
            vocab_size=VOCAB, hidden_size=2 * HIDDEN, n_layer=2, n_head=2, initializer_range=0.3
        ),
        "ALiBi",
        hidden_size=2 * HIDDEN,
        engines=("cpu",),
    ),
)
