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
from vllm_redrafter.training.training_config import TrainingConfig
from vllm_redrafter.utils.errors import ConfigError

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


def objective_of(config: TrainingConfig, beam_width: int, num_tokens: int) -> Objective:
    """The objective that the settings ask for.

    Args:
        config: the settings.
        beam_width: W, the default of `acceptance_k`.
        num_tokens: how many tokens the drafter ranks.

    Raises:
        ConfigError: all tokens would be among the best.
    """
    target_share = {"kl": 1.0, "ce": 0.0, "mix": config.kl_weight}.get(config.loss)
    if target_share is None:
        target_share = 1.0 - (config.text_share or 0.0)
    if config.loss != "acceptance":
        top: tuple[int, ...] = ()
    elif max(top := config.best_by_step(beam_width)) >= num_tokens:
        raise ConfigError(
            f"training: acceptance_k {max(top)} must be below the {num_tokens} tokens that the "
            "drafter ranks: give a smaller --acceptance-k, or rank more tokens"
        )
    return Objective(
        config.loss,
        target_share,
        KL_DECAY if config.kl_decay is None else config.kl_decay,
        top,
        config.acceptance_temperature or TEMPERATURE,
    )
