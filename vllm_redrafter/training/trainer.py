"""The training loop: AdamW, warm-up and cosine decay, clipping, and a progress bar that tells
what matters, the tokens per target step that the drafter would give."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn

from vllm_redrafter.config import ConfigError, DrafterConfig, ReDrafterConfig
from vllm_redrafter.drafter import Drafter
from vllm_redrafter.training.data import TokenBlocks
from vllm_redrafter.training.distillation import LossKind, distillation_loss
from vllm_redrafter.training.estimate import estimate_acceptance
from vllm_redrafter.training.target import read_target


@dataclass(frozen=True)
class TrainingConfig:
    """How to train.

    Attributes:
        num_steps: optimizer steps.
        batch_size: blocks per step.
        unroll_steps: L of the loss, the drafted tokens that the drafter is trained for.
        loss: `kl` against the target's distribution, or `ce` against its text.
        learning_rate: the peak, reached after `warmup_steps`; a cosine then takes it to 0.
        weight_decay: AdamW's, on matrices only.
        max_grad_norm: gradients are clipped to this norm.
        evaluate_every: steps between estimates on the held-out blocks.
        seed: of the order of the blocks.
        autocast: dtype of matrix products, or None for that of the parameters.

    Raises:
        ConfigError: a count is below 1.
    """

    num_steps: int
    batch_size: int = 16
    unroll_steps: int = 5
    loss: LossKind = "kl"
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    evaluate_every: int = 100
    seed: int = 0
    autocast: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("num_steps", "batch_size", "unroll_steps", "evaluate_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"training: {name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class TrainingResult:
    """What a training run reached: smoothed loss, tokens per target step on held-out text."""

    loss: float
    tokens_per_step: float


def new_drafter(target: Any, exit_dim: int, num_draft_layers: int = 1, seed: int = 0) -> Drafter:
    """A drafter of the target's sizes; its last layer starts as the target's own, where it fits.

    Args:
        target: a transformers causal language model.
        exit_dim: width of the draft head; with the target's hidden size the target's lm_head is
            copied, which saves most of the training.
        num_draft_layers: residual blocks before the last layer.
        seed: of the initial weights.
    """
    config = DrafterConfig(
        vocab_size=target.config.get_text_config().vocab_size,
        hidden_size=target.config.get_text_config().hidden_size,
        exit_dim=exit_dim,
        num_draft_layers=num_draft_layers,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        drafter = Drafter(config)
    last = drafter.lm_head[-1]
    lm_head = target.get_output_embeddings()
    if (
        isinstance(last, nn.Linear)
        and lm_head is not None
        and lm_head.weight.shape == last.weight.shape
    ):
        last.weight.data.copy_(lm_head.weight)
    return drafter


def train_drafter(
    drafter: Drafter,
    target: Any,
    blocks: TokenBlocks,
    held_out: TokenBlocks,
    config: TrainingConfig,
    speculation: ReDrafterConfig,
    console: Console | None = None,
) -> TrainingResult:
    """Train the drafter in place.

    Args:
        drafter: changed in place, left in eval mode.
        target: the frozen transformers model that wrote the blocks.
        blocks: to learn from.
        held_out: to estimate tokens per target step on.
        config: how to train.
        speculation: beam width, length and K of that estimate.
        console: where the progress bar goes.
    """
    optimizer = adamw(drafter, config)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warmup_cosine(step, config.warmup_steps, config.num_steps)
    )
    generator = torch.Generator().manual_seed(config.seed)
    batches = blocks.shuffled_batches(config.batch_size, generator)
    loss, tokens_per_step = math.nan, math.nan
    drafter.train()
    with progress_bar(console) as progress:
        task = progress.add_task("training the drafter", total=config.num_steps, status="")
        for step in range(1, config.num_steps + 1):
            value = _train_step(drafter, target, next(batches), config, optimizer)
            schedule.step()
            loss = value if math.isnan(loss) else 0.95 * loss + 0.05 * value
            if step % config.evaluate_every == 0 or step == config.num_steps:
                estimate = estimate_acceptance(drafter, target, held_out, speculation)
                tokens_per_step = estimate.tokens_per_step
            status = f"{config.loss} {loss:.3f}, {tokens_per_step:.2f} tokens per target step"
            progress.update(task, advance=1, status=status)
    drafter.eval()
    return TrainingResult(loss, tokens_per_step)


def _train_step(
    drafter: Drafter,
    target: Any,
    batch: TokenBlocks,
    config: TrainingConfig,
    optimizer: torch.optim.Optimizer,
) -> float:
    """One optimizer step; returns the batch's loss."""
    device = batch.tokens.device.type
    with torch.autocast(device, config.autocast, enabled=config.autocast is not None):
        outputs = read_target(target, batch.tokens, with_logits=config.loss == "kl")
        loss = distillation_loss(
            drafter, batch.tokens, outputs, config.unroll_steps, batch.generated, config.loss
        )
    torch.autograd.backward(loss.total)
    nn.utils.clip_grad_norm_(drafter.parameters(), config.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.total.detach())


def adamw(drafter: Drafter, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW; biases are not decayed."""
    matrices = [p for p in drafter.parameters() if p.ndim > 1]
    biases = [p for p in drafter.parameters() if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": biases, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95))


def warmup_cosine(step: int, warmup_steps: int, num_steps: int) -> float:
    """Factor on the peak learning rate: up to 1 in `warmup_steps`, then a cosine down to 0."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(num_steps - warmup_steps, 1)
    return 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))


def progress_bar(console: Console | None = None) -> Progress:
    """A progress bar whose tasks have a `status` field."""
    return Progress(
        TextColumn("{task.description:<32}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[status]}"),
        console=console,
    )
