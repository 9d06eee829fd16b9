# SPDX-License-Identifier: Apache-2.0
"""What the drafter is taught: per row, a distribution over the tokens that the drafter ranks.

With a reduced draft vocabulary it is *restricted* to it, not renormalised: the less of it the
draft vocabulary covers, the less a row counts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from vllm_redrafter.heads.head import DraftHead

Rows: TypeAlias = slice | Tensor
"""Which of the N rows: a slice, or their indices [n] int64."""
Teacher: TypeAlias = Callable[[Rows], Tensor]
"""From n rows to [n, draft tokens], in the precision in which the loss is computed."""


@dataclass(frozen=True)
class MixedTeacher:
    """A mean of the target's distribution and the text's token.

    Up to L rows, of different starts, have the same position; where they follow each other the
    target's distribution is computed once.

    Attributes:
        head: the target's vocabulary-wide layer; None where the text alone is taught.
        hidden: [positions, H], what the target's layer reads.
        labels: [N] int64, the text's token of each row.
        position: [N] int64, where the target predicts it.
        share: of the target's distribution.
    """

    drafter: DraftHead
    head: Callable[[Tensor], Tensor] | None
    hidden: Tensor
    labels: Tensor
    position: Tensor
    share: float
    dtype: torch.dtype

    def __call__(self, rows: Rows) -> Tensor:
        if self.share == 0:
            return self._text(rows)
        target = self._target(rows)
        return target if self.share == 1 else torch.lerp(self._text(rows), target, self.share)

    def _ranked(self) -> Tensor:
        """[draft tokens] int64: the target's ids of the tokens that the drafter ranks."""
        tokens = torch.arange(self.drafter.config.num_ranked_tokens, device=self.labels.device)
        return self.drafter.target_tokens(tokens)

    def _text(self, rows: Rows) -> Tensor:
        return (self.labels[rows].unsqueeze(1) == self._ranked()).to(self.dtype)

    def _target(self, rows: Rows) -> Tensor:
        assert self.head is not None
        position, row = torch.unique_consecutive(self.position[rows], return_inverse=True)
        probs = self.head(self.hidden[position]).to(self.dtype).softmax(dim=-1)
        if self.drafter.config.draft_vocab_size is not None:
            # Before the rows are repeated: columns are gathered one number at a time.
            probs = probs.index_select(1, self._ranked())
        return probs.index_select(0, row)
