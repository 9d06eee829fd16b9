"""Trainings of a few steps, from folder to folder."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState
from rich.console import Console

from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.training.run import TrainingJob, train
from vllm_redrafter.training.training_config import TrainingConfig

VOCAB_SIZE = 64
CONFIG = TrainingConfig(
    max_steps=4,
    batch_size=2,
    micro_batch_size=2,
    block_length=64,
    unroll_steps=3,
    warmup_steps=1,
    held_out=4,
    save_every=2,
)
SHAPE = ReDrafterConfig(num_speculative_tokens=6, beam_width=2, beam_length=3)


def job(target: Path, data: Path, output: Path, **settings: Any) -> TrainingJob:
    """A training of CONFIG, but for some settings."""
    return TrainingJob(str(target), (data,), output, replace(CONFIG, **settings), SHAPE)


def run(asked: TrainingJob, **arguments: bool) -> tuple[Any, str]:
    """Train.

    Returns:
        (what `train` found, what it printed).
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    console = Console(file=io.StringIO(), width=200)
    return train(asked, console, **arguments), console.file.getvalue()  # type: ignore[attr-defined]
