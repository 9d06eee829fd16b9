# SPDX-License-Identifier: Apache-2.0
"""Trainings of a few steps, from folder to folder, and the fixtures of their tests."""

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from rich.console import Console

from redrafter_testing.models.tiny_models import make_worded_target
from redrafter_testing.models.training_data import write_data
from redrafter_testing.shared_results import made_once
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.training.plan import TrainingJob
from vllm_redrafter.training.run import train
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
SHAPE = ReDrafterConfig(6, beam_width=2, beam_length=3, context_matches=0)

target = made_once(make_worded_target, VOCAB_SIZE)


def job(
    target: Path, data: Path, output: Path, drafter: Path | None = None, **settings: Any
) -> TrainingJob:
    """A training of CONFIG, but for some settings, that goes on from a drafter."""
    config, begun = replace(CONFIG, **settings), drafter and str(drafter)
    return TrainingJob(str(target), (data,), output, config, SHAPE, initial_drafter=begun)


def run(asked: TrainingJob, **arguments: bool) -> tuple[Any, str]:
    """What `train` found, and what it printed."""
    AcceleratorState._reset_state(reset_partial_state=True)
    console = Console(file=io.StringIO(), width=200)
    return train(asked, console, **arguments), console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from a second one, and lose much on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """accelerate remembers the first training of a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def data(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_data(folder, target, num=24, max_tokens=20)
    return folder
