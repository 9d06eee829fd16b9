# SPDX-License-Identifier: Apache-2.0
"""The commands that make data: `make-prompts` and `generate-data`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_redrafter.cli.options import TargetName, is_given
from vllm_redrafter.cli.quiet import quiet_vllm
from vllm_redrafter.data.settings import GenerationSettings, PromptSettings
from vllm_redrafter.utils.errors import ConfigError

if TYPE_CHECKING:
    from vllm_redrafter.data.target import Target

OF_THE_SERVER = ("dtype", "tensor_parallel_size", "engine_args")
"""Options that mean nothing with --endpoint: the server was started with them."""


def make_prompts(
    target: TargetName,
    output: Annotated[
        Path,
        typer.Option(help="File for the prompts. The same command continues a run stopped before."),
    ],
    settings: PromptSettings,
) -> None:
    """Make prompts for generate-data where there is no dataset: the target writes them.

    An instruct model, given its chat template up to the user's turn, goes on with what a user
    would say (Magpie, arXiv 2406.08464). What does not end, is short, or was said is left out.
    """
    from rich.console import Console

    from vllm_redrafter.data import own_prompts

    console = Console()
    console.print(str(own_prompts.make_prompts(target, output, _start_vllm, settings, console)))


def generate_data(
    context: typer.Context,
    target: TargetName,
    prompts: Annotated[
        str,
        typer.Option(
            help="What the target answers: a file (.txt: a line is a prompt; .jsonl, .json, "
            ".parquet: rows with prompt, or with messages as ShareGPT, UltraChat, OpenAI and "
            "SpecForge have them), or the hub id of a dataset."
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            help="Folder for the data. The same command continues a run that was stopped."
        ),
    ],
    settings: GenerationSettings,
    split: Annotated[
        str | None, typer.Option(help="Split of a hub dataset.", show_default="train")
    ] = None,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="Let this running server of vllm serve answer, such as http://localhost:8000.",
        ),
    ] = None,
    served_name: Annotated[
        str | None,
        typer.Option(
            help="With --endpoint: the name that the server gives the target.",
            show_default="that of TARGET",
        ),
    ] = None,
) -> None:
    """Let the target answer prompts, and keep the answers as training data for a drafter.

    Conversations keep their user turns; every answer is written anew, by the target's chat
    template where it has one. The data comes in Parquet shards (see
    vllm_redrafter/data/dataset.py for the columns).
    """
    from rich.console import Console

    from vllm_redrafter.data.prompts import read_prompts

    for option in OF_THE_SERVER if endpoint else ("served_name",):
        if is_given(context, option):
            name = option.replace("_", "-")
            reason = "the server that --endpoint gives decides it" if endpoint else "of --endpoint"
            raise ConfigError(f"--{name}: {reason}; leave it out")
    if endpoint and len(endpoint) > 1:
        raise ConfigError("--endpoint: one server; for several run a --part at each, or a router")
    console = Console()

    def start(target: Target, settings: GenerationSettings) -> Any:
        if endpoint:
            from vllm_redrafter.data.endpoints import EndpointEngine, parsed_address

            return EndpointEngine(parsed_address(*endpoint), target, settings, served_name)
        console.print(f"starting the engine with {target.name}", markup=False)
        return _start_vllm(target, settings)

    conversations, left_out = read_prompts(prompts, split)
    if left_out.count:
        console.print(str(left_out), markup=False, highlight=False, soft_wrap=True)
    from vllm_redrafter.data import generation

    summary = generation.generate_data(target, conversations, output, start, settings, console)
    if summary.conversations:
        console.print(str(summary))


def _start_vllm(target: Target, settings: GenerationSettings) -> Any:
    """The engine that lets the target write, and its advice; vLLM is imported here, not before."""
    quiet_vllm()
    from vllm_redrafter.offline.generation import OfflineEngine

    engine = OfflineEngine(target, settings)
    if engine.advice is not None:
        typer.secho(engine.advice, err=True)
    return engine
