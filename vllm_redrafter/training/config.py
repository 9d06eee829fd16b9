"""How to train a drafter: one validated dataclass."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

from vllm_redrafter.errors import ConfigError
from vllm_redrafter.training.choices import (
    Initialisation,
    LossKind,
    Precision,
    TargetDtype,
    TeacherKind,
)

_AT_LEAST_ONE = (
    "epochs",
    "batch_size",
    "micro_batch_size",
    "unroll_steps",
    "evaluate_every",
    "save_every",
)


@dataclass(frozen=True)
class TrainingConfig:
    """How to train.

    Attributes:
        epochs: passes over the data.
        max_steps: optimizer steps, instead of whole epochs; None for those of `epochs`.
        batch_size: blocks per optimizer step, over all processes.
        micro_batch_size: blocks that one process reads at once.
        block_length: tokens of a block, into which rows are packed; longer rows are cut.
        unroll_steps: L of the loss, the drafted tokens that the drafter is trained for.
        loss: `kl` against the target's distribution, `ce` against its text, or a `mix`.
        kl_weight: of the target's distribution in a mix; the text has the rest.
        step_decay: a row of step j counts step_decay^(j-1); 1 for all alike.
        teacher: `target` computes its distribution again; `data` takes the top tokens that were
            recorded when the text was generated (`generate-data --top-logprobs`).
        learning_rate: the peak, reached after `warmup_steps`; a cosine then takes it to 0.
        warmup_steps: at most the number of steps.
        weight_decay: AdamW's, on matrices only.
        max_grad_norm: gradients are clipped to this norm.
        precision: of matrix products; the drafter's parameters are float32 in any case.
        target_dtype: of the target's parameters; `auto` for its checkpoint's.
        held_out: conversations that are not trained on, for tokens per target step.
        evaluate_every: steps between estimates on them.
        save_every: steps between checkpoints.
        seed: of the initial weights, the order of the text and what is held out.
        exit_dim: width of the draft head; None for the target's hidden size.
        num_draft_layers: residual blocks in the draft head.
        draft_vocab_size: rank only so many of the target's tokens, those that the data has most
            often; None for all.
        init: of the draft head's last layer: the target's own `lm_head`, where it fits, or
            `random`.

    Raises:
        ConfigError: a value is out of range; the message names it.
    """

    epochs: int = 1
    max_steps: int | None = None
    batch_size: int = 16
    micro_batch_size: int = 1
    block_length: int = 2048
    unroll_steps: int = 5
    loss: LossKind = "kl"
    kl_weight: float = 0.5
    step_decay: float = 1.0
    teacher: TeacherKind = "target"
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    precision: Precision = "no"
    target_dtype: TargetDtype = "auto"
    held_out: int = 64
    evaluate_every: int = 200
    save_every: int = 500
    seed: int = 0
    exit_dim: int | None = None
    num_draft_layers: int = 1
    draft_vocab_size: int | None = None
    init: Initialisation = "lm_head"

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("max_steps", "exit_dim", "draft_vocab_size"):
            value = getattr(self, name)
            self._require(name, value is None or value >= 1, "at least 1")
        for name in ("warmup_steps", "held_out", "seed", "num_draft_layers", "weight_decay"):
            self._require(name, getattr(self, name) >= 0, "at least 0")
        for name in ("learning_rate", "max_grad_norm", "step_decay"):
            value = getattr(self, name)
            self._require(name, value > 0 and math.isfinite(value), "a positive number")
        self._require("kl_weight", 0 <= self.kl_weight <= 1, "between 0 and 1")
        shortest = self.unroll_steps + 2
        self._require("block_length", self.block_length >= shortest, f"at least {shortest}")
        kinds = {
            "loss": LossKind,
            "teacher": TeacherKind,
            "precision": Precision,
            "target_dtype": TargetDtype,
            "init": Initialisation,
        }
        for name, kind in kinds.items():
            options = get_args(kind)
            self._require(name, getattr(self, name) in options, f"one of {', '.join(options)}")
        self._require(
            "teacher",
            not (self.teacher == "data" and self.loss == "ce"),
            "left out with --loss ce, which learns from the text alone",
        )
        self._require(
            "batch_size",
            self.batch_size % self.micro_batch_size == 0,
            f"a multiple of micro_batch_size ({self.micro_batch_size})",
        )

    def _require(self, name: str, fits: bool, limit: str) -> None:
        if not fits:
            raise ConfigError(f"training: {name} must be {limit}, got {getattr(self, name)!r}")
