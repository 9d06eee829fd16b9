# SPDX-License-Identifier: Apache-2.0
"""A target and a drafter that was never trained, and still guesses a good part of what it says.

Most of what the target says next follows from its last token alone: its layers add little to the
embedding, which a linear layer reads. The drafter is that linear layer. What the layers add, the
drafter does not know, so its drafts are accepted and refused, at places that the context decides.
"""

import json
from pathlib import Path
from typing import Any

import torch
from shared_parts.tiny_llama import HIDDEN, tiny_llama

VOCABULARY = 512

SPREAD = 0.5
"""Of the last layer's weights: with 64 of them, logits have a deviation of 4."""

CONTEXT = 0.08
"""Of the layers' weights: how much of the next token is up to the tokens before the last one."""

SHIFT = 8.0
"""SiLU(x + 8) is x + 8, but for one part in a thousand: the drafter's recurrence as a copy."""


def write_models(folder: Path) -> tuple[Path, Path]:
    """Write a target with a tokenizer and a drafter for it; the target's folder and its own."""
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    embeddings *= HIDDEN**0.5 / embeddings.norm(dim=1, keepdim=True)
    last = SPREAD * torch.randn(VOCABULARY, HIDDEN, generator=generator)
    # A row that sums to 0 does not see the shift.
    last -= last.mean(dim=1, keepdim=True)
    target, drafter = folder / "target", folder / "drafter"
    _write_target(target, embeddings, last)
    _write_tokenizer(target)
    _write_drafter(drafter, last)
    return target, drafter


def _write_target(folder: Path, embeddings: torch.Tensor, last: torch.Tensor) -> None:
    model = tiny_llama(VOCABULARY, CONTEXT)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(embeddings)
        model.get_output_embeddings().weight.copy_(last)
    model.save_pretrained(folder)


def _write_tokenizer(folder: Path) -> None:
    """Stop strings and grammars need text."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = ByteLevelBPETokenizer()
    text = [json.dumps({"name": f"value {i}", "list": [i, i * 7]}) for i in range(300)]
    tokenizer.train_from_iterator(
        text, vocab_size=VOCABULARY, special_tokens=["<s>", "</s>"], show_progress=False
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def _write_drafter(folder: Path, last: torch.Tensor) -> None:
    from vllm_redrafter import new_head, save_drafter

    sizes = {"exit_dim": 2 * HIDDEN, "num_draft_layers": 0}
    drafter: Any = new_head("recurrent", VOCABULARY, HIDDEN, **sizes)
    with torch.no_grad():
        drafter.rnn_w.weight.copy_(torch.eye(HIDDEN))
        drafter.rnn_u.weight.zero_()
        drafter.rnn_u.bias.fill_(SHIFT)
        # [h ; s]: of h, which is the root's past, it makes nothing.
        drafter.vocabulary_layer.weight.copy_(torch.cat([torch.zeros_like(last), last], dim=1))
    save_drafter(drafter, folder)
