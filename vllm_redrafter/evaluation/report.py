# SPDX-License-Identifier: Apache-2.0
"""What `vllm-redrafter evaluate` found: as tables and as JSON."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_redrafter.checkpoints.acceptance import acceptance_entry
from vllm_redrafter.evaluation.evaluate import Evaluation
from vllm_redrafter.replay.estimate import Acceptance
from vllm_redrafter.utils.files import writing


def print_evaluation(console: Console, evaluation: Evaluation) -> None:
    """Print the grid, acceptance by depth, what to use, and what matches bring."""
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
    if evaluation.by_candidates:
        console.print(_candidates(evaluation))
    console.print(_recommendation(evaluation))
    title = "Tokens per target step of this shape, with prompt-lookup matches"
    table = Table("what drafts", "all", "second half", title=title)
    for name, found in _with_matches(evaluation).items():
        table.add_row(name, f"{found['all']:.2f}", f"{found['second_half']:.2f}")
    console.print(table)
    if evaluation.of_chains:
        console.print(_chains(evaluation))


def _with_matches(evaluation: Evaluation) -> dict[str, dict[str, Any]]:
    """Tokens per step by what drafts: of all blocks, of their second half, of each."""
    found = {}
    for name, blocks in evaluation.by_block.items():
        half = sum(blocks[len(blocks) // 2 :], Acceptance(0, 0))
        found[name] = {
            "all": sum(blocks, Acceptance(0, 0)).tokens_per_step,
            "second_half": half.tokens_per_step,
            "by_block": [block.tokens_per_step for block in blocks],
        }
    return found


def _chains(evaluation: Evaluation) -> Table:
    widest = max(result.shape.beam_width for result in evaluation.results)
    table = Table(
        title=f"Tokens per target step of a chain of {evaluation.served.beam_length}, beside it "
        f"{widest - 1} runner-ups a token and prompt-lookup matches, by K"
    )
    table.add_column("what is drafted")
    for nodes in evaluation.of_chains["chain"]:
        table.add_column(str(nodes), justify="right")
    for name, found in evaluation.of_chains.items():
        table.add_row(name, *(f"{acceptance.tokens_per_step:.2f}" for acceptance in found.values()))
    return table


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
        "tokens_per_step_with_matches": _with_matches(evaluation),
        "tokens_per_step_of_chains": {
            name: {str(nodes): acceptance.tokens_per_step for nodes, acceptance in found.items()}
            for name, found in evaluation.of_chains.items()
        },
    }


def write_json(evaluation: Evaluation, path: Path) -> None:
    """All figures as JSON; ConfigError where the file cannot be written."""
    with writing(f"--json {path}", "name another file"):
        path.write_text(json.dumps(_figures(evaluation), indent=2) + "\n")
