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
