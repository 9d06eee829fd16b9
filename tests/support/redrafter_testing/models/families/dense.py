# SPDX-License-Identifier: Apache-2.0
"""Targets without experts, that read text alone."""

import transformers

from redrafter_testing.models.families.family import HIDDEN, SIZES, VOCAB, random_family

DENSE = (
    random_family("LlamaForCausalLM", transformers.LlamaConfig(**SIZES)),
    random_family(
        "Qwen2ForCausalLM",
        transformers.Qwen2Config(**{**SIZES, "hidden_size": 2 * HIDDEN}),
    ),
    random_family(
        "Qwen3ForCausalLM",
        transformers.Qwen3Config(**SIZES, attention_bias=True),
        "biases, norms of q and k",
    ),
    random_family(
        "MistralForCausalLM",
        transformers.MistralConfig(
            **{**SIZES, "head_dim": 128}, sliding_window=24, tie_word_embeddings=True
        ),
        "a sliding window, heads of 128, tied embeddings",
    ),
    random_family(
        "Gemma2ForCausalLM",
        transformers.Gemma2Config(
            **SIZES, sliding_window=32, query_pre_attn_scalar=64, attn_logit_softcapping=5.0
        ),
        "soft caps, a sliding window in every other layer",
    ),
    random_family(
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
    random_family("Phi3ForCausalLM", transformers.Phi3Config(**SIZES, partial_rotary_factor=0.5)),
    random_family("Glm4ForCausalLM", transformers.Glm4Config(**SIZES)),
    random_family(
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
    ),
    random_family(
        "BloomForCausalLM",
        transformers.BloomConfig(
            vocab_size=VOCAB, hidden_size=2 * HIDDEN, n_layer=2, n_head=2, initializer_range=0.3
        ),
        "ALiBi",
        engines=("cpu",),
    ),
)
