"""What a drafter is trained to: a loss with its settings, and what is taught."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_redrafter.training.choices import LossKind
from vllm_redrafter.training.losses import (
    BlendedOverlap,
    BlendedTopMass,
    Reach,
    RowLoss,
    kullback_leibler,
    log_overlap,
)

KL_DECAY = 3.0
"""That of arXiv 2602.23881 (eta)."""
TEMPERATURE = 0.5
"""At 1 the many tokens that are all but impossible make up much of the k best."""


@dataclass(frozen=True)
class Objective:
    """Which loss, and how it is set: `--loss` and what belongs to it.

    Attributes:
        kind: the loss.
        target_share: of the target's distribution in what is taught; the text has the rest.
        kl_decay: how soon KL gives way in `lk` and `acceptance`; with 0 it never does.
        top: [L], how many of the drafter's best tokens count at each step; for `acceptance`.
        temperature: how wide the boundary of these is, in logits; for `acceptance`.
    """

    kind: LossKind = "kl"
    target_share: float = 1.0
    kl_decay: float = KL_DECAY
    top: tuple[int, ...] = ()
    temperature: float = TEMPERATURE

    def begin(self, num_positions: int, device: torch.device) -> RowLoss:
        """The loss of one batch.

        Args:
            num_positions: its starts are below this.
            device: where its rows are.
        """
        if self.kind == "lk":
            return BlendedOverlap(self.kl_decay)
        if self.kind == "lk-alpha":
            return log_overlap
        if self.kind == "acceptance":
            top = torch.tensor(self.top, device=device)
            reach = Reach(num_positions, len(self.top), device)
            return BlendedTopMass(self.kl_decay, top, self.temperature, reach)
        return kullback_leibler
