# SPDX-License-Identifier: Apache-2.0
"""From a training job to its plan: settings, data, target and checkpoints are checked here."""

import hashlib
from dataclasses import asdict, fields, replace
from typing import Any

from vllm_redrafter.checkpoints.fit import misfits_of, require_fit
from vllm_redrafter.checkpoints.reading import Checkpoint
from vllm_redrafter.config import USUAL_CANDIDATES, ReDrafterConfig
from vllm_redrafter.data.captured import CapturedRows, states_of
from vllm_redrafter.data.rows import TextRows
from vllm_redrafter.data.source import TrainingData, WrittenData, read_all, split
from vllm_redrafter.data.target import Target
from vllm_redrafter.heads.head import HeadConfig
from vllm_redrafter.heads.registry import NAMES
from vllm_redrafter.heads.target_layers import AUTO, NONE, layers_of, named_layers, parsed_layers
from vllm_redrafter.training.batch_plan import BatchPlan
from vllm_redrafter.training.checkpointing import Checkpoints
from vllm_redrafter.training.initialisation import most_used_tokens, with_selector
from vllm_redrafter.training.plan import HeadPlan, LoopPlan, TrainingJob, TrainingPlan
from vllm_redrafter.training.training_config import TrainingConfig
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.settings import option_of

NOT_IN_RECORD = ("evaluate_every", "save_every")
"""Settings that the weights do not depend on."""


def resolve(
    job: TrainingJob,
    processes: tuple[int, str] = (1, "cpu"),
    resume: bool = False,
    dry_run: bool = False,
) -> TrainingPlan:
    """Read data, configurations and checkpoints, but no weights, and plan the training.

    Args:
        processes: how many, and of which kind of device.
        resume: go on from the newest checkpoint in the output folder.
        dry_run: nothing will be written: an earlier run's checkpoints may be there.

    ConfigError: settings, data, target, drafter and checkpoints that do not go together.
    """
    checkpoints = Checkpoints(job.output)
    if not (resume or dry_run) and checkpoints.paths():
        raise ConfigError(
            f"{job.output} has checkpoints of an earlier run: --resume goes on with it; to start "
            "afresh give another --output, or delete it"
        )
    target = Target.open(job.target)
    initial = _initial(job)
    config = _settings(job.config, initial, target)
    written = read_all(job.data, target, not job.other_target)
    data = split(written, config.held_out, config.seed, config.block_length)
    for info in data.infos:
        if info.vocab_size != target.vocab_size:
            raise ConfigError(
                f"the data was written with a vocabulary of {info.vocab_size}, the target has "
                f"{target.vocab_size}: generate the data again with this target"
            )
    if initial is None:
        head = _new_head(config, data.rows, target)
    else:
        head = _trained_head(initial, config, job.add_selector is not None)
    shape = replace(job.speculation, context_matches=0)  # tokens per step are the drafter's alone
    if head.config.selected_depths:
        shape = replace(shape, candidates=USUAL_CANDIDATES)
    rows, held_out = _with_states(job, written, data, head.config)
    record = _record(job, config, data)
    return TrainingPlan(
        job=job,
        target=target,
        head=head,
        rows=rows,
        held_out=held_out,
        held_out_sampled=written.sampled[data.held_out.indices],
        num_cut=data.rows.num_cut,
        loop=loop_plan(config, shape, rows, processes[0], head.trains_selector),
        processes=processes,
        start=checkpoints.newest(record) if resume else None,
        record=record,
    )


def loop_plan(
    config: TrainingConfig,
    shape: ReDrafterConfig,
    rows: TextRows,
    processes: int = 1,
    trains_selector: bool = False,
) -> LoopPlan:
    """The loop over `rows`, whose batches so many processes share.

    Tokens per target step are estimated for `shape`; ConfigError for sizes that do not fit.
    """
    if config.batch_size % (config.micro_batch_size * processes):
        raise ConfigError(
            f"--batch-size {config.batch_size} must be a multiple of --micro-batch-size "
            f"× processes ({config.micro_batch_size} × {processes})"
        )
    batches = BatchPlan(rows.lengths, config.block_length, config.batch_size, config.seed)
    num_steps = config.max_steps or batches.num_steps(config.epochs)
    return LoopPlan(config, batches, num_steps, shape, trains_selector)


def new_head_config(config: TrainingConfig, vocab_size: int, hidden_size: int) -> HeadConfig:
    """The sizes of a new head for a target of these sizes; the settings name layers by number."""
    return NAMES[config.head].config_class.of_target(
        vocab_size,
        hidden_size,
        exit_dim=config.exit_dim,
        num_draft_layers=config.num_draft_layers,
        draft_vocab_size=config.draft_vocab_size,
        target_layers=_layers(config),
    )


def _initial(job: TrainingJob) -> Checkpoint | None:
    if job.initial_drafter is not None and job.add_selector is not None:
        raise ConfigError(
            "--initial-drafter trains all of a drafter, and --add-selector leaves its "
            "weights as they are: give one of the two"
        )
    name = job.initial_drafter if job.add_selector is None else job.add_selector
    return None if name is None else Checkpoint.open(name)


def _settings(config: TrainingConfig, initial: Checkpoint | None, target: Target) -> TrainingConfig:
    """The settings with layers by number; a drafter to go on from brings its own sizes."""
    own = AUTO
    if initial is not None:
        config, own = _with_sizes_of(initial, config), named_layers(initial.head.target_layers)
    num_layers = getattr(target.text_config, "num_hidden_layers", None)
    layers = layers_of(config.target_layers or own, num_layers)
    if initial is not None:
        reasons = misfits_of(initial.head, target.config, with_layers=False)
        require_fit(f"--initial-drafter {initial.model!r}", target.name, reasons)
    return replace(config, target_layers=named_layers(layers))


def _with_sizes_of(initial: Checkpoint, config: TrainingConfig) -> TrainingConfig:
    head, defaults = initial.head, TrainingConfig()
    names = [f.name for f in fields(head) if hasattr(config, f.name) and f.name != "target_layers"]
    sizes = {name: getattr(head, name) for name in names}
    # A head of another package has no name here.
    own_names = {of_package.config_class: name for name, of_package in NAMES.items()}
    sizes["head"] = own_names.get(type(head), defaults.head)
    for name, own in sizes.items():
        asked = getattr(config, name)
        if asked not in (getattr(defaults, name), own):
            raise ConfigError(
                f"{option_of(name)} {asked} does not fit --initial-drafter "
                f"{initial.model!r}: it has {own}; leave it out, or train from the beginning"
            )
    return replace(config, **sizes)


def _layers(config: TrainingConfig) -> tuple[int, ...]:
    """The layers of settings that have them by number."""
    layers = parsed_layers(config.target_layers or NONE)
    assert layers is not None
    return layers


def _new_head(config: TrainingConfig, rows: TextRows, target: Target) -> HeadPlan:
    kept, coverage = None, 1.0
    if config.draft_vocab_size is not None:
        kept, coverage = most_used_tokens(rows, target.vocab_size, config.draft_vocab_size)
    sizes = new_head_config(config, target.vocab_size, target.text_config.hidden_size)
    return HeadPlan(sizes, None, kept, coverage)


def _trained_head(initial: Checkpoint, config: TrainingConfig, adds_selector: bool) -> HeadPlan:
    head, layers = initial.head, _layers(config)
    head.require_beam_length(f"--unroll-steps with {initial.model!r}", config.unroll_steps)
    # A drafter that reads no layers may read some from now on, unless its weights stay.
    if layers != head.target_layers and (head.target_layers or adds_selector):
        raise ConfigError(
            f"--target-layers {config.target_layers} does not fit the drafter "
            f"{initial.model!r}: it reads layers {named_layers(head.target_layers)}; leave "
            "it out, or train from the beginning"
        )
    if not adds_selector:
        # A selector is made for the weights as they were: it has to be added anew.
        return HeadPlan(replace(head, target_layers=layers, selector=None), initial)
    if config.unroll_steps < 2:
        raise ConfigError(
            "--unroll-steps 1 with --add-selector: a selector is for the tokens behind the "
            "first one; ask for 2 or more"
        )
    return HeadPlan(with_selector(head, config.unroll_steps), initial, trains_selector=True)


def _with_states(
    job: TrainingJob, written: WrittenData, data: TrainingData, head: HeadConfig
) -> tuple[TextRows, TextRows]:
    """The rows to learn from, and those held out: with hidden states where they are captured."""
    if not job.hidden_states:
        return data.rows, data.held_out
    states = states_of(written, job.hidden_states, not job.other_target)
    sizes = head.hidden_size, head.target_layers
    return CapturedRows(data.rows, states, *sizes), CapturedRows(data.held_out, states, *sizes)


def _record(job: TrainingJob, config: TrainingConfig, data: TrainingData) -> dict[str, Any]:
    """All that the weights depend on."""
    settings = {name: value for name, value in asdict(config).items() if value is not None}
    record: dict[str, Any] = {
        "settings": {k: v for k, v in settings.items() if k not in NOT_IN_RECORD},
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
    if job.hidden_states:
        record["hidden_states"] = "captured"
    for key, drafter in (("initial_drafter", job.initial_drafter), ("added_to", job.add_selector)):
        if drafter is not None:
            digests = []
            for path in Checkpoint.open(drafter).weights:
                with path.open("rb") as weights:
                    digests.append(hashlib.file_digest(weights, "sha256").hexdigest())
            record[key] = {"sha256": " ".join(digests)}
    return record
