"""The target's own answers: what the drafter learns from, and what the demo asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import DynamicCache

from vllm_redrafter.training.trainer import progress_bar

CLEAR_EVERY = 8
"""Steps between clearing ended answers out of the batch: each time copies the KV cache."""


def write_answers(
    target: Any,
    prompts: Sequence[Sequence[int]],
    eos: int,
    max_tokens: int,
    batch_size: int,
    console: Console,
) -> list[list[int]]:
    """Decode greedily with transformers, many prompts at once.

    Returns:
        One answer per prompt, EOS included where the target ended by itself.
    """
    answers: list[list[int]] = [[] for _ in prompts]
    # Prompts of about the same length go together: padding is computed too.
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    with progress_bar(console) as progress:
        task = progress.add_task("the target writes its answers", total=len(prompts), status="")
        for start in range(0, len(prompts), batch_size):
            rows = by_length[start : start + batch_size]
            for row, answer in zip(
                rows, _decode(target, [prompts[i] for i in rows], eos, max_tokens), strict=True
            ):
                answers[row] = answer
            progress.update(task, advance=len(rows))
    return answers


@torch.inference_mode()
def _decode(
    target: Any, prompts: Sequence[Sequence[int]], eos: int, max_tokens: int
) -> list[list[int]]:
    """As `target.generate` would, but answers that have ended leave the batch."""
    tokens, mask = _left_padded(prompts, eos)
    cache = DynamicCache(config=target.config)
    answers: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))
    for step in range(max_tokens):
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        logits = target(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            logits_to_keep=1,
        ).logits
        tokens = logits[:, -1].argmax(dim=1, keepdim=True)
        mask = torch.cat([mask, torch.ones_like(tokens)], dim=1)
        for row, token in zip(rows, tokens.flatten().tolist(), strict=True):
            if eos not in answers[row][-1:]:
                answers[row].append(token)
        running = [i for i, row in enumerate(rows) if answers[row][-1] != eos]
        if not running:
            break
        if step % CLEAR_EVERY == CLEAR_EVERY - 1 and len(running) < len(rows):
            kept = torch.tensor(running)
            cache.batch_select_indices(kept)
            tokens, mask, rows = tokens[kept], mask[kept], [rows[i] for i in running]
    return answers


def _left_padded(prompts: Sequence[Sequence[int]], padding: int) -> tuple[Tensor, Tensor]:
    """Tokens and attention mask, [B, longest]."""
    longest = max(map(len, prompts))
    tokens = [[padding] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(tokens), torch.tensor(mask)


def repeated_share(answers: Sequence[Sequence[int]], length: int = 8) -> float:
    """The share of n-grams that occurred earlier in the same answer: how much it loops."""
    total = distinct = 0
    for answer in answers:
        grams = [tuple(answer[i : i + length]) for i in range(len(answer) - length + 1)]
        total, distinct = total + len(grams), distinct + len(set(grams))
    return 1 - distinct / total if total else 0.0
