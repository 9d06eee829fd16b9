# SPDX-License-Identifier: Apache-2.0
"""From what a training was told to its plan: the one place that reads the settings."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from vllm_redrafter.checkpoints.drafter_files import weights_digest
from vllm_redrafter.checkpoints.fit import misfits_of, require_fit
from vllm_redrafter.checkpoints.reading import Checkpoint
from vllm_redrafter.config import USUAL_CANDIDATES, ReDrafterConfig
from vllm_redrafter.data.captured import CapturedRows, states_of
from vllm_redrafter.data.rows import TextRows
from vllm_redrafter.data.source import TrainingData, WrittenData, read_all, split
from vllm_redrafter.data.target import Target
from vllm_redrafter.heads.head import HeadConfig
from vllm_redrafter.heads.registry import NAMES, head_name
from vllm_redrafter.heads.selector import SelectorConfig
from vllm_redrafter.heads.target_layers import AUTO, NONE, layers_of, named_layers, parsed_layers
from vllm_redrafter.training.batch_plan import BatchPlan
from vllm_redrafter.training.checkpointing import Checkpoints
from vllm_redrafter.training.initialisation import most_used_tokens
from vllm_redrafter.training.plan import HeadPlan, LoopPlan, TrainingPlan
from vllm_redrafter.training.training_config import TrainingConfig
from vllm_redrafter.utils.errors import ConfigError

NO_MATTER = ("evaluate_every", "save_every")
"""Settings that the weights do not depend on."""


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
        add_selector: that of a drafter that gets a selector, the only thing to be trained.
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
    add_selector: str | None = None
    hidden_states: tuple[Path, ...] = ()


def resolve(
    job: TrainingJob,
    processes: tuple[int, str] = (1, "cpu"),
    resume: bool = False,
    dry_run: bool = False,
) -> TrainingPlan:
    """Read data, configurations and checkpoints, and say what will be done; no weights are loaded.

    Args:
        job: what to train.
        processes: how many, and of which kind of device.
        resume: go on from the newest checkpoint in the output folder.
        dry_run: nothing will be written, so that an earlier run's checkpoints may be there.

    Raises:
        ConfigError: settings, data, target, drafter and checkpoints that do not go together.
    """
    output = job.output.expanduser()
    checkpoints = Checkpoints(output)
    if not (resume or dry_run) and checkpoints.paths():
        raise ConfigError(
            f"{output} has checkpoints of an earlier run: --resume goes on with it; to start "
            "afresh give another --output, or delete it"
        )
    target = Target.open(job.target)
    sizes = target.text_config
    config, head = _with_head(job, sizes)
    written = read_all(job.data, target, not job.other_target)
    data = split(written, config.held_out, config.seed, config.block_length)
    data.check_vocabulary(sizes.vocab_size)
    head = head or _new_head(config, data.rows, sizes)
    shape = replace(job.speculation, context_matches=0)  # tokens per step are the drafter's alone
    if head.config.selected_depths:
        shape = replace(shape, candidates=USUAL_CANDIDATES)
    rows, held_out = _with_states(job, written, data, head.config)
    settings = {key: value for key, value in asdict(config).items() if value is not None}
    record = _record(job, settings, data)
    return TrainingPlan(
        target=target,
        target_dtype=config.target_dtype,
        target_parts="without its layers" if job.hidden_states else "whole",
        head=head,
        rows=rows,
        held_out=held_out,
        held_out_sampled=written.sampled[data.held_out.indices],
        num_cut=data.rows.num_cut,
        loop=replace(
            loop_plan(config, shape, rows, head.config, processes[0]),
            trains_selector=head.trains_selector,
        ),
        processes=processes,
        output=output,
        start=checkpoints.resumable(record) if resume else None,
        settings=settings,
        record=record,
    )


def loop_plan(
    config: TrainingConfig,
    shape: ReDrafterConfig,
    rows: TextRows,
    head: HeadConfig,
    processes: int = 1,
) -> LoopPlan:
    """The training loop that the settings ask for.

    Args:
        config: the settings.
        shape: that tokens per target step are estimated for.
        rows: to learn from.
        head: the drafter's sizes.
        processes: that share the loop.

    Raises:
        ConfigError: settings that do not fit the head, the rows or the number of processes.
    """
    if config.batch_size % (config.micro_batch_size * processes):
        raise ConfigError(
            f"training: batch_size {config.batch_size} must be a multiple of micro_batch_size "
            f"× processes ({config.micro_batch_size} × {processes})"
        )
    batches = BatchPlan(rows.lengths, config.block_length, config.batch_size, config.seed)
    head.require_beam_length("training: unroll_steps", config.unroll_steps)
    return LoopPlan(
        batches=batches,
        num_steps=config.max_steps or batches.num_steps(config.epochs),
        target_share={"kl": 1.0, "ce": 0.0, "mix": config.kl_weight}[config.loss],
        shape=shape,
        **{f.name: getattr(config, f.name) for f in fields(LoopPlan) if hasattr(config, f.name)},
    )


def new_head_config(config: TrainingConfig, vocab_size: int, hidden_size: int) -> HeadConfig:
    """The sizes of a new head.

    Args:
        config: the settings, the target's layers by number; None are none.
        vocab_size, hidden_size: the target's.

    Raises:
        ConfigError: sizes that cannot be.
    """
    return NAMES[config.head].config_class.of_target(
        vocab_size,
        hidden_size,
        config.unroll_steps,
        exit_dim=config.exit_dim,
        num_draft_layers=config.num_draft_layers,
        draft_vocab_size=config.draft_vocab_size,
        target_layers=_layers(config),
    )


def _with_states(
    job: TrainingJob, written: WrittenData, data: TrainingData, head: HeadConfig
) -> tuple[TextRows, TextRows]:
    """The rows to learn from, and those held out: with hidden states where they are captured."""
    if not job.hidden_states:
        return data.rows, data.held_out
    states = states_of(written, job.hidden_states, not job.other_target)
    return (
        CapturedRows(data.rows, states, head.hidden_size, head.target_layers),
        CapturedRows(data.held_out, states, head.hidden_size, head.target_layers),
    )


def _record(job: TrainingJob, settings: dict[str, Any], data: TrainingData) -> dict[str, Any]:
    """All that the weights depend on."""
    record: dict[str, Any] = {
        "settings": {key: value for key, value in settings.items() if key not in NO_MATTER},
        "speculation": asdict(job.speculation),
        **data.record(),
    }
    if job.hidden_states:
        record["hidden_states"] = "captured"
    if job.initial_drafter is not None:
        record["initial_drafter"] = {"sha256": weights_digest(job.initial_drafter)}
    if job.add_selector is not None:
        record["added_to"] = {"sha256": weights_digest(job.add_selector)}
    return record


def _with_head(job: TrainingJob, sizes: Any) -> tuple[TrainingConfig, HeadPlan | None]:
    """The settings with layers by number and the drafter's own sizes, and a drafter to go on from.

    Raises:
        ConfigError: no such drafter, it drafts for a target of other sizes, or a setting says
            something else than its checkpoint; or the target has no such layers.
    """
    config = job.config
    if job.initial_drafter is not None and job.add_selector is not None:
        raise ConfigError(
            "training: initial_drafter trains all of a drafter, and add_selector leaves its "
            "weights as they are: give one of the two"
        )
    initial = job.initial_drafter if job.add_selector is None else job.add_selector
    if initial is None:
        return _with_named_layers(config, AUTO, sizes), None
    found = Checkpoint.open(initial).head
    own = named_layers(found.target_layers)
    config = _with_named_layers(_with_sizes_of(found, initial, config), own, sizes)
    # A drafter that reads none may read some from now on.
    if found.target_layers and config.target_layers != own:
        raise ConfigError(
            f"training: target_layers {config.target_layers} does not fit initial_drafter "
            f"{initial!r}: it reads layers {own}; leave target_layers out, or train from the "
            "beginning"
        )
    reasons = misfits_of(found, sizes, with_layers=False)
    require_fit(f"training: initial_drafter {initial!r}", job.target, reasons)
    if job.add_selector is not None:
        return config, _selector_plan(found, initial, config)
    # A selector tells what the drafter was: it is to be added anew.
    grown = replace(found, target_layers=_layers(config), selector=None)
    return config, HeadPlan(grown, initial)


def _selector_plan(found: HeadConfig, initial: str, config: TrainingConfig) -> HeadPlan:
    """A new selector, for the unrolled steps."""
    if _layers(config) != found.target_layers:
        raise ConfigError(
            f"training: target_layers {config.target_layers} does not fit add_selector "
            f"{initial!r}, whose weights stay: leave it out"
        )
    if config.unroll_steps < 2:
        raise ConfigError(
            "training: unroll_steps 1 with add_selector: a selector is for the tokens behind the "
            "first one; ask for 2 or more"
        )
    grown = replace(found, selector=selector_for(found, config.unroll_steps))
    return HeadPlan(grown, initial, seed=config.seed, trains_selector=True)


def selector_for(head: HeadConfig, num_steps: int) -> SelectorConfig:
    """The sizes of a new selector for drafts of so many tokens."""
    return SelectorConfig(num_steps - 1, max(1, head.feature_width // 4))


def _with_named_layers(config: TrainingConfig, usual: str, sizes: Any) -> TrainingConfig:
    """The settings with layers by number: the usual ones where nothing is said."""
    asked = config.target_layers or usual
    num_layers = getattr(sizes, "num_hidden_layers", None)
    layers = layers_of(asked, num_layers, "training: target_layers")
    return replace(config, target_layers=named_layers(layers))


def _layers(config: TrainingConfig) -> tuple[int, ...]:
    """The layers of settings that have them by number."""
    layers = parsed_layers(config.target_layers or NONE, "training: target_layers")
    assert layers is not None
    return layers


def _with_sizes_of(found: HeadConfig, initial: str, config: TrainingConfig) -> TrainingConfig:
    """The settings of a training that goes on from a drafter: its sizes are that drafter's."""
    defaults = TrainingConfig()
    names = [f.name for f in fields(found) if hasattr(config, f.name)]
    sizes = {name: getattr(found, name) for name in names if name != "target_layers"}
    # One of another package has no name here.
    sizes["head"] = head_name(found) or defaults.head
    for name, own in (*sizes.items(), ("init", defaults.init)):
        asked = getattr(config, name)
        if asked not in (getattr(defaults, name), own):
            reason = f"it has {own}" if name in sizes else "nothing is initialised"
            raise ConfigError(
                f"training: {name} {asked} does not fit initial_drafter {initial!r}: {reason}; "
                f"leave {name} out, or train from the beginning"
            )
    return replace(config, **sizes)


def _new_head(config: TrainingConfig, rows: TextRows, sizes: Any) -> HeadPlan:
    kept, coverage = None, 1.0
    if config.draft_vocab_size is not None:
        kept, coverage = most_used_tokens(rows, sizes.vocab_size, config.draft_vocab_size)
    head = new_head_config(config, sizes.vocab_size, sizes.hidden_size)
    return HeadPlan(head, None, kept, coverage, config.init == "lm_head", config.seed)
