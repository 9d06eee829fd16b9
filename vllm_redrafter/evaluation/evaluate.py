# SPDX-License-Identifier: Apache-2.0
"""`vllm-redrafter evaluate`: how good a drafter is, by replays of what its target wrote."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from vllm_redrafter.checkpoints.acceptance import PerSampling
from vllm_redrafter.checkpoints.fit import misfits_of, require_fit
from vllm_redrafter.checkpoints.reading import Checkpoint
from vllm_redrafter.config import ReDrafterConfig, TreeKind
from vllm_redrafter.data.captured import CapturedRows, states_of
from vllm_redrafter.data.rows import DatasetRows, TextRows
from vllm_redrafter.data.source import held_out_conversations, read_all
from vllm_redrafter.data.target import Target
from vllm_redrafter.evaluation.config import EvaluationConfig
from vllm_redrafter.heads.head import DraftHead
from vllm_redrafter.replay.acceptance import measure_acceptance
from vllm_redrafter.replay.estimate import (
    Acceptance,
    compare_candidates,
    estimate_chains,
    estimate_shapes,
    estimate_stream,
    fewest,
)
from vllm_redrafter.replay.target import load_ends, load_target
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.progress import progress_bar

BATCH_SIZE = 16


@dataclass(frozen=True)
class _ShapeResult:
    """One shape of the grid, and what a step of it is assumed to cost; a plain step is 1."""

    shape: ReDrafterConfig
    acceptance: Acceptance
    cost: float

    @property
    def speed_up(self) -> float:
        """Over plain decoding, if a step costs that."""
        return self.acceptance.tokens_per_step / self.cost


@dataclass(frozen=True)
class Evaluation:
    """Results of the whole grid.

    Attributes:
        results: one per shape.
        best: the fastest at the assumed costs.
        served: its shape, with as few candidates as lose nearly nothing.
        config: with what steps are assumed to cost.
        acceptance: how the nodes of `served` are accepted.
        by_candidates: of the fastest shape by number of candidates, see `compare_candidates`.
        by_block: of `served`, with and without matches, see `estimate_stream`.
        of_chains: where asked for, by what is beside a chain, of each K; see `estimate_chains`.
    """

    results: list[_ShapeResult]
    best: _ShapeResult
    served: ReDrafterConfig
    config: EvaluationConfig
    acceptance: PerSampling
    by_candidates: dict[int, Acceptance]
    by_block: dict[str, list[Acceptance]]
    of_chains: dict[str, dict[int, Acceptance]]


def shapes(
    beam_widths: Sequence[int],
    beam_lengths: Sequence[int],
    num_nodes: Sequence[int],
    tree: TreeKind = "explored",
) -> list[ReDrafterConfig]:
    """The grid, without each K that a search cannot fill; ConfigError where nothing is left."""
    grid = []
    for width in beam_widths:
        for length in beam_lengths:
            shape = ReDrafterConfig(1, width, length, tree, context_matches=0)
            max_nodes = length if tree == "chain" else width * length
            nodes = sorted({k for k in num_nodes if k <= max_nodes})
            grid += [replace(shape, num_speculative_tokens=k) for k in nodes]
    if not grid:
        raise ConfigError(
            f"evaluation: no search of widths {list(beam_widths)} and lengths "
            f"{list(beam_lengths)} fills {'a chain' if tree == 'chain' else 'a tree'} of "
            f"{min(num_nodes, default=0)} nodes; ask for fewer"
        )
    return grid


def evaluate_shapes(
    drafter: DraftHead,
    target: Any,
    rows: TextRows,
    grid: Sequence[ReDrafterConfig],
    config: EvaluationConfig,
    console: Console | None = None,
) -> list[_ShapeResult]:
    """Replay the decoding of target-written text by every shape.

    ConfigError without answers, or where the head cannot draft as far as a shape asks.
    """
    for shape in grid:
        drafter.config.require_beam_length("evaluation", shape.beam_length)
    with progress_bar(console) as progress:
        num_replays = len(grid) * -(-len(rows) // BATCH_SIZE)
        task = progress.add_task("replaying", total=num_replays, status="")
        advance = partial(progress.update, task, advance=1)
        totals = estimate_shapes(drafter, target, rows, grid, BATCH_SIZE, on_replay=advance)
    if not totals[0].steps:
        raise ConfigError("evaluation: the text has no answer of two tokens or more")
    costs = map(config.step_cost, grid)
    return [_ShapeResult(*result) for result in zip(grid, totals, costs, strict=True)]


@dataclass(frozen=True)
class EvaluationJob:
    """What to evaluate, and on what.

    Attributes:
        target, drafter: folders or hub ids.
        data: folders that generate-data wrote, other than the training's; or the training's, all
            of them, with the config's `held_out` and `seed` as they were given to `train`.
        grid: the shapes; matches are measured beside the fastest alone.
        other_target: the data may come from another target with the same tokenizer.
        hidden_states: folders that capture wrote, one for each of `data`; the target's layers are
            not loaded then. Without any, the target computes its hidden states.
    """

    target: str
    drafter: str
    data: tuple[Path, ...]
    grid: list[ReDrafterConfig]
    config: EvaluationConfig = field(default_factory=EvaluationConfig)
    other_target: bool = False
    hidden_states: tuple[Path, ...] = ()


def evaluate(job: EvaluationJob, console: Console | None = None) -> Evaluation:
    """Evaluate a drafter; ConfigError for input that cannot work."""
    config, check_target = job.config, not job.other_target
    opened, checkpoint = Target.open(job.target), Checkpoint.open(job.drafter)
    # Captured states are asked for their layers instead.
    reasons = misfits_of(checkpoint.head, opened.config, with_layers=not job.hidden_states)
    require_fit(f"drafter {job.drafter!r}", job.target, reasons)
    written = read_all(job.data, opened, check_target)
    indices = list(range(len(written.dataset)))
    if config.held_out is not None:
        away = held_out_conversations(written.conversations, config.held_out, config.seed)
        indices = away.nonzero().flatten().tolist()
    text = DatasetRows(written.dataset, indices, config.max_length)
    rows: TextRows = text
    if job.hidden_states:
        states = states_of(written, job.hidden_states, check_target)
        head = checkpoint.head
        rows = CapturedRows(text, states, head.hidden_size, head.target_layers)
    if console:
        ways = dict.fromkeys((i.sampling.temperature, i.sampling.top_p) for i in written.infos)
        sampling = " and ".join(f"temperature {way[0]:g}, top-p {way[1]:g}" for way in ways)
        console.print(f"{len(rows)} rows, {rows.lengths.sum():,} tokens, written at {sampling}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    load = load_ends if job.hidden_states else load_target
    target = load(opened, config.target_dtype, device)
    drafter = checkpoint.load(target.dtype, device)
    grid = [replace(shape, tree=config.tree, context_matches=0) for shape in job.grid]
    results = evaluate_shapes(drafter, target, rows, grid, config, console)
    best = max(results, key=lambda result: result.speed_up)
    by_candidates = compare_candidates(drafter, target, rows, best.shape)
    served = replace(best.shape, candidates=fewest(by_candidates))
    beside = replace(served, context_matches=ReDrafterConfig.context_matches)
    widest = max(shape.beam_width for shape in grid)
    ks = {shape.num_speculative_tokens for shape in grid if config.trunk}
    nodes = sorted(k for k in ks if k >= served.beam_length)
    with_chains = [replace(beside, num_speculative_tokens=k, beam_width=widest) for k in nodes]
    of_chains = estimate_chains(drafter, target, rows, with_chains) if nodes else {}
    sampled = written.sampled[text.indices]
    return Evaluation(
        results=results,
        best=best,
        served=served,
        config=config,
        acceptance=measure_acceptance(drafter, target, rows, sampled, served),
        by_candidates=by_candidates,
        by_block=estimate_stream(drafter, target, rows, beside, config.stream),
        of_chains={name: dict(zip(nodes, f, strict=True)) for name, f in of_chains.items()},
    )
