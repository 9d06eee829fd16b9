# SPDX-License-Identifier: Apache-2.0
"""`vllm-redrafter capture`, `train` and `evaluate`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_redrafter.cli import options
from vllm_redrafter.cli.options import settings_as_options
from vllm_redrafter.cli.quiet import quiet_vllm
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.data.settings import CaptureSettings
from vllm_redrafter.evaluation.config import EvaluationConfig
from vllm_redrafter.training.training_config import TrainingConfig
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.files import check_writable

OtherTarget = Annotated[
    bool,
    typer.Option(
        "--other-target",
        help="Allow data that another target with the same tokenizer wrote, such as a quantised "
        "copy of this one.",
    ),
]
DataFolders = Annotated[
    list[Path],
    typer.Option(
        callback=options.existing,
        help="Folder that generate-data wrote with this target. May be given several times: the "
        "parts of several machines, or greedy and sampled answers. To evaluate --held-out, give "
        "all that the drafter was trained on.",
    ),
]
HiddenStates = Annotated[
    list[Path] | None,
    typer.Option(
        callback=options.existing,
        help="Folder that capture wrote from a folder of --data; one for each of them. Of the "
        "target, only its embedding, final norm and output layer are loaded then.",
    ),
]


@settings_as_options
def capture(
    target: options.TargetName,
    data: Annotated[
        Path,
        typer.Option(
            callback=options.existing, help="Folder that generate-data wrote with this target."
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            help="Folder for the hidden states. The same command continues a run that was stopped."
        ),
    ],
    settings: CaptureSettings,
    other_target: OtherTarget = False,
) -> None:
    """Keep the target's last hidden states for train --hidden-states, computed by vLLM.

    Training then needs neither the target's layers in memory nor their time; the price is disk: 2
    bytes times the hidden size a token, and as much again for each of --target-layers, which is
    said before anything is written.
    """
    from vllm_redrafter.offline import capture as capturing

    job = capturing.CaptureJob(target, data, output, settings, other_target)
    capturing.capture(job, _start_vllm)


def _start_vllm(
    target: str, settings: CaptureSettings, layers: Sequence[int], longest: int, scratch: Path
) -> Any:
    quiet_vllm()
    from vllm_redrafter.offline.hidden_states import HiddenStatesEngine

    return HiddenStatesEngine(target, settings, layers, longest, scratch)


@settings_as_options
def train(
    target: options.TargetName,
    data: DataFolders,
    output: Annotated[Path, typer.Option(help="Folder for the drafter and its checkpoints.")],
    config: TrainingConfig,
    hidden_states: HiddenStates = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in --output.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, time one step, write nothing.")
    ] = False,
    other_target: OtherTarget = False,
    initial_drafter: Annotated[
        str | None,
        typer.Option(
            callback=options.DRAFTER,
            help="Drafter to train on, a folder or a hub id: with more data, or data of other "
            "kinds. Its sizes and its draft vocabulary stay.",
            show_default="a new one",
        ),
    ] = None,
    add_selector: Annotated[
        str | None,
        typer.Option(
            callback=options.DRAFTER,
            help="Drafter to add a selector to, a folder or a hub id: its weights stay, and a "
            "draft reads its vocabulary-wide layer once, where it read it for every token.",
            show_default="none",
        ),
    ] = None,
) -> None:
    """Distil a drafter from what the target wrote.

    On several GPUs: accelerate launch -m vllm_redrafter train TARGET ...
    TensorBoard's logs are in OUTPUT/logs, checkpoints in OUTPUT/checkpoints.
    """
    from vllm_redrafter.training import run
    from vllm_redrafter.training.plan import TrainingJob

    # For the estimate of tokens per target step, during training.
    shape = ReDrafterConfig(12, 4, config.unroll_steps, context_matches=0)
    folders, states = tuple(data), tuple(hidden_states or ())
    job = TrainingJob(
        target, folders, output, config, shape, other_target, initial_drafter, add_selector, states
    )
    run.train(job, resume=resume, dry_run=dry_run)


@settings_as_options
def evaluate(
    target: options.TargetName,
    drafter: options.DrafterName,
    data: DataFolders,
    config: EvaluationConfig,
    hidden_states: HiddenStates = None,
    beam_widths: Annotated[
        str, typer.Option(help="Beam widths of the grid, with commas between.")
    ] = "1,2,4,8",
    beam_lengths: Annotated[
        str, typer.Option(help="Beam lengths of the grid, with commas between.")
    ] = "3,4,5",
    spec_tokens: Annotated[
        str, typer.Option(help="Tree nodes per step of the grid, with commas between.")
    ] = "3,5,8,12,16,24,32",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures to this file.")
    ] = None,
    record: Annotated[
        bool,
        typer.Option(
            "--record",
            help="Write the recommended shape into the drafter's config.json, which vLLM takes "
            "where no other is given, and how its nodes are accepted.",
        ),
    ] = False,
    other_target: OtherTarget = False,
) -> None:
    """Say how many tokens a target step gives, without vLLM: for a grid of shapes.

    The decoding of the data's answers is replayed; vLLM reports the same when it decodes them.
    """
    widths = _integers("--beam-widths", beam_widths)
    lengths = _integers("--beam-lengths", beam_lengths)
    nodes = _integers("--spec-tokens", spec_tokens)
    if json_file:
        check_writable(json_file, "--json")

    from rich.console import Console

    from vllm_redrafter.checkpoints.writing import check_recordable, save_shape
    from vllm_redrafter.evaluation import evaluate as evaluation
    from vllm_redrafter.evaluation import report

    grid = evaluation.shapes(widths, lengths, nodes, config.tree)
    if record:
        check_recordable(drafter)
    console, states = Console(), tuple(hidden_states or ())
    job = evaluation.EvaluationJob(
        target, drafter, tuple(data), grid, config, other_target, hidden_states=states
    )
    found = evaluation.evaluate(job, console)
    report.print_evaluation(console, found)
    if record:
        typer.echo(f"recorded in {save_shape(drafter, found.served, found.acceptance)}")
    if json_file:
        report.write_json(found, json_file)


def _integers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option} {text!r}: expected integers with commas between") from error
