"""The distillation loss: the drafter learns to say what the target will say, L tokens ahead.

Alignment. The target reads x_0 .. x_t and its hidden state h_t predicts x_{t+1}, the root. From
there the drafter goes on by itself, and every position t of a text is such a start:

    s_1 = step(0, e(x_{t+1}))      logits(h_t, s_1) predict x_{t+2}
    s_2 = step(s_1, e(x_{t+2}))    logits(h_t, s_2) predict x_{t+3}
    s_j                            logits(h_t, s_j) predict x_{t+1+j},  j = 1 .. L

The teacher of step j at position t is the target's own distribution of x_{t+1+j}, which it gives
at position t+j. The text is the target's own, so that teacher forcing meets in training the
tokens that will be accepted in use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from vllm_redrafter.config import ConfigError
from vllm_redrafter.drafter import Drafter
from vllm_redrafter.training.target import TargetOutputs

LossKind = Literal["kl", "ce"]


@dataclass(frozen=True)
class DistillationLoss:
    """The loss of one batch.

    Attributes:
        total: scalar, the mean over the L steps; backward starts here.
        per_step: [L], detached; a step that no position counts for has 0.
    """

    total: Tensor
    per_step: Tensor


def unroll(drafter: Drafter, embedded: Tensor, num_steps: int) -> Iterator[Tensor]:
    """The drafter's states, started at every position of a text at once.

    Args:
        drafter: the draft head; advanced by its own `step`.
        embedded: [B, T, H], the target's embedding of x_0 .. x_{T-1}.
        num_steps: L.

    Yields:
        For j = 1 .. L: [B, T-j, H]; row t is s_j of the start at t, which has read x_{t+1} ..
        x_{t+j}.
    """
    state: Tensor | None = None
    for step in range(1, num_steps + 1):
        # A start that would read past the end of the text drops out.
        before = None if state is None else state[:, :-1]
        state = drafter.step(before, embedded[:, step:])
        yield state


def counted_starts(generated: Tensor, num_steps: int) -> Iterator[Tensor]:
    """Which starts count: those whose root, path and label were all written by the target.

    Args:
        generated: [B, T] bool.
        num_steps: L.

    Yields:
        For j = 1 .. L: [B, T-1-j] bool, row t being the start whose label is x_{t+1+j}.
    """
    counted = generated[:, 1:]
    for step in range(1, num_steps + 1):
        counted = counted[:, :-1] & generated[:, step + 1 :]
        yield counted


def distillation_loss(
    drafter: Drafter,
    tokens: Tensor,
    target: TargetOutputs,
    num_steps: int,
    generated: Tensor | None = None,
    kind: LossKind = "kl",
) -> DistillationLoss:
    """Loss of an L-step unroll from every position.

    Args:
        drafter: the draft head; gradients reach its parameters only.
        tokens: [B, T] int64.
        target: the frozen target's outputs for these tokens.
        num_steps: L, the beam length to train for.
        generated: [B, T] bool, what the target wrote; None counts every token.
        kind: `kl`, against the target's distribution; `ce`, against the text alone.

    Raises:
        ConfigError: the text is too short for L steps.
    """
    length = tokens.shape[1]
    if length < num_steps + 2:
        raise ConfigError(
            f"distillation: {num_steps} steps need blocks of at least {num_steps + 2} tokens, "
            f"got {length}; use longer blocks or a smaller beam length"
        )
    if generated is None:
        generated = torch.ones_like(tokens, dtype=torch.bool)

    losses = []
    states = unroll(drafter, target.embedded, num_steps)
    counts = counted_starts(generated, num_steps)
    for step, (state, counted) in enumerate(zip(states, counts, strict=True), start=1):
        # Rows are picked before the vocabulary-wide layer, which costs the most.
        hidden = target.hidden[:, : -1 - step][counted]
        logits = drafter.logits(drafter.condition(hidden), state[:, :-1][counted])
        if kind == "kl":
            losses.append(kl_divergence(logits, target.logits[:, step:-1][counted]))
        else:
            losses.append(cross_entropy(logits, tokens[:, step + 1 :][counted]))
    per_step = torch.stack(losses)
    return DistillationLoss(per_step.mean(), per_step.detach())


def kl_divergence(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """KL(teacher || drafter), [N, V] each, averaged over the N rows; 0 without rows."""
    total = F.kl_div(
        _log_softmax(logits), _log_softmax(teacher_logits), reduction="sum", log_target=True
    )
    return total / max(logits.shape[0], 1)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of logits [N, V] and labels [N], averaged over the N rows; 0 without rows."""
    total = F.nll_loss(_log_softmax(logits), labels, reduction="sum")
    return total / max(logits.shape[0], 1)


def _log_softmax(logits: Tensor) -> Tensor:
    # Reduced precision is for the matrix products only.
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)
