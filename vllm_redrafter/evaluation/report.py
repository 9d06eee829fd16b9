# SPDX-License-Identifier: Apache-2.0
"""What `vllm-redrafter evaluate` found: as tables and as JSON."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_redrafter.checkpoints.acceptance import acceptance_entry
from vllm_redrafter.evaluation.evaluate import CONTEXT_MATCHES, RANKS, Evaluation
from vllm_redrafter.utils.errors import ConfigError


def print_evaluation(console: Console, evaluation: Evaluation) -> None:
    """Print the grid, acceptance by depth, top-k accuracy, and what to use."""
    table = Table(title="Tokens per target step")
    for column in ("beam width", "beam length", "K", "tokens per step", "speed-up at these costs"):
        table.add_column(column, justify="right")
    table.add_column("acceptance by depth")
    best = evaluation.best
    for result in evaluation.results:
        shape, acceptance = result.shape, result.acceptance
        by_depth = " ".join(f"{count / acceptance.steps:.2f}" for count in acceptance.by_depth)
        table.add_row(
            str(shape.beam_width),
            str(shape.beam_length),
            str(shape.num_speculative_tokens),
            f"{acceptance.tokens_per_step:.2f}",
            f"{result.speed_up:.2f}×",
            by_depth,
            style="bold green" if result is best else "",
        )
    console.print(table)
    table = Table(title="The text's token among the drafter's best (teacher-forced)")
    table.add_column("step", justify="right")
    for rank in RANKS:
        table.add_column(f"top {rank}", justify="right")
    for step, shares in enumerate(evaluation.accuracy.tolist(), start=1):
        table.add_row(str(step), *(f"{share:.3f}" for share in shares))
    console.print(table)
    if evaluation.by_candidates:
        console.print(_candidates(evaluation))
    console.print(_recommendation(evaluation))
    if evaluation.with_matches.steps:
        console.print(_matches(evaluation))


def _matches(evaluation: Evaluation) -> str:
    """What prompt-lookup matches bring to the fastest shape, and alone."""
    alone, both = evaluation.matches_alone, evaluation.with_matches
    return (
        f"Tokens per step of this shape: {evaluation.best.acceptance.tokens_per_step:.2f}; with "
        f"{CONTEXT_MATCHES} prompt-lookup matches beside it (context_matches): "
        f"{both.tokens_per_step:.2f}; of these alone, without a drafter: "
        f"{alone.tokens_per_step:.2f}."
    )


def _candidates(evaluation: Evaluation) -> Table:
    found, served = evaluation.by_candidates, evaluation.served.candidates
    table = Table(title="Tokens per target step of the best shape, by candidates of a level")
    for column in ("candidates", "tokens per step", "of all"):
        table.add_column(column, justify="right")
    for count, acceptance in found.items():
        table.add_row(
            str(count or "all"),
            f"{acceptance.tokens_per_step:.3f}",
            f"{acceptance.tokens_per_step / found[0].tokens_per_step:.2%}",
            style="bold green" if count == served else "",
        )
    return table


def _recommendation(evaluation: Evaluation) -> str:
    best, config = evaluation.best, evaluation.config
    shape = best.shape
    text = (
        f"If a draft level costs {config.draft_cost:g} of a plain step and a verified node "
        f"{config.verify_cost:g}, which is assumed and not measured: "
        f"--spec-tokens {shape.num_speculative_tokens}, beam_width {shape.beam_width}, beam_length "
        f"{shape.beam_length} "
        f"({best.acceptance.tokens_per_step:.2f} tokens per step, {best.speed_up:.2f}×)."
    )
    if best.speed_up > 1:
        return text
    return f"{text} Even this is not faster than plain decoding."


def _figures(evaluation: Evaluation) -> dict[str, Any]:
    config = evaluation.config
    return {
        "results": [
            {
                **asdict(result.shape),
                "tokens_per_step": result.acceptance.tokens_per_step,
                "steps": result.acceptance.steps,
                "accepted_by_depth": result.acceptance.by_depth,
                "speed_up": result.speed_up,
            }
            for result in evaluation.results
        ],
        "costs": {"assumed": {"draft": config.draft_cost, "verify": config.verify_cost}},
        **acceptance_entry(evaluation.acceptance),
        "tokens_per_step_by_candidates": {
            str(count or "all"): acceptance.tokens_per_step
            for count, acceptance in evaluation.by_candidates.items()
        },
        "tokens_per_step_with_matches": evaluation.with_matches.tokens_per_step,
        "tokens_per_step_of_matches_alone": evaluation.matches_alone.tokens_per_step,
        "top_accuracy": {
            f"top-{rank}": evaluation.accuracy[:, column].tolist()
            for column, rank in enumerate(RANKS)
        },
    }


def write_json(evaluation: Evaluation, path: Path) -> None:
    """All figures as JSON; ConfigError where the file cannot be written."""
    try:
        path.write_text(json.dumps(_figures(evaluation), indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"--json {path}: cannot be written: {error}") from error
