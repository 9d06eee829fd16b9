"""The target's own answers: what the drafter learns from, and what the demo asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console

from vllm_redrafter.training.trainer import progress_bar


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
    longest = max(map(len, prompts))
    padded = [[eos] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    real = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    output = target.generate(
        torch.tensor(padded),
        attention_mask=torch.tensor(real),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=eos,
    )
    return [up_to(answer, eos) for answer in output[:, longest:].tolist()]


def up_to(tokens: list[int], eos: int) -> list[int]:
    """The tokens up to the first EOS, which is kept."""
    return tokens[: tokens.index(eos) + 1] if eos in tokens else tokens


def repeated_share(answers: Sequence[Sequence[int]], length: int = 8) -> float:
    """The share of n-grams that occurred earlier in the same answer: how much it loops."""
    total = distinct = 0
    for answer in answers:
        grams = [tuple(answer[i : i + length]) for i in range(len(answer) - length + 1)]
        total, distinct = total + len(grams), distinct + len(set(grams))
    return 1 - distinct / total if total else 0.0
