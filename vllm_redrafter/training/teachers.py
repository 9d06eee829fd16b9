# SPDX-License-Identifier: Apache-2.0
"""What the drafter is taught: per row, a distribution over the tokens that the drafter ranks.

A teacher gives t [n, draft tokens] for some rows, and the loss is KL(t || q) with q the drafter's
distribution. With a reduced draft vocabulary t is the target's distribution *restricted* to it,
not renormalised: the less of it the draft vocabulary covers, the less a row counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from vllm_redrafter.heads.head import DraftHead

Rows: TypeAlias = slice | Tensor
"""Which of the N rows: a slice, or their indices [n] int64."""


class Teacher(Protocol):
    def __call__(self, rows: Rows) -> Tensor:
        """[n, draft tokens], in the precision in which the loss is computed."""
        ...


class DraftVocabulary:
    """Which of the target's tokens the drafter ranks.

    Attributes:
        kept: [draft tokens] int64, the target's id of each; None where it ranks them all.
        index: [V] int64, the reverse; -1 for a token that it does not rank.
    """

    def __init__(self, drafter: DraftHead) -> None:
        config, device = drafter.config, drafter.vocabulary_layers[0].weight.device
        self.size = config.num_ranked_tokens
        ranked = torch.arange(self.size, device=device)
        self.kept: Tensor | None = None
        self.index = torch.arange(config.vocab_size, device=device)
        if config.draft_vocab_size is not None:
            self.kept = drafter.target_tokens(ranked)
            self.index = torch.full_like(self.index, -1).index_copy_(0, self.kept, ranked)

    def scatter(self, tokens: Tensor, values: Tensor) -> Tensor:
        """[n, draft tokens] with values [n, k] at the target's tokens [n, k]; -1 is no token."""
        index = self.index[tokens.clamp(min=0)].masked_fill(tokens < 0, -1)
        out = values.new_zeros(tokens.shape[0], self.size)
        return out.scatter_add_(1, index.clamp(min=0), values.masked_fill(index < 0, 0.0))


@dataclass(frozen=True)
class TextTeacher:
    """The text itself: the token that follows has probability 1 (cross-entropy)."""

    vocabulary: DraftVocabulary
    labels: Tensor
    dtype: torch.dtype

    def __call__(self, rows: Rows) -> Tensor:
        labels = self.labels[rows].unsqueeze(1)
        return self.vocabulary.scatter(labels, torch.ones_like(labels, dtype=self.dtype))


@dataclass(frozen=True)
class TargetTeacher:
    """The target's full distribution, from its hidden states.

    Up to L rows, of different starts, have the same teacher; where they follow each other it is
    computed once.

    Attributes:
        vocabulary: what the drafter ranks.
        head: the target's vocabulary-wide layer.
        hidden: [positions, H].
        position: [N] int64, that of each row.
        dtype: of the softmax.
    """

    vocabulary: DraftVocabulary
    head: Callable[[Tensor], Tensor]
    hidden: Tensor
    position: Tensor
    dtype: torch.dtype

    def __call__(self, rows: Rows) -> Tensor:
        position, row = torch.unique_consecutive(self.position[rows], return_inverse=True)
        probs = F.softmax(self.head(self.hidden[position]).to(self.dtype), dim=-1)
        if self.vocabulary.kept is not None:
            # Before the rows are repeated: columns are gathered one number at a time.
            probs = probs.index_select(1, self.vocabulary.kept)
        return probs.index_select(0, row)


@dataclass(frozen=True)
class MixedTeacher:
    """A mean of two teachers; the first has this weight, the second the rest."""

    first: Teacher
    second: Teacher
    weight: float

    def __call__(self, rows: Rows) -> Tensor:
        return torch.lerp(self.second(rows), self.first(rows), self.weight)


@dataclass(frozen=True)
class ChosenRows:
    """A teacher of some rows alone: its rows are the `chosen` [n] int64 of the other's."""

    teacher: Teacher
    chosen: Tensor

    def __call__(self, rows: Rows) -> Tensor:
        return self.teacher(self.chosen[rows])
