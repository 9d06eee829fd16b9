"""Small random targets and drafters: enough mechanics for every test, no network."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from vllm_redrafter import Drafter, DrafterConfig, save_drafter

MAX_LENGTH = 512
BOS, EOS = 0, 1


def make_target(folder: Path, vocab_size: int = 512, seed: int = 0) -> Path:
    """A Llama with large random weights: its greedy output wanders instead of looping."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
        bos_token_id=BOS,
        eos_token_id=EOS,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_small_target(folder: Path, vocab_size: int = 512, hidden_size: int = 64) -> Path:
    """A smaller Llama, for what is slow; its head size is the smallest that kernels know."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=MAX_LENGTH,
        bos_token_id=BOS,
        eos_token_id=EOS,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def add_tokenizer(folder: Path, vocab_size: int = 512) -> None:
    """A byte-level BPE tokenizer, so that stop strings, bad words and grammars have text."""
    tokenizer = ByteLevelBPETokenizer()
    text = [json.dumps({"name": f"value {i}", "list": [i, i * 7]}) for i in range(300)]
    tokenizer.train_from_iterator(
        text, vocab_size=vocab_size, special_tokens=["<s>", "</s>"], show_progress=False
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def make_drafter(folder: Path, vocab_size: int = 512, hidden_size: int = 128) -> Path:
    torch.manual_seed(1)
    save_drafter(Drafter(DrafterConfig(vocab_size, hidden_size, hidden_size)), folder)
    return folder
