"""The training loop: accelerate for the devices, AdamW, warm-up and cosine decay, checkpoints, and
a progress bar that shows the tokens per target step that the drafter would give.

Which text a step reads and its learning rate depend on the number of the step alone. A run that is
resumed therefore takes the same steps as one that was never stopped.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from rich.console import Console
from torch import Tensor
from torch.distributed.tensor import DTensor

from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.data.rows import TextRows
from vllm_redrafter.heads.head import DraftHead
from vllm_redrafter.training.batches import BatchPlan, TextBatch
from vllm_redrafter.training.checkpointing import Checkpoints, RunProgress
from vllm_redrafter.training.distillation import Distillation, count_rows
from vllm_redrafter.training.estimate import Acceptance, estimate_acceptance
from vllm_redrafter.training.objective import objective_of
from vllm_redrafter.training.parallel import Parallel, Replicas, Shards
from vllm_redrafter.training.target import TargetHead, read_target
from vllm_redrafter.training.training_config import TrainingConfig
from vllm_redrafter.utils.errors import ConfigError, TrainingError
from vllm_redrafter.utils.progress import progress_bar

PLUGINS = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
}
"""By the variable that `accelerate launch` sets."""


@dataclass(frozen=True)
class TrainingResult:
    """What a training run reached.

    Attributes:
        steps: optimizer steps, those before a resume included.
        loss: smoothed, at the end.
        losses: of each step of this run.
        acceptance: on the held-out text; nothing where none was held out.
        seconds: of this run.
    """

    steps: int
    loss: float
    losses: list[float]
    acceptance: Acceptance
    seconds: float


class Trainer:
    """Trains a drafter in place.

    Args:
        drafter: float32 parameters.
        target: the frozen transformers model that wrote the text.
        rows: to learn from.
        held_out: to estimate tokens per target step on.
        config: how to train.
        speculation: beam width, length and K of that estimate.
        accelerator: the processes and their devices.
        output: takes checkpoints and TensorBoard's logs; None for neither.
        record: what the run is about; a checkpoint made for something else is refused.
        console: where the progress bar goes.

    Raises:
        ConfigError: settings that do not fit the number of processes, the target or the text.
    """

    def __init__(
        self,
        drafter: DraftHead,
        target: Any,
        rows: TextRows,
        held_out: TextRows,
        config: TrainingConfig,
        speculation: ReDrafterConfig,
        accelerator: Accelerator,
        output: Path | None = None,
        record: dict[str, Any] | None = None,
        console: Console | None = None,
    ) -> None:
        self.target, self.rows, self.held_out = target, rows, held_out
        self.config, self.speculation, self.accelerator = config, speculation, accelerator
        self.console, self.record = console, record or {}
        self.checkpoints = None if output is None else Checkpoints(output)
        shared = config.micro_batch_size * accelerator.num_processes
        if config.batch_size % shared:
            raise ConfigError(
                f"training: batch_size {config.batch_size} must be a multiple of micro_batch_size "
                f"× processes ({config.micro_batch_size} × {accelerator.num_processes})"
            )
        self.plan = BatchPlan(rows.lengths, config.block_length, config.batch_size, config.seed)
        self.num_steps = config.max_steps or self.plan.num_steps(config.epochs)
        self.drafter = drafter.to(accelerator.device)
        use_data = config.teacher == "data"
        tokens = self.drafter.config.num_ranked_tokens
        objective = objective_of(config, speculation.beam_width, tokens)
        head = TargetHead(target) if objective.target_share > 0 and not use_data else None
        model = Distillation(self.drafter, head, config.unroll_steps, objective, use_data)
        hold = Shards if config.shard_optimizer else Replicas
        self.parallel: Parallel = hold(model, accelerator)
        # Of the parameters that this process holds.
        self.optimizer = accelerator.prepare(adamw(self.drafter, config))
        decay = config.step_decay ** torch.arange(config.unroll_steps, dtype=torch.float64)
        self.step_shares = decay / decay.sum()

    def run(self, resume: bool = False) -> TrainingResult:
        """Train to the end.

        Args:
            resume: go on from the newest checkpoint.

        Raises:
            TrainingError: the loss is not a number any more, or a checkpoint cannot be written.
            ConfigError: there is nothing to resume, or it was made otherwise.
        """
        started = time.monotonic()
        first, loss = self._start(resume)
        losses: list[float] = []
        acceptance = Acceptance(0, 0)
        steps = self.plan.steps(first)
        self.drafter.train()
        with progress_bar(self.console, disable=not self.accelerator.is_main_process) as bar:
            task = bar.add_task(
                "training the drafter", total=self.num_steps, completed=first, status=""
            )
            for step in range(first + 1, self.num_steps + 1):
                value = self._step(step, next(steps), loss)
                losses.append(value)
                loss = value if math.isnan(loss) else 0.95 * loss + 0.05 * value
                last = step == self.num_steps
                if len(self.held_out) and (last or step % self.config.evaluate_every == 0):
                    acceptance = self._estimate(step)
                if self.checkpoints and (last or step % self.config.save_every == 0):
                    self._save(step, loss)
                status = f"{self.config.loss} {loss:.3f}"
                if acceptance.steps:
                    status += f", {acceptance.tokens_per_step:.2f} tokens per target step"
                bar.update(task, completed=step, status=status)
        self.drafter.eval()
        return TrainingResult(self.num_steps, loss, losses, acceptance, time.monotonic() - started)

    def dry_run(self) -> float:
        """Seconds that one step takes without the optimizer; the weights stay as they are."""
        started = time.monotonic()
        self.drafter.train()
        self._backward(next(self.plan.steps()))
        self.optimizer.zero_grad()
        self.drafter.eval()
        return time.monotonic() - started

    def _start(self, resume: bool) -> tuple[int, float]:
        """Steps already done, and the smoothed loss."""
        if not resume:
            return 0, math.nan
        assert self.checkpoints is not None
        progress = self.checkpoints.newest()
        if progress.record != self.record:
            differing = ", ".join(
                f"{key}: {self.record.get(key)!r}, not {progress.record.get(key)!r}"
                for key in {**self.record, **progress.record}
                if self.record.get(key) != progress.record.get(key)
            )
            raise ConfigError(
                f"{self.checkpoints.folder} cannot be resumed with other settings or data "
                f"({differing}): use those, or another output folder"
            )
        # The wrapped optimizer's state is what was saved, and is loaded where the parameters are.
        self.checkpoints.load(
            lambda weights, state: self.parallel.load(weights, self.optimizer.optimizer, state)
        )
        return progress.step, progress.loss

    def _step(self, step: int, blocks: list[list[int]], smoothed: float) -> float:
        """One optimizer step; returns the loss over all processes."""
        loss, per_step = self._backward(blocks)
        norm = self._clip_gradients()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._stop(step, loss, norm, smoothed)
        factor = warmup_cosine(step - 1, self.config.warmup_steps, self.num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * factor
        self.optimizer.step()
        self.optimizer.zero_grad()
        values = {f"loss/step_{j}": value for j, value in enumerate(per_step.tolist(), start=1)}
        rate = self.config.learning_rate * factor
        self.accelerator.log(
            {"loss": loss, "learning_rate": rate, "gradient_norm": norm, **values}, step
        )
        return loss

    def _clip_gradients(self) -> float:
        """Scale gradients down to the highest norm; returns the norm that they had."""
        norm = self.accelerator.clip_grad_norm_(
            self.drafter.parameters(), self.config.max_grad_norm
        )
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _backward(self, blocks: list[list[int]]) -> tuple[float, Tensor]:
        """Gradients of one optimizer step's blocks; its loss, and [L] that of each step."""
        accelerator, config = self.accelerator, self.config
        batches = list(self._own_batches(blocks))
        counts = sum(
            (count_rows(batch.generated, config.unroll_steps) for batch in batches),
            torch.zeros(config.unroll_steps, dtype=torch.int64),
        )
        counts = accelerator.reduce(counts.to(accelerator.device), "sum").clamp(min=1)
        row_weights = (self.step_shares.to(counts.device) / counts).float()
        sums = torch.zeros(config.unroll_steps, device=accelerator.device)
        for index, batch in enumerate(batches):
            on_device = batch.to(accelerator.device)
            with accelerator.autocast():
                outputs = read_target(self.target, on_device, self.drafter.config.target_layers)
            with self.parallel.summed(last=index == len(batches) - 1):
                with accelerator.autocast():
                    loss = self.parallel.model(on_device, outputs, row_weights)
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
            batch = TextBatch.of(rows, self.config.unroll_steps + 2)
            if self.config.teacher == "data" and batch.top_tokens is None:
                raise ConfigError(
                    "training: --teacher data needs data that was generated with --top-logprobs"
                )
            yield batch

    def _estimate(self, step: int) -> Acceptance:
        acceptance = Acceptance(0, 0)
        drafter = self.parallel.whole_drafter()
        # A target that is shared out runs everywhere or nowhere.
        if self.accelerator.is_main_process or self.config.target_parallel == "fsdp":
            drafter.eval()
            acceptance = estimate_acceptance(
                drafter, self.target, self.held_out, self.speculation, batch_size=8
            )
            drafter.train()
            self.accelerator.log({"tokens_per_target_step": acceptance.tokens_per_step}, step)
        self.accelerator.wait_for_everyone()
        return acceptance

    def _save(self, step: int, loss: float) -> None:
        assert self.checkpoints is not None
        drafter = self.parallel.whole_drafter()
        state = self.parallel.whole_state(self.optimizer.optimizer)
        if self.accelerator.is_main_process:
            self.checkpoints.save(drafter, state, RunProgress(step, loss, self.record))
        self.accelerator.wait_for_everyone()

    def _stop(self, step: int, loss: float, norm: float, smoothed: float) -> None:
        """The step has not been taken: the weights are those of the step before."""
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


@contextmanager
def processes(config: TrainingConfig, output: Path | None = None) -> Iterator[Accelerator]:
    """`make_accelerator`, with the end of its logs and of the group of processes.

    Let go of the group (`Parallel.close`) in the body.
    """
    accelerator = make_accelerator(config, output)
    try:
        yield accelerator
    except BaseException:
        # NCCL's group ends when all processes end it, and others may wait for this one elsewhere:
        # there it ends with the process.
        if accelerator.device.type == "cpu":
            accelerator.end_training()
        raise
    accelerator.end_training()


def make_accelerator(config: TrainingConfig, output: Path | None = None) -> Accelerator:
    """The processes and their devices, as `accelerate launch` started them.

    Args:
        config: says the precision.
        output: TensorBoard's logs go to `logs` in there; None for none.

    Raises:
        ConfigError: `accelerate launch` was told to share the drafter out itself.
    """
    for name, plugin in PLUGINS.items():
        if os.environ.get(name, "false").lower() == "true":
            raise ConfigError(
                f"training: accelerate's {plugin} would replace drafter and optimizer by its own, "
                "whose checkpoints nobody else reads: start without it, and give --shard-optimizer "
                "to share the optimizer's state out, --target-parallel fsdp for the target"
            )
    # With one step rnn_u takes no part, which data parallelism has to know.
    kwargs = DistributedDataParallelKwargs(find_unused_parameters=config.unroll_steps == 1)
    accelerator = Accelerator(
        mixed_precision=config.precision,
        log_with=None if output is None else "tensorboard",
        project_dir=None if output is None else str(output),
        kwargs_handlers=[kwargs],
    )
    if output is not None:
        values = {k: v for k, v in asdict(config).items() if v is not None}
        accelerator.init_trackers("logs", config=values)
    return accelerator


def adamw(drafter: DraftHead, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW; biases are not decayed."""
    matrices = [p for p in drafter.parameters() if p.ndim > 1]
    biases = [p for p in drafter.parameters() if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": biases, "weight_decay": 0.0},
    ]
    # Fused: otherwise an update makes temporary tensors of the size of all parameters.
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)


def warmup_cosine(step: int, warmup_steps: int, num_steps: int) -> float:
    """Factor on the peak learning rate: up to 1 in `warmup_steps`, then a cosine down to 0."""
    warmup_steps = min(warmup_steps, num_steps)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(num_steps - warmup_steps, 1)
    return 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))
