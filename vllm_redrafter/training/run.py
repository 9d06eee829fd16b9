# SPDX-License-Identifier: Apache-2.0
"""`vllm-redrafter train`: from a target and its data to a drafter's checkpoint folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from safetensors import SafetensorError

from vllm_redrafter.checkpoints.acceptance import PerSampling, acceptance_entry
from vllm_redrafter.checkpoints.drafter_files import CARD_FILE, read_config
from vllm_redrafter.checkpoints.model_card import model_card
from vllm_redrafter.checkpoints.reading import SHAPE_KEYS
from vllm_redrafter.checkpoints.writing import save_drafter
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.heads.head import DraftHead
from vllm_redrafter.replay.acceptance import measure_acceptance
from vllm_redrafter.replay.estimate import LOSS_ALLOWED, compare_candidates, fewest
from vllm_redrafter.replay.target import load_ends, load_target
from vllm_redrafter.training.checkpointing import Checkpoints
from vllm_redrafter.training.initialisation import continued_drafter, new_drafter
from vllm_redrafter.training.plan import HeadPlan, TargetParts, TrainingPlan
from vllm_redrafter.training.processes import processes
from vllm_redrafter.training.resolution import TrainingJob, resolve
from vllm_redrafter.training.trainer import Trainer, TrainingResult
from vllm_redrafter.utils.errors import TrainingError

__all__ = ["TrainingJob", "train"]

LOADERS: dict[TargetParts, Callable[..., Any]] = {
    "whole": load_target,
    "without its layers": load_ends,
}
BYTES_PER_PARAMETER = 16
"""float32 weight, gradient and AdamW's two moments."""


def train(
    job: TrainingJob,
    console: Console | None = None,
    resume: bool = False,
    dry_run: bool = False,
) -> TrainingResult | None:
    """Train a drafter and write its folder.

    Args:
        job: what to train.
        console: where to print.
        resume: go on from the newest checkpoint in the output folder.
        dry_run: say what would be done, take one step, write nothing.

    Returns:
        What was reached; None from a dry run.

    Raises:
        ConfigError: input that cannot work.
        TrainingError: training stopped.
    """
    console = console or Console()
    logs = None if dry_run else job.output.expanduser()
    with processes(job.config.precision, job.config.unroll_steps, logs) as accelerator:
        if not accelerator.is_main_process:
            console.quiet = True
        where = accelerator.num_processes, accelerator.device.type
        plan = resolve(job, where, resume, dry_run)
        _print_plan(console, plan)
        if not dry_run:
            accelerator.init_trackers("logs", config=plan.settings)
        target = LOADERS[plan.target_parts](plan.target, plan.target_dtype, accelerator.device)
        drafter = _drafter(plan.head, target)
        trainer = Trainer(
            drafter,
            target,
            plan.rows,
            plan.held_out,
            plan.loop,
            accelerator,
            None if dry_run else Checkpoints(plan.output),
            plan.record,
            console,
        )
        with closing(trainer):
            _print_sizes(console, drafter)
            if dry_run:
                _print_dry_run(console, trainer)
                return None
            result = trainer.run(resume)
            if accelerator.is_main_process:
                drafter = drafter.to(target.dtype).eval()
                served, acceptance = _served(drafter, trainer, plan)
                record = _training_record({**plan.record, "result": _figures(result)}, plan.head)
                _save_result(drafter, plan.output, plan.target.name, served, record, acceptance)
                console.print(_summary(result, plan.output))
                if plan.head.config.selected_depths:
                    console.print(_candidates(served.candidates, len(plan.held_out)))
            return result


def _save_result(
    drafter: DraftHead,
    output: Path,
    target: str,
    shape: ReDrafterConfig,
    training: dict[str, Any],
    acceptance: PerSampling,
) -> None:
    """Write the drafter, its records and its model card.

    Raises:
        TrainingError: it could not be written (a full disk, say).
    """
    try:
        served = {name: getattr(shape, name) for name in SHAPE_KEYS}
        measured = acceptance_entry(acceptance)
        save_drafter(drafter, output, target, served, training=training, **measured)
        (output / CARD_FILE).write_text(model_card(drafter.config, target, training))
    except (OSError, SafetensorError) as error:
        raise TrainingError(
            f"the drafter could not be written to {output}: {error}; its weights are in "
            f"{output / 'checkpoints'}: make room and start again with --resume"
        ) from error


def _served(
    drafter: DraftHead, trainer: Trainer, plan: TrainingPlan
) -> tuple[ReDrafterConfig, PerSampling]:
    """How to serve it, and how the held-out text's tokens are accepted then."""
    shape = plan.loop.shape
    if len(plan.held_out) and shape.candidates:
        found = compare_candidates(drafter, trainer.target, plan.held_out, shape)
        shape = replace(shape, candidates=fewest(found))
    text = plan.held_out, plan.held_out_sampled
    return shape, measure_acceptance(drafter, trainer.target, *text, shape)


def _training_record(record: dict[str, Any], head: HeadPlan) -> dict[str, Any]:
    """What config.json says of the training; a selector's stands with that of its drafter."""
    if not head.trains_selector:
        return record
    assert head.initial is not None
    recorded = read_config(head.initial).get("training")
    return {**(recorded if isinstance(recorded, Mapping) else {}), "selector": record}


def _drafter(head: HeadPlan, target: Any) -> DraftHead:
    if head.initial is not None:
        return continued_drafter(head.initial, head.config, head.trains_selector, head.seed)
    lm_head = target.get_output_embeddings() if head.copies_lm_head else None
    return new_drafter(head.config, lm_head, head.kept, head.seed)


def _figures(result: TrainingResult) -> dict[str, Any]:
    reached = result.acceptance.tokens_per_step if result.acceptance.steps else None
    return {"steps": result.steps, "loss": result.loss, "tokens_per_step": reached}


def _print_plan(console: Console, plan: TrainingPlan) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for part, words in plan.table().items():
        table.add_row(part, escape(words))
    console.print(table)


def _print_sizes(console: Console, drafter: DraftHead) -> None:
    """What is known only when the models are there."""
    parameters = sum(p.numel() for p in drafter.parameters())
    learned = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    held = learned * BYTES_PER_PARAMETER + (parameters - learned) * 4
    console.print(
        f"drafter of {parameters:,} parameters ({held / 2**30:.2f} GiB with gradient and AdamW)"
    )


def _print_dry_run(console: Console, trainer: Trainer) -> None:
    seconds, num_steps = trainer.dry_run(), trainer.plan.num_steps
    console.print(
        f"dry run: one step took {seconds:.1f} s; {num_steps} of them take about "
        f"{num_steps * seconds / 60:.0f} min; nothing was written"
    )
    if trainer.accelerator.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**30
        console.print(f"peak memory on the device: {peak:.1f} GiB, the target included")


def _summary(result: TrainingResult, output: Path) -> str:
    reached = f"loss {result.loss:.3f}"
    if result.acceptance.steps:
        reached += f", {result.acceptance.tokens_per_step:.2f} tokens per target step"
    return f"{result.steps} steps in {result.seconds:.0f} s: {reached}; the drafter is in {output}"


def _candidates(count: int, held_out: int) -> str:
    """What a draft of it chooses from, and by how much text that was decided."""
    if not held_out:
        return f"drafts choose among {count} candidates, the default: no text was held out"
    lost = f"{LOSS_ALLOWED:.1%} of the tokens per step on {held_out} held-out conversations"
    chosen = (
        f"drafts choose among {count} candidates, which lose at most {lost}"
        if count
        else f"drafts rank the vocabulary at every level: fewer candidates lose more than {lost}"
    )
    return f"{chosen}; `evaluate --record` decides anew, on more text"
