# SPDX-License-Identifier: Apache-2.0
"""`vllm-redrafter mlx-serve`: mlx-lm's HTTP server, with a drafter."""

from __future__ import annotations

from typing import Annotated

import typer

from vllm_redrafter.cli.serving_backend import require_mlx


def mlx_serve(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="The model to serve: a folder or a hub id. Or a drafter that records it.",
        ),
    ],
    drafter: Annotated[
        str | None,
        typer.Option(
            help="A ReDrafter checkpoint for this target. Without one, what the text repeats is "
            "verified."
        ),
    ] = None,
    spec_tokens: Annotated[
        int | None,
        typer.Option(
            help="The most tree nodes verified per step, 1 to 127.",
            show_default="the checkpoint's, at most 7",
        ),
    ] = None,
    beam_width: Annotated[
        int | None,
        typer.Option(help="Beams of the drafter's search.", show_default="the checkpoint's, or 4"),
    ] = None,
    beam_length: Annotated[
        int | None,
        typer.Option(help="Tokens drafted per beam.", show_default="the checkpoint's, or 5"),
    ] = None,
    context_matches: Annotated[
        int | None,
        typer.Option(
            help="Continuations found in the text that are verified beside the drafter's, 0 to 4.",
            show_default="2",
        ),
    ] = None,
) -> None:
    """Serve a target with ReDrafter on Apple silicon, over mlx-lm's HTTP API.

    What stands behind -- goes to mlx-lm's server: mlx-serve TARGET -- --port 8080 --temp 0.7
    """
    require_mlx()
    from vllm_redrafter.mlx.serve import serve

    said = {
        "num_speculative_tokens": spec_tokens,
        "beam_width": beam_width,
        "beam_length": beam_length,
        "context_matches": context_matches,
    }
    speculation = {name: value for name, value in said.items() if value is not None}
    serve(target, drafter, context.args, speculation)
