# SPDX-License-Identifier: Apache-2.0
"""What to train, and the plan that `resolution.py` makes of it before weights are loaded."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from vllm_redrafter.checkpoints.reading import Checkpoint
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.data.rows import TextRows
from vllm_redrafter.data.target import Target
from vllm_redrafter.heads.head import HeadConfig
from vllm_redrafter.training.batch_plan import BatchPlan
from vllm_redrafter.training.checkpointing import RunProgress
from vllm_redrafter.training.training_config import TrainingConfig


@dataclass(frozen=True)
class TrainingJob:
    """What to train, and from what.

    Attributes:
        target: folder or hub id.
        data: folders that generate-data wrote; all of their rows are learned from.
        output: the drafter's folder; its checkpoints go to `checkpoints` in there.
        speculation: the shape that tokens per target step are estimated for.
        other_target: the data may come from another target with the same tokenizer.
        initial_drafter: folder or hub id of a drafter to train on; None to begin with a new one.
        add_selector: that of a drafter that gets a selector, the only thing to be trained.
        hidden_states: folders that capture wrote, one for each of `data`, in place of the
            target's layers, which are not loaded then.
    """

    target: str
    data: tuple[Path, ...]
    output: Path
    config: TrainingConfig
    speculation: ReDrafterConfig
    other_target: bool = False
    initial_drafter: str | None = None
    add_selector: str | None = None
    hidden_states: tuple[Path, ...] = ()


@dataclass(frozen=True)
class HeadPlan:
    """The drafter before its first step.

    Attributes:
        config: its sizes.
        initial: the drafter that it goes on from; None for a new one.
        kept: [draft tokens] int64, the draft vocabulary of a new one; None for all tokens.
        coverage: the share of the answers' tokens that these are.
        trains_selector: its selector is new, and the only thing to be trained.
    """

    config: HeadConfig
    initial: Checkpoint | None = None
    kept: Tensor | None = None
    coverage: float = 1.0
    trains_selector: bool = False

    def __str__(self) -> str:
        text = "a new one" if self.initial is None else f"goes on from {self.initial.model}"
        if self.initial is not None and self.trains_selector:
            text = f"a selector for {self.initial.model}, whose weights stay"
        if self.kept is not None:
            text += f"; draft vocabulary: {len(self.kept)} of {self.config.vocab_size} tokens, "
            text += f"{self.coverage:.2%} of the answers"
        sizes = ", ".join(f"{k} {v}" for k, v in asdict(self.config).items() if v not in (None, ()))
        return f"{text}; {self.config.model_type}: {sizes}"


@dataclass(frozen=True)
class LoopPlan:
    """What the training loop does; tokens per target step are estimated for `shape`."""

    config: TrainingConfig
    batches: BatchPlan
    num_steps: int
    shape: ReDrafterConfig
    trains_selector: bool


@dataclass(frozen=True)
class TrainingPlan:
    """What `train` does.

    Attributes:
        rows: to learn from; with hidden states where they are captured.
        held_out: to estimate tokens per target step on.
        held_out_sampled: [rows] bool, which of them were sampled.
        num_cut: how many of `rows` are longer than a block.
        processes: how many, and of which kind of device.
        start: the checkpoint that is gone on from; None to begin.
        record: all that the weights depend on, for every checkpoint and config.json.
    """

    job: TrainingJob
    target: Target
    head: HeadPlan
    rows: TextRows
    held_out: TextRows
    held_out_sampled: Tensor
    num_cut: int
    loop: LoopPlan
    processes: tuple[int, str]
    start: RunProgress | None
    record: dict[str, Any]

    def table(self) -> dict[str, str]:
        """The plan in words, part by part."""
        loop, shape, config = self.loop, self.loop.shape, self.loop.config
        parts = "without its layers" if self.job.hidden_states else "whole"
        return {
            "target": f"{self.target.name}, {parts}, dtype {config.target_dtype}",
            "data": f"{len(self.rows)} rows, {self.rows.lengths.sum():,} tokens ({self.num_cut} "
            f"rows cut to {config.block_length}); {len(self.held_out)} rows held out",
            "drafter": str(self.head),
            "loss": f"over {config.unroll_steps} tokens; the target's share in what is taught is "
            f"{config.kl_weight:g}",
            "steps": f"{loop.num_steps} steps of {config.batch_size} blocks on "
            f"{self.processes[0]} × {self.processes[1]}, {config.micro_batch_size} at once in each",
            "optimizer": f"learning rate {config.learning_rate:g} after {config.warmup_steps} "
            "steps",
            "estimates": f"every {config.evaluate_every} steps: beam width {shape.beam_width}, "
            f"beam length {shape.beam_length}, K {shape.num_speculative_tokens}",
            "checkpoints": f"every {config.save_every} steps, in {self.job.output}",
            "begins": "at step 1" if self.start is None else f"after step {self.start.step}",
        }
