# SPDX-License-Identifier: Apache-2.0
"""The training loop: accelerate's devices, AdamW, warm-up and cosine decay, checkpoints.

A step's text and learning rate depend on its number alone: a resumed run takes the same steps as
one that was never stopped.
"""

import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from vllm_redrafter.data.rows import TextRows
from vllm_redrafter.heads.head import DraftHead
from vllm_redrafter.replay.batches import TextBatch
from vllm_redrafter.replay.estimate import Acceptance, estimate_acceptance
from vllm_redrafter.replay.target import TargetHead, read_target
from vllm_redrafter.training.checkpointing import Checkpoints, RunProgress
from vllm_redrafter.training.distillation import Distillation, count_rows
from vllm_redrafter.training.plan import LoopPlan
from vllm_redrafter.utils.errors import ConfigError, TrainingError
from vllm_redrafter.utils.progress import progress_bar

MAX_GRADIENT_NORM = 1.0
"""A larger gradient is scaled down to it."""


@dataclass(frozen=True)
class TrainingResult:
    """What a training run reached.

    Attributes:
        steps: optimizer steps, those before a resume included.
        loss: smoothed, at the end.
        losses: of each step of this run.
        acceptance: on the held-out text; without steps where none was held out.
    """

    steps: int
    loss: float
    losses: list[float]
    acceptance: Acceptance
    seconds: float


class Trainer:
    """Trains a drafter of float32 parameters in place; `target` is a frozen transformers model.

    Tokens per target step are estimated on `held_out`; `record` is for the checkpoints.
    ConfigError for a target whose distribution cannot be taught.
    """

    def __init__(
        self,
        drafter: DraftHead,
        target: Any,
        rows: TextRows,
        held_out: TextRows,
        plan: LoopPlan,
        accelerator: Accelerator,
        checkpoints: Checkpoints | None = None,
        record: dict[str, Any] | None = None,
        console: Console | None = None,
    ) -> None:
        self.target, self.rows, self.held_out = target, rows, held_out
        self.plan, self.config = plan, plan.config
        self.accelerator, self.console = accelerator, console
        self.checkpoints, self.record = checkpoints, record or {}
        self.drafter = drafter.to(accelerator.device)
        share, num_steps = self.config.kl_weight, self.config.unroll_steps
        head = TargetHead(target) if share > 0 else None
        model = Distillation(self.drafter, head, num_steps, share, plan.trains_selector)
        self.model = accelerator.prepare(model)
        self.optimizer = accelerator.prepare(_adamw(self.drafter))
        counted = torch.ones(num_steps, dtype=torch.float64)
        if plan.trains_selector:
            counted[0] = 0.0  # The first level is ranked without a selector.
        self.step_shares = counted / counted.sum()

    def run(self, resume: bool = False) -> TrainingResult:
        """Train to the end, with `resume` from the newest checkpoint.

        TrainingError: the loss is not a number any more, or a checkpoint cannot be written.
        ConfigError: the checkpoint is damaged.
        """
        started, config, total = time.monotonic(), self.config, self.plan.num_steps
        first, loss = self._start(resume)
        losses: list[float] = []
        acceptance = Acceptance(0, 0)
        steps = self.plan.batches.steps(first)
        self.drafter.train()
        with progress_bar(self.console, disable=not self.accelerator.is_main_process) as bar:
            task = bar.add_task("training the drafter", total=total, completed=first, status="")
            for step in range(first + 1, total + 1):
                value = self._step(step, next(steps), loss)
                losses.append(value)
                loss = value if math.isnan(loss) else 0.95 * loss + 0.05 * value
                last = step == total
                if len(self.held_out) and (last or step % config.evaluate_every == 0):
                    bar.update(task, completed=step, status="estimating tokens per target step")
                    acceptance = self._estimate(step)
                if self.checkpoints and (last or step % config.save_every == 0):
                    self._save(step, loss)
                status = f"loss {loss:.3f}"
                if acceptance.steps:
                    status += f", {acceptance.tokens_per_step:.2f} tokens per target step"
                bar.update(task, completed=step, status=status)
        if first == total and len(self.held_out):  # resumed to write the result alone
            acceptance = self._estimate(total)
        self.drafter.eval()
        return TrainingResult(total, loss, losses, acceptance, time.monotonic() - started)

    def dry_run(self) -> float:
        """Seconds that one step takes without the optimizer; the weights stay as they are."""
        started = time.monotonic()
        self.drafter.train()
        self._backward(next(self.plan.batches.steps()))
        self.optimizer.zero_grad()
        self.drafter.eval()
        return time.monotonic() - started

    def close(self) -> None:
        """Let go of the processes' group, before it ends."""
        # The frames of an exception may refer to DDP's module for longer. Its reducer would then
        # free a gloo group and hold the GIL meanwhile, for which the group's thread may wait.
        for module in self.model.modules():
            if isinstance(module, DistributedDataParallel):
                for name in ("logger", "reducer", "process_group"):
                    vars(module).pop(name, None)

    def _start(self, resume: bool) -> tuple[int, float]:
        """Steps already done, and the smoothed loss."""
        if not resume:
            return 0, math.nan
        assert self.checkpoints is not None
        # The wrapped optimizer's state is what was saved.
        progress = self.checkpoints.load(self.drafter, self.optimizer.optimizer)
        return progress.step, progress.loss

    def _step(self, step: int, blocks: list[list[int]], smoothed: float) -> float:
        """One optimizer step; returns the loss over all processes."""
        loss, per_step = self._backward(blocks)
        norm = float(self.accelerator.clip_grad_norm_(self.drafter.parameters(), MAX_GRADIENT_NORM))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._stop(step, loss, norm, smoothed)
        factor = warmup_cosine(step - 1, self.config.warmup_steps, self.plan.num_steps)
        rate = self.config.learning_rate * factor
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        logged = {"loss": loss, "learning_rate": rate, "gradient_norm": norm}
        logged |= {f"loss/step_{j}": value for j, value in enumerate(per_step.tolist(), start=1)}
        self.accelerator.log(logged, step)
        return loss

    def _backward(self, blocks: list[list[int]]) -> tuple[float, Tensor]:
        """Gradients of one optimizer step's blocks; its loss, and [L] that of each step."""
        accelerator, num_steps = self.accelerator, self.config.unroll_steps
        batches = list(self._own_batches(blocks))
        counts = torch.stack([count_rows(b.generated, num_steps) for b in batches]).sum(dim=0)
        counts = accelerator.reduce(counts.to(accelerator.device), "sum").clamp(min=1)
        row_weights = (self.step_shares.to(counts.device) / counts).float()
        sums = torch.zeros(num_steps, device=accelerator.device)
        for index, batch in enumerate(batches):
            on_device = batch.to(accelerator.device)
            with accelerator.autocast():
                outputs = read_target(self.target, on_device, self.drafter.config.target_layers)
            last = index == len(batches) - 1
            with nullcontext() if last else accelerator.no_sync(self.model):
                with accelerator.autocast():
                    loss = self.model(on_device, outputs, row_weights)
                # Data parallelism takes the mean over the processes; the loss is their sum.
                accelerator.backward(loss.total * accelerator.num_processes)
            sums += loss.per_step
        sums = accelerator.reduce(sums, "sum")
        return float((sums * row_weights).sum()), sums / counts

    def _own_batches(self, blocks: list[list[int]]) -> Iterator[TextBatch]:
        """This process's part of a step's blocks, as many batches as any other process has."""
        size, accelerator = self.config.micro_batch_size, self.accelerator
        own = blocks[accelerator.process_index :: accelerator.num_processes]
        if len(blocks) % accelerator.num_processes:
            raise ConfigError(
                f"training: the data has only {len(blocks)} blocks, no whole number for each of "
                f"{accelerator.num_processes} processes: use more data or shorter blocks"
            )
        for start in range(0, len(own), size):
            rows = [[self.rows[row] for row in block] for block in own[start : start + size]]
            yield TextBatch.of(rows, self.config.unroll_steps + 2)

    def _estimate(self, step: int) -> Acceptance:
        acceptance = Acceptance(0, 0)
        if self.accelerator.is_main_process:
            self.drafter.eval()
            acceptance = estimate_acceptance(
                self.drafter, self.target, self.held_out, self.plan.shape, batch_size=8
            )
            self.drafter.train()
            self.accelerator.log({"tokens_per_target_step": acceptance.tokens_per_step}, step)
        self.accelerator.wait_for_everyone()
        return acceptance

    def _save(self, step: int, loss: float) -> None:
        assert self.checkpoints is not None
        if self.accelerator.is_main_process:
            state = self.optimizer.optimizer.state_dict()
            self.checkpoints.save(self.drafter, state, RunProgress(step, loss, self.record))
        self.accelerator.wait_for_everyone()

    def _stop(self, step: int, loss: float, norm: float, smoothed: float) -> None:
        # The weights are those of the step before.
        left = "nothing was saved"
        if self.checkpoints:
            if step > 1:
                self._save(step - 1, smoothed)
            if paths := self.checkpoints.paths():
                left = f"{paths[-1]} has the weights before it"
        raise TrainingError(
            f"step {step}: the loss is {loss} and its gradient's norm {norm}; {left}: go on from "
            "there with a lower --learning-rate and another --output, or look for bad data"
        )


def _adamw(drafter: DraftHead) -> torch.optim.AdamW:
    """AdamW without weight decay; each step sets the learning rate."""
    learned = [p for p in drafter.parameters() if p.requires_grad]
    # Fused: otherwise an update makes temporary tensors of the size of all parameters.
    return torch.optim.AdamW(learned, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def warmup_cosine(step: int, warmup_steps: int, num_steps: int) -> float:
    """Factor on the peak learning rate: up to 1 in `warmup_steps`, then a cosine down to 0."""
    warmup_steps = min(warmup_steps, num_steps)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(num_steps - warmup_steps, 1)
    return 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))
