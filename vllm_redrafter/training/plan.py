# SPDX-License-Identifier: Apache-2.0
"""What a training will do: all that it was told, checked against what there is.

`resolution.py` makes a plan before any weights are loaded. Each part of the training is handed
what it needs of it, and `train --dry-run` prints it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.data.rows import TextRows
from vllm_redrafter.data.target import Target
from vllm_redrafter.heads.head import HeadConfig
from vllm_redrafter.training.batch_plan import BatchPlan
from vllm_redrafter.training.checkpointing import RunProgress
from vllm_redrafter.training.training_config import LossKind, TargetDtype

TargetParts = Literal["whole", "without its layers"]


@dataclass(frozen=True)
class HeadPlan:
    """The drafter before its first step.

    Attributes:
        config: its sizes.
        initial: the drafter that it goes on from, a folder or a hub id; None for a new one.
        kept: [draft tokens] int64, the draft vocabulary of a new one; None for all tokens.
        coverage: the share of the answers' tokens that these are.
        copies_lm_head: a new one's last layer begins as the target's, where the shapes agree.
        seed: of a new one's other weights.
        trains_selector: its selector is new, and the only thing to be trained.
    """

    config: HeadConfig
    initial: str | None = None
    kept: Tensor | None = None
    coverage: float = 1.0
    copies_lm_head: bool = True
    seed: int = 0
    trains_selector: bool = False

    def __str__(self) -> str:
        text = "a new one" if self.initial is None else f"goes on from {self.initial}"
        if self.trains_selector:
            text = f"a selector for {self.initial}, whose weights stay"
        if self.kept is not None:
            text += f"; draft vocabulary: {len(self.kept)} of {self.config.vocab_size} tokens, "
            text += f"{self.coverage:.2%} of the answers"
        sizes = ", ".join(f"{k} {v}" for k, v in asdict(self.config).items() if v not in (None, ()))
        return f"{text}; {self.config.model_type}: {sizes}"


@dataclass(frozen=True)
class LoopPlan:
    """What the training loop does. What has the name of a setting is that setting.

    Attributes:
        batches: which rows each step reads.
        num_steps: optimizer steps.
        target_share: of the target's distribution in what is taught; the text has the rest.
        shape: beam width, length and K that tokens per target step are estimated for.
        trains_selector: see `HeadPlan`.
    """

    batches: BatchPlan
    num_steps: int
    loss: LossKind
    target_share: float
    shape: ReDrafterConfig
    micro_batch_size: int
    unroll_steps: int
    step_decay: float
    learning_rate: float
    warmup_steps: int
    weight_decay: float
    max_grad_norm: float
    evaluate_every: int
    save_every: int
    trains_selector: bool = False


@dataclass(frozen=True)
class TrainingPlan:
    """What `train` does.

    Attributes:
        target: the model to draft for.
        target_dtype: of its parameters.
        target_parts: what of it each process loads.
        head: the drafter.
        rows: to learn from; with hidden states where they are captured.
        held_out: to estimate tokens per target step on.
        held_out_sampled: [rows] bool, which of them were sampled.
        num_cut: how many of `rows` are longer than a block.
        loop: the steps.
        processes: how many, and of which kind of device.
        output: the drafter's folder, with its checkpoints.
        start: the checkpoint that is gone on from; None to begin.
        settings: all that was set, for the logs.
        record: all that the weights depend on, for every checkpoint and config.json.
    """

    target: Target
    target_dtype: TargetDtype
    target_parts: TargetParts
    head: HeadPlan
    rows: TextRows
    held_out: TextRows
    held_out_sampled: Tensor
    num_cut: int
    loop: LoopPlan
    processes: tuple[int, str]
    output: Path
    start: RunProgress | None
    settings: dict[str, Any]
    record: dict[str, Any]

    def table(self) -> dict[str, str]:
        """The plan in words, part by part."""
        loop, shape = self.loop, self.loop.shape
        return {
            "target": f"{self.target.name}, {self.target_parts}, dtype {self.target_dtype}",
            "data": f"{len(self.rows)} rows, {self.rows.lengths.sum():,} tokens ({self.num_cut} "
            f"rows cut to {loop.batches.block_length}); {len(self.held_out)} rows held out",
            "drafter": str(self.head),
            "loss": f"{loop.loss} over {loop.unroll_steps} tokens; the target's share in what is "
            f"taught is {loop.target_share:g}",
            "steps": f"{loop.num_steps} steps of {loop.batches.batch_size} blocks on "
            f"{self.processes[0]} × {self.processes[1]}, {loop.micro_batch_size} at once in each",
            "optimizer": f"learning rate {loop.learning_rate:g} after {loop.warmup_steps} steps, "
            f"weight decay {loop.weight_decay:g}, gradients up to norm {loop.max_grad_norm:g}",
            "estimates": f"every {loop.evaluate_every} steps: beam width {shape.beam_width}, beam "
            f"length {shape.beam_length}, K {shape.num_speculative_tokens}",
            "checkpoints": f"every {loop.save_every} steps, in {self.output}",
            "begins": "at step 1" if self.start is None else f"after step {self.start.step}",
        }
