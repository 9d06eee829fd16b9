"""The command line: `vllm-redrafter <command>`.

Commands import what they need when they run, so that `--help` is quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def main() -> None:
    """Recurrent Drafter (ReDrafter) tree speculation for vLLM."""


@app.command()
def demo(
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            help="Where checkpoints and answers are kept and used again; delete it to start "
            "afresh.  [default: vllm-redrafter/demo in $XDG_CACHE_HOME or ~/.cache]",
            show_default=False,
        ),
    ] = None,
    target: Annotated[
        Path | None, typer.Option(help="Folder of a target to use instead of training one.")
    ] = None,
    drafter: Annotated[
        Path | None, typer.Option(help="Folder of a drafter to use instead of training one.")
    ] = None,
) -> None:
    """Train a small target and its drafter, then decode in vLLM without and with ReDrafter.

    Needs neither network nor GPU, and a few minutes on two cores.
    """
    from vllm_redrafter.config import ConfigError
    from vllm_redrafter.demo.run import default_cache_dir, run_demo

    try:
        run_demo(cache_dir or default_cache_dir(), target, drafter)
    except ConfigError as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        raise typer.Exit(1) from error


@app.command("generate-data")
def generate_data(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="Writes the data: a folder or a hub id.")
    ],
    prompts: Annotated[
        str,
        typer.Option(
            help="What it answers: a file (.txt: a line is a prompt; .jsonl, .json, .parquet: "
            "rows with prompt, messages, or ShareGPT's conversations), or the hub id of a dataset."
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            help="Folder for the data. Where a run was stopped, the same command continues."
        ),
    ],
    split: Annotated[
        str | None,
        typer.Option(help="Split of a hub dataset.", show_default="train"),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_p: Annotated[
        float, typer.Option(help="Draw among the most probable tokens of this total probability.")
    ] = 1.0,
    top_k: Annotated[
        int | None,
        typer.Option(help="Draw among the k most probable tokens.", show_default="all"),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="The most tokens of one answer.")] = 1024,
    seed: Annotated[int, typer.Option(help="Of the data.")] = 0,
    system_prompt: Annotated[
        str | None,
        typer.Option(help="For conversations without a system message of their own."),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="The most tokens of a conversation; longer ones are truncated, or skipped if the "
            "first prompt is too long.",
            show_default="what the target allows",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the target, as vLLM takes it.")] = "auto",
    top_logprobs: Annotated[
        int,
        typer.Option(
            help="Keep the target's k most probable tokens with every token that it writes, so "
            "that distillation needs no second pass of the target."
        ),
    ] = 0,
    drafter: Annotated[
        str | None,
        typer.Option(help="A ReDrafter checkpoint to generate with: the same data, sooner."),
    ] = None,
    spec_tokens: Annotated[
        int | None,
        typer.Option(
            help="With --drafter: tree nodes verified per request and step.", show_default="12"
        ),
    ] = None,
    in_flight: Annotated[int, typer.Option(help="Conversations worked on at once.")] = 256,
    shard_size: Annotated[
        int, typer.Option(help="Conversations per shard: about what a stopped run loses.")
    ] = 256,
    enforce_eager: Annotated[
        bool, typer.Option("--enforce-eager", help="vLLM's: no compilation, no CUDA graphs.")
    ] = False,
) -> None:
    """Let the target answer prompts, and keep the answers as training data for a drafter.

    Conversations keep their user turns; every answer is written anew, by the target's chat
    template where it has one. The data comes in Parquet shards (see
    vllm_redrafter/training/dataset.py for the columns).
    """
    from rich.console import Console

    from vllm_redrafter.config import ConfigError
    from vllm_redrafter.training import generation
    from vllm_redrafter.training.dataset import SamplingSettings
    from vllm_redrafter.training.prompts import read_prompts

    console = Console()
    try:
        if spec_tokens is not None and drafter is None:
            raise ConfigError("--spec-tokens is for --drafter: give both or neither")
        settings = generation.GenerationSettings(
            sampling=SamplingSettings(
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                max_tokens=max_tokens,
                seed=seed,
                max_model_len=max_model_len,
                dtype=dtype,
            ),
            system_prompt=system_prompt,
            top_logprobs=top_logprobs,
            shard_size=shard_size,
            in_flight=in_flight,
            drafter=drafter,
            spec_tokens=spec_tokens if spec_tokens is not None else generation.DEFAULT_SPEC_TOKENS,
            enforce_eager=enforce_eager,
        )
        conversations, left_out = read_prompts(prompts, split)
        if left_out:
            console.print(f"{left_out} conversations without a word from the user are left out")
        summary = generation.generate_data(target, conversations, output, settings, console)
        if summary.conversations:
            console.print(str(summary))
    except ConfigError as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        raise typer.Exit(1) from error
