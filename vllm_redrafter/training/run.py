# SPDX-License-Identifier: Apache-2.0
"""`vllm-redrafter train`: from a target and its data to a drafter's checkpoint folder."""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_redrafter.checkpoints.acceptance import acceptance_entry
from vllm_redrafter.checkpoints.drafter_files import CARD_FILE
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
from vllm_redrafter.training.plan import TrainingJob, TrainingPlan
from vllm_redrafter.training.processes import ended, make_accelerator
from vllm_redrafter.training.resolution import resolve
from vllm_redrafter.training.trainer import Trainer, TrainingResult
from vllm_redrafter.utils.errors import TrainingError
from vllm_redrafter.utils.files import writing

BYTES_PER_PARAMETER = 16
"""float32 weight, gradient and AdamW's two moments."""


def train(
    job: TrainingJob, console: Console | None = None, resume: bool = False, dry_run: bool = False
) -> TrainingResult | None:
    """Train a drafter and write its folder.

    Args:
        resume: go on from the newest checkpoint in the output folder.
        dry_run: print the plan, take one step, write nothing; returns None.

    ConfigError: input that cannot work. TrainingError: training stopped.
    """
    console = console or Console()
    job = replace(job, output=job.output.expanduser())
    logs = None if dry_run else job.output
    accelerator = make_accelerator(job.config.precision, job.config.unroll_steps, logs)
    job = replace(job, config=replace(job.config, precision=accelerator.mixed_precision))
    with ended(accelerator):
        if not accelerator.is_main_process:
            console.quiet = True
        devices = accelerator.num_processes, accelerator.device.type
        plan = resolve(job, devices, resume, dry_run)
        _print_plan(console, plan)
        if not dry_run:
            accelerator.init_trackers("logs", config=plan.record["settings"])
        load = load_ends if job.hidden_states else load_target
        target = load(plan.target, plan.loop.config.target_dtype, accelerator.device)
        drafter = _drafter(plan, target)
        trainer = Trainer(
            drafter,
            target,
            plan.rows,
            plan.held_out,
            plan.loop,
            accelerator,
            None if dry_run else Checkpoints(job.output),
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
                served = _save_result(drafter, target, plan, result)
                _print_result(console, result, plan, served.candidates)
            return result


def _save_result(
    drafter: DraftHead, target: Any, plan: TrainingPlan, result: TrainingResult
) -> ReDrafterConfig:
    """Write the drafter, its records and its model card; returns the shape to serve it in.

    TrainingError: it could not be written (a full disk, say).
    """
    shape = plan.loop.shape
    if len(plan.held_out) and shape.candidates:
        compared = compare_candidates(drafter, target, plan.held_out, shape)
        shape = replace(shape, candidates=fewest(compared))
    acceptance = measure_acceptance(drafter, target, plan.held_out, plan.held_out_sampled, shape)
    training = _training_record(plan, result)
    output, name = plan.job.output, plan.target.name
    served = {key: getattr(shape, key) for key in SHAPE_KEYS}
    measured = acceptance_entry(acceptance)
    kept = f"its weights are in {output / 'checkpoints'}: make room and start again with --resume"
    with writing(f"the drafter in {output}", kept, TrainingError):
        save_drafter(drafter, output, name, served, training=training, **measured)
        (output / CARD_FILE).write_text(model_card(drafter.config, name, training))
    return shape


def _training_record(plan: TrainingPlan, result: TrainingResult) -> dict[str, Any]:
    """For config.json; a selector's record stands with that of its drafter."""
    reached = result.acceptance.tokens_per_step if result.acceptance.steps else None
    figures = {"steps": result.steps, "loss": result.loss, "tokens_per_step": reached}
    record = {**plan.record, "result": figures}
    if not plan.head.trains_selector:
        return record
    assert plan.head.initial is not None
    recorded = plan.head.initial.values.get("training")
    return {**(recorded if isinstance(recorded, Mapping) else {}), "selector": record}


def _drafter(plan: TrainingPlan, target: Any) -> DraftHead:
    head, seed = plan.head, plan.loop.config.seed
    if head.initial is not None:
        return continued_drafter(head.initial.load(), head.config, head.trains_selector, seed)
    return new_drafter(head.config, target.get_output_embeddings(), head.kept, seed)


def _print_plan(console: Console, plan: TrainingPlan) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for part, words in plan.table().items():
        table.add_row(part, escape(words))
    console.print(table)


def _print_sizes(console: Console, drafter: DraftHead) -> None:
    parameters = sum(p.numel() for p in drafter.parameters())
    learned = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    gib = (learned * BYTES_PER_PARAMETER + (parameters - learned) * 4) / 2**30
    console.print(f"drafter of {parameters:,} parameters ({gib:.2f} GiB with gradient and AdamW)")


def _print_dry_run(console: Console, trainer: Trainer) -> None:
    seconds, num_steps = trainer.dry_run(), trainer.plan.num_steps
    console.print(
        f"dry run: one step took {seconds:.1f} s; {num_steps} of them take about "
        f"{num_steps * seconds / 60:.0f} min; nothing was written"
    )
    if trainer.accelerator.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**30
        console.print(f"peak memory on the device: {peak:.1f} GiB, the target included")


def _print_result(
    console: Console, result: TrainingResult, plan: TrainingPlan, candidates: int
) -> None:
    reached = f"loss {result.loss:.3f}"
    if result.acceptance.steps:
        reached += f", {result.acceptance.tokens_per_step:.2f} tokens per target step"
    steps = f"{result.steps} steps in {result.seconds:.0f} s"
    console.print(f"{steps}: {reached}; the drafter is in {plan.job.output}")
    if not plan.head.config.selected_depths:
        return
    if not len(plan.held_out):
        console.print(f"drafts rank {candidates} candidates, the default: no text was held out")
        return
    lost = f"{LOSS_ALLOWED:.1%} of the tokens per step on {len(plan.held_out)} held-out rows"
    chosen = f"drafts rank {candidates} candidates, which lose at most {lost}"
    if not candidates:
        chosen = (
            f"drafts rank the vocabulary at every level: fewer candidates lose more than {lost}"
        )
    console.print(f"{chosen}; `evaluate --record` decides anew, on more text")
