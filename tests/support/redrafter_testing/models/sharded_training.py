"""Run by each of two processes: trainings that share target and drafter out, and what they hold.

    python -m torch.distributed.run --nproc-per-node=2 -m THIS TARGET TIED DATA OUTPUT

Writes OUTPUT/process-0.json and -1.json.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from rich.console import Console
from torch.distributed.tensor import DTensor

from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.training import run
from vllm_redrafter.training.sharded_target import bytes_here, load_sharded_target
from vllm_redrafter.training.target import load_target
from vllm_redrafter.training.trainer import Trainer
from vllm_redrafter.training.training_config import TrainingConfig

CONFIG = TrainingConfig(
    max_steps=4,
    batch_size=4,
    # Each of two processes has two batches of a step: the first is not summed over them.
    micro_batch_size=1,
    block_length=26,
    unroll_steps=3,
    warmup_steps=1,
    held_out=4,
    evaluate_every=2,
    save_every=2,
    # Odd: its rows do not divide by two.
    exit_dim=25,
    draft_vocab_size=40,
    target_layers="1,2",
)
SHAPE = ReDrafterConfig(num_speculative_tokens=6, beam_width=2, beam_length=3)


def job(target: str, data: str, output: Path, **settings: Any) -> run.TrainingJob:
    """A training of few steps."""
    return run.TrainingJob(target, (Path(data),), output, replace(CONFIG, **settings), SHAPE)


def trained(asked: run.TrainingJob, resume: bool = False) -> tuple[Any, Trainer, str]:
    """Its result, the trainer, and what was printed."""
    kept: list[Trainer] = []

    class Kept(Trainer):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            kept.append(self)

    AcceleratorState._reset_state(reset_partial_state=True)
    whole, run.Trainer = run.Trainer, Kept  # type: ignore[misc]
    console = Console(file=io.StringIO(), width=200)
    try:
        result = run.train(asked, console, resume=resume)
    finally:
        run.Trainer = whole  # type: ignore[misc]
    return result, kept[0], console.file.getvalue()  # type: ignore[attr-defined]


def moments(trainer: Trainer) -> tuple[int, int]:
    """Numbers that the optimizer keeps: in this process, and of all of the drafter."""
    values = [
        value
        for state in trainer.optimizer.optimizer.state.values()
        for value in state.values()
        if value.ndim
    ]
    own = [value.to_local() if isinstance(value, DTensor) else value for value in values]
    return sum(value.numel() for value in own), sum(value.numel() for value in values)


def difference(tied: str, process: int) -> float:
    """Of a sharded target's hidden states and those of a whole one, for tokens of one's own."""
    tokens = torch.randint(2, 60, (1, 9), generator=torch.Generator().manual_seed(process))
    with torch.no_grad():
        found, expected = (
            load(tied, "auto").base_model(tokens).last_hidden_state
            for load in (load_sharded_target, load_target)
        )
    assert found.dtype == expected.dtype == torch.bfloat16
    return float((found - expected).abs().max())


def main(target: str, tied: str, data: str, output: Path) -> None:
    shared = job(target, data, output / "shared", target_parallel="fsdp", shard_optimizer=True)
    result, trainer, printed = trained(shared)
    process = PartialState().process_index
    figures: dict[str, Any] = {
        "losses": result.losses,
        "tokens_per_step": result.acceptance.tokens_per_step,
        "printed": printed,
        "moments": moments(trainer),
        "layers": bytes_here(trainer.target),
        "ends": trainer.target.get_output_embeddings().weight.shape,
        "difference": difference(tied, process),
    }
    stopped = output / "stopped"
    if process == 0:
        shutil.copytree(shared.output / "checkpoints", stopped / "checkpoints")
        shutil.rmtree(stopped / "checkpoints" / "step-00000004")
    PartialState().wait_for_everyone()
    figures["resumed"] = trained(replace(shared, output=stopped), resume=True)[0].losses
    halved = replace(shared, output=output / "bf16")
    halved = replace(halved, config=replace(halved.config, precision="bf16", max_steps=1))
    figures["bf16"] = trained(halved)[0].losses
    (output / f"process-{process}.json").write_text(json.dumps(figures))


def leave_the_group(state: PartialState, group: Any = None) -> None:
    """Instead of ending it with the first training: others follow."""


if __name__ == "__main__":
    end_the_group = PartialState.destroy_process_group
    PartialState.destroy_process_group = leave_the_group
    try:
        main(*sys.argv[1:4], Path(sys.argv[4]))
    finally:
        end_the_group(PartialState())
