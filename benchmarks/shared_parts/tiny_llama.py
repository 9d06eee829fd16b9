# SPDX-License-Identifier: Apache-2.0
"""A target of random weights, small enough for any machine."""

from typing import Any

HIDDEN = 64


def tiny_llama(vocabulary: int, spread: float) -> Any:
    """A Llama of two layers; token 0 begins and token 1 ends a text."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,  # the smallest that attention kernels know
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=spread,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)
