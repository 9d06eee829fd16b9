"""A target and a drafter of random weights, small enough for any GPU and for any patience."""

from __future__ import annotations

from pathlib import Path

VOCABULARY = 24
"""So few tokens that a random drafter is often right: drafts are accepted, and refused."""

HIDDEN = 64


def write_target(folder: Path) -> Path:
    """A Llama whose large weights keep its greedy output from looping."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_drafter(folder: Path) -> Path:
    """A drafter for it."""
    import torch

    from vllm_redrafter import new_head, save_drafter

    torch.manual_seed(1)
    save_drafter(new_head("recurrent", VOCABULARY, HIDDEN), folder)
    return folder
