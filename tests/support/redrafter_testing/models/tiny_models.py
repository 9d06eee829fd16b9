# SPDX-License-Identifier: Apache-2.0
"""Small random targets and drafters: enough mechanics for every test, no network."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from vllm_redrafter import save_drafter
from vllm_redrafter.data.rows import TextRow
from vllm_redrafter.data.target import Target
from vllm_redrafter.heads.recurrent import RecurrentConfig, RecurrentHead
from vllm_redrafter.heads.registry import new_head
from vllm_redrafter.replay.batches import TextBatch
from vllm_redrafter.replay.target import load_target, model_factory, read_target
from vllm_redrafter.training.distillation import Distillation

MAX_LENGTH = 512
BOS, EOS = 0, 1


def make_target(folder: Path, vocab_size: int = 512, seed: int = 0, **sizes: Any) -> Path:
    """A Llama with large random weights: its greedy output wanders instead of looping."""
    torch.manual_seed(seed)
    usual: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.2,
        "max_position_embeddings": MAX_LENGTH,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "tie_word_embeddings": False,
    }
    LlamaForCausalLM(LlamaConfig(**usual | sizes)).save_pretrained(folder)
    return folder


def make_small_target(
    folder: Path, vocab_size: int = 512, hidden_size: int = 64, layers: int = 2
) -> Path:
    """A smaller one, for what is slow; its head size is the smallest that kernels know."""
    return make_target(
        folder,
        vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        initializer_range=0.3,
    )


def make_random_target(config: Any, folder: Path) -> Path:
    """A target of any kind whose output depends on all that its attention does.

    Freshly made, biases are zero, and Gemma's layers add little; Granite's sinks are vLLM's alone.
    """
    torch.manual_seed(5)
    model = model_factory(config).from_config(config).float()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
        if config.model_type.startswith("gemma") and ".post_" in name:
            torch.nn.init.constant_(parameter, 15.0)
    model.save_pretrained(folder)
    if getattr(config, "attention_sinks", False):
        weights = load_file(folder / "model.safetensors")
        for layer in range(config.num_hidden_layers):
            sinks = 2 + torch.randn(config.num_attention_heads)
            weights[f"model.layers.{layer}.self_attn.sinks"] = sinks
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def add_tokenizer(folder: Path, vocab_size: int = 512) -> Path:
    """A byte-level BPE tokenizer, so that stop strings, bad words and grammars have text."""
    tokenizer = ByteLevelBPETokenizer()
    text = [json.dumps({"name": f"value {i}", "list": [i, i * 7]}) for i in range(300)]
    tokenizer.train_from_iterator(
        text, vocab_size=vocab_size, special_tokens=["<s>", "</s>"], show_progress=False
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder


def make_worded_target(folder: Path, vocab_size: int = 512, **sizes: Any) -> Path:
    """One whose tokens have text."""
    return add_tokenizer(make_target(folder, vocab_size, **sizes), vocab_size)


def make_drafter(
    folder: Path, vocab_size: int = 512, hidden_size: int = 128, target_layers: tuple[int, ...] = ()
) -> Path:
    torch.manual_seed(1)
    config = RecurrentConfig(vocab_size, hidden_size, hidden_size, target_layers=target_layers)
    head = RecurrentHead(config)
    if head.fuse is not None:
        torch.nn.init.normal_(head.fuse.weight, std=0.1)
    save_drafter(head, folder)
    return folder


def make_reciting(
    folder: Path, target: Path, rows: Sequence[TextRow], name: str = "gated", **options: Any
) -> Path:
    """A head that has some of the target's text by heart; it drafts four tokens of what comes."""
    length = 4
    model = load_target(Target.open(target))
    batch = TextBatch.of([[row] for row in rows])
    outputs = read_target(model, batch, options.get("target_layers", ()))
    torch.manual_seed(1)
    head = new_head(name, model.config.vocab_size, model.config.hidden_size, **options)
    learning = Distillation(head, None, num_steps=length, target_share=0.0)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        learning(batch, outputs, torch.full((length,), 1e-2)).total.backward()
        optimizer.step()
    save_drafter(head, folder)
    return folder
