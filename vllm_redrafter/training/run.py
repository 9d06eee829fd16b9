"""`vllm-redrafter train`: from a target and its data to a drafter's checkpoint folder."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from safetensors import SafetensorError

from vllm_redrafter.checkpoints.drafter_files import CARD_FILE
from vllm_redrafter.checkpoints.reading import SHAPE_KEYS
from vllm_redrafter.checkpoints.writing import save_drafter
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.data.captured import CapturedRows, check_hidden_size, states_of
from vllm_redrafter.data.rows import TextRows
from vllm_redrafter.data.source import TrainingData, WrittenData, read_all, split
from vllm_redrafter.heads.head import DraftHead
from vllm_redrafter.training.checkpointing import Checkpoints
from vllm_redrafter.training.initialisation import (
    continued_drafter,
    most_used_tokens,
    named_layers,
    new_drafter,
    sizes_of,
    weights_digest,
    with_named_layers,
)
from vllm_redrafter.training.model_card import model_card
from vllm_redrafter.training.sharded_target import bytes_here, load_sharded_target
from vllm_redrafter.training.target import load_ends, load_target
from vllm_redrafter.training.trainer import Trainer, TrainingResult, processes
from vllm_redrafter.training.training_config import TrainingConfig
from vllm_redrafter.utils.errors import ConfigError, TrainingError

NO_MATTER = ("evaluate_every", "save_every", "target_parallel", "shard_optimizer")
"""Settings that the weights do not depend on."""

BYTES_PER_PARAMETER = 16
"""float32 weight, gradient and AdamW's two moments."""


@dataclass(frozen=True)
class TrainingJob:
    """What to train, and from what.

    Attributes:
        target: folder or hub id.
        data: folders that generate-data wrote; all of their rows are learned from.
        output: the drafter's folder; its checkpoints go to `checkpoints` in there.
        config: how.
        speculation: the shape that tokens per target step are estimated for.
        other_target: the data may come from another target with the same tokenizer.
        initial_drafter: folder or hub id of a drafter to train on; None to begin with a new one.
        hidden_states: folders that capture wrote, one for each of `data`; the target's layers are
            not loaded then. None of them: the target computes its hidden states in training.
    """

    target: str
    data: tuple[Path, ...]
    output: Path
    config: TrainingConfig
    speculation: ReDrafterConfig
    other_target: bool = False
    initial_drafter: str | None = None
    hidden_states: tuple[Path, ...] = ()


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
    job = replace(job, config=with_named_layers(job.config, job.target))
    if job.initial_drafter is not None:
        sizes = sizes_of(job.initial_drafter, job.config)
        job = replace(job, config=with_named_layers(sizes, job.target))
    config, output = job.config, job.output.expanduser()
    if not (resume or dry_run) and Checkpoints(output).paths():
        raise ConfigError(
            f"{output} has checkpoints of an earlier run: --resume goes on with it; to start "
            "afresh give another --output, or delete it"
        )
    load = _loader(job)
    written = read_all(job.data, job.target, not job.other_target)
    data = split(written, config.held_out, config.seed, config.block_length)
    rows, held_out = _with_states(job, written, data)
    with processes(config, None if dry_run else output) as accelerator:
        if not accelerator.is_main_process:
            console.quiet = True
        target = load(job.target, config.target_dtype, accelerator.device)
        _check_vocabulary(target, data)
        check_hidden_size(rows, target.config.get_text_config().hidden_size)
        drafter = _drafter(job, target, data, console)
        record = _record(job, data)
        trainer = Trainer(
            drafter,
            target,
            rows,
            held_out,
            config,
            job.speculation,
            accelerator,
            None if dry_run else output,
            record,
            console,
        )
        with closing(trainer.parallel):
            _print_plan(console, trainer, drafter, data, accelerator)
            if dry_run:
                _print_dry_run(console, trainer, accelerator)
                return None
            result = trainer.run(resume)
            drafter = trainer.parallel.whole_drafter()
            if accelerator.is_main_process:
                save_result(job, drafter, target, record, result)
                console.print(_summary(result, output))
            return result


def save_result(
    job: TrainingJob,
    drafter: DraftHead,
    target: Any,
    record: dict[str, Any],
    result: TrainingResult,
) -> None:
    """Write the drafter in the target's dtype, its record and its model card.

    Raises:
        TrainingError: it could not be written (a full disk, say).
    """
    training = {
        **record,
        "result": {
            "steps": result.steps,
            "loss": result.loss,
            "tokens_per_step": result.acceptance.tokens_per_step
            if result.acceptance.steps
            else None,
        },
    }
    output = job.output.expanduser()
    try:
        shape = {name: getattr(job.speculation, name) for name in SHAPE_KEYS}
        weights = drafter.to(target.dtype)
        save_drafter(weights, output, job.target, shape, training=training)
        (output / CARD_FILE).write_text(model_card(drafter.config, job.target, training))
    except (OSError, SafetensorError) as error:
        raise TrainingError(
            f"the drafter could not be written to {output}: {error}; its weights are in "
            f"{output / 'checkpoints'}: make room and start again with --resume"
        ) from error


def _loader(job: TrainingJob) -> Callable[..., Any]:
    """What loads as much of the target as this training reads."""
    if job.config.target_parallel == "no":
        return load_ends if job.hidden_states else load_target
    if job.hidden_states:
        raise ConfigError(
            f"training: target_parallel {job.config.target_parallel} shares out the target's "
            "layers, and with --hidden-states none is loaded: leave one of the two out"
        )
    return load_sharded_target


def _check_vocabulary(target: Any, data: TrainingData) -> None:
    size = target.config.get_text_config().vocab_size
    for info in data.infos:
        if size != info.vocab_size:
            raise ConfigError(
                f"the data was written with a vocabulary of {info.vocab_size}, the target has "
                f"{size}: generate the data again with this target"
            )


def _with_states(
    job: TrainingJob, written: WrittenData, data: TrainingData
) -> tuple[TextRows, TextRows]:
    """Rows to learn from and held-out ones, with their hidden states where they are captured."""
    if not job.hidden_states:
        return data.rows, data.held_out
    states = states_of(written, job.hidden_states, not job.other_target)
    layers = named_layers(job.config)
    return CapturedRows(data.rows, states, layers), CapturedRows(data.held_out, states, layers)


def _drafter(job: TrainingJob, target: Any, data: TrainingData, console: Console) -> DraftHead:
    if job.initial_drafter is not None:
        console.print(f"goes on from {job.initial_drafter}")
        return continued_drafter(job.initial_drafter, target, named_layers(job.config))
    config, kept = job.config, None
    if config.draft_vocab_size is not None:
        vocab_size = target.config.get_text_config().vocab_size
        kept, share = most_used_tokens(data.rows, vocab_size, config.draft_vocab_size)
        console.print(
            f"draft vocabulary: {len(kept)} of {vocab_size} tokens, {share:.2%} of the answers"
        )
    return new_drafter(target, config, kept)


def _record(job: TrainingJob, data: TrainingData) -> dict[str, Any]:
    """All that the weights depend on; kept in every checkpoint and in the drafter's config.json."""
    settings = {
        key: value
        for key, value in asdict(job.config).items()
        if value is not None and key not in NO_MATTER
    }
    initial = {} if job.initial_drafter is None else {"sha256": weights_digest(job.initial_drafter)}
    captured = {"hidden_states": "captured"} if job.hidden_states else {}
    return {
        **captured,
        "settings": settings,
        **({"initial_drafter": initial} if initial else {}),
        "speculation": asdict(job.speculation),
        "data": {"rows": len(data.rows), "tokens": int(data.rows.lengths.sum())},
        "sources": [
            {
                "target": info.target,
                "target_fingerprint": info.target_fingerprint,
                "prompts_fingerprint": info.prompts_fingerprint,
                "conversations": info.num_conversations,
                "temperature": info.sampling.temperature,
                "top_p": info.sampling.top_p,
            }
            for info in data.infos
        ],
    }


def _print_plan(
    console: Console,
    trainer: Trainer,
    drafter: DraftHead,
    data: TrainingData,
    accelerator: Accelerator,
) -> None:
    parameters = sum(p.numel() for p in drafter.parameters())
    console.print(
        f"{len(data.rows)} rows, {data.rows.lengths.sum():,} tokens "
        f"({data.rows.num_cut} rows cut to {trainer.config.block_length}); "
        f"{len(data.held_out)} rows held out"
    )
    console.print(
        f"{trainer.num_steps} steps of {trainer.config.batch_size} blocks on "
        f"{accelerator.num_processes} × {accelerator.device.type}; drafter of {parameters:,} "
        f"parameters ({parameters * BYTES_PER_PARAMETER / 2**30:.2f} GiB with gradient and AdamW"
        f"{', shared out' if trainer.config.shard_optimizer else ''})"
    )
    if trainer.config.target_parallel == "fsdp":
        here, all_of_them = (size / 2**20 for size in bytes_here(trainer.target))
        console.print(f"of the target's layers {here:,.1f} MiB of {all_of_them:,.1f} are here")


def _print_dry_run(console: Console, trainer: Trainer, accelerator: Accelerator) -> None:
    seconds = trainer.dry_run()
    console.print(
        f"dry run: one step took {seconds:.1f} s; {trainer.num_steps} of them take about "
        f"{trainer.num_steps * seconds / 60:.0f} min; nothing was written"
    )
    if accelerator.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**30
        console.print(f"peak memory on the device: {peak:.1f} GiB, the target included")


def _summary(result: TrainingResult, output: Path) -> str:
    reached = f"loss {result.loss:.3f}"
    if result.acceptance.steps:
        reached += f", {result.acceptance.tokens_per_step:.2f} tokens per target step"
    return f"{result.steps} steps in {result.seconds:.0f} s: {reached}; the drafter is in {output}"
