"""`vllm-redrafter capture`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_redrafter.cli.options import settings_as_options
from vllm_redrafter.data.capture_settings import CaptureSettings


@settings_as_options
def capture(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="The model to draft for: a folder or a hub id.")
    ],
    data: Annotated[Path, typer.Option(help="Folder that generate-data wrote with this target.")],
    output: Annotated[
        Path,
        typer.Option(
            help="Folder for the hidden states. The same command continues a run that was stopped."
        ),
    ],
    settings: CaptureSettings,
    other_target: Annotated[
        bool,
        typer.Option(
            "--other-target",
            help="Allow data that another target with the same tokenizer wrote, such as a "
            "quantised copy of this one.",
        ),
    ] = False,
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
    """The engine that runs the target's layers; vLLM is imported here and not before."""
    # Its log would run through the progress bar; whoever wants it says so in the environment.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm_redrafter.offline.hidden_states import HiddenStatesEngine

    return HiddenStatesEngine(target, settings, layers, longest, scratch)
