# SPDX-License-Identifier: Apache-2.0
"""The draft head's vocabulary-wide layer, its rows divided among the ranks of tensor parallelism.

A draft reads that layer once per level: P ranks read 1/P of it each, and exchange a few kilobytes.
Draft logits are normalised over their top 50, so each rank's best 50 are all that others need. The
exchange also makes all ranks choose the same nodes, whatever the last bits of their hidden states:
trees that differ would send different rows through one target.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vllm_redrafter.config import TOP_TOKENS
from vllm_redrafter.heads.head import DraftHead


@dataclass(frozen=True)
class VocabularyShard:
    """One rank's part of the draft vocabulary, equal but for the last ones'.

    Attributes:
        tokens: how many tokens the draft vocabulary has.
        rank, ranks: this process's, and how many share the layer.
        gather: [..., n] on each rank -> [..., ranks * n] on all, in the order of ranks.
    """

    tokens: int
    rank: int
    ranks: int
    gather: Callable[[Tensor], Tensor]

    @property
    def most_rows(self) -> int:
        """Draft tokens of every rank but the last ones."""
        return -(-self.tokens // self.ranks)

    @property
    def rows(self) -> slice:
        """The draft tokens that this rank has the rows of."""
        first = min(self.rank * self.most_rows, self.tokens)
        return slice(first, min(first + self.most_rows, self.tokens))

    def cut(self, drafter: DraftHead) -> None:
        """Leave this rank's rows of the vocabulary-wide layers; everything else stays whole."""
        for layer in {drafter.layer_of(d) for d in range(drafter.config.max_beam_length or 1)}:
            layer.weight = torch.nn.Parameter(layer.weight.detach()[self.rows].clone())
            layer.out_features = layer.weight.shape[0]

    def top(self, logits: Tensor, candidates: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The best 50 of the whole vocabulary, or all where it is smaller.

        Args:
            logits: [..., rows], of this rank's tokens.
            candidates: [..., rows] int64, those that the logits are of; None for all in order.

        Returns:
            (logits [..., 50] float32 in descending order, draft tokens [..., 50] int64), the same
            on all ranks.
        """
        gathered = self.gather(self._best_here(logits, candidates))
        pairs = gathered.reshape(*logits.shape[:-1], self.ranks, 2, -1)
        values = pairs[..., 0, :].flatten(-2)
        tokens = pairs[..., 1, :].flatten(-2).view(torch.int32)
        best, index = values.topk(min(TOP_TOKENS, self.tokens), dim=-1)
        return best, tokens.gather(-1, index).long()

    def _best_here(self, logits: Tensor, candidates: Tensor | None = None) -> Tensor:
        """What this rank sends: [..., 2 n] float32, n logits, then n tokens' bits.

        In floats, since not every communicator takes integers.
        """
        most = min(TOP_TOKENS, self.most_rows)
        here = min(most, logits.shape[-1])
        values, index = logits.topk(here, dim=-1)
        if candidates is not None:
            index = candidates.expand_as(logits).gather(-1, index)
        missing = most - here
        values = F.pad(values.float(), (0, missing), value=-torch.inf)
        tokens = F.pad((index + self.rows.start).int(), (0, missing))
        return torch.cat([values, tokens.view(torch.float32)], dim=-1)
