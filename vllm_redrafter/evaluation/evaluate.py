# SPDX-License-Identifier: Apache-2.0
"""`vllm-redrafter evaluate`: how good a drafter is, by replays of what its target wrote."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from vllm_redrafter.checkpoints.acceptance import PerSampling
from vllm_redrafter.checkpoints.fit import misfits_of, require_fit
from vllm_redrafter.checkpoints.reading import Checkpoint
from vllm_redrafter.config import ReDrafterConfig, TreeKind
from vllm_redrafter.data.captured import CapturedRows, states_of
from vllm_redrafter.data.rows import DatasetRows, TextRows
from vllm_redrafter.data.source import WrittenData, held_out_conversations, read_all
from vllm_redrafter.data.target import Target
from vllm_redrafter.evaluation.config import EvaluationConfig
from vllm_redrafter.heads.head import DraftHead
from vllm_redrafter.replay.acceptance import measure_acceptance
from vllm_redrafter.replay.batches import batches_by_length
from vllm_redrafter.replay.estimate import (
    Acceptance,
    compare_candidates,
    estimate_acceptance,
    estimate_matches,
    estimate_shapes,
    fewest,
)
from vllm_redrafter.replay.target import load_ends, load_target, read_target
from vllm_redrafter.training.distillation import predictions
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.progress import progress_bar

CONTEXT_MATCHES = ReDrafterConfig.context_matches
"""Matches whose gain an evaluation measures."""
RANKS = (1, 2, 4, 8)
"""k of the top-k accuracies."""
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
        accuracy: [L, RANKS] shares of positions whose token is among the drafter's best.
        acceptance: how the nodes of `served` are accepted.
        with_matches: of `served` beside CONTEXT_MATCHES prompt-lookup (n-gram) matches.
        matches_alone: of these without a drafter, with the same K.
        by_candidates: of the fastest shape by number of candidates, see `compare_candidates`.
    """

    results: list[_ShapeResult]
    best: _ShapeResult
    served: ReDrafterConfig
    config: EvaluationConfig
    accuracy: Tensor
    acceptance: PerSampling
    with_matches: Acceptance
    matches_alone: Acceptance
    by_candidates: dict[int, Acceptance]


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

        def advance() -> None:
            progress.update(task, advance=1)

        totals = estimate_shapes(drafter, target, rows, grid, BATCH_SIZE, on_replay=advance)
    if not totals[0].steps:
        raise ConfigError("evaluation: the text has no answer of two tokens or more")
    costs = map(config.step_cost, grid)
    return [_ShapeResult(*result) for result in zip(grid, totals, costs, strict=True)]


@torch.no_grad()
def _top_accuracy(drafter: DraftHead, target: Any, rows: TextRows, num_steps: int) -> Tensor:
    """[L, RANKS]: how often the text's token is among the drafter's best, teacher-forced.

    NaN for a step that no position counts for.
    """
    hits, counts = torch.zeros(num_steps, len(RANKS)), torch.zeros(num_steps, 1)
    device = target.get_input_embeddings().weight.device
    for batch in batches_by_length(rows, 8, device, num_steps + 2):
        outputs = read_target(target, batch, drafter.config.target_layers)
        found = predictions(drafter, batch, outputs, num_steps)
        labels = batch.tokens.flatten()[found.start + found.step + 1]
        for depth in range(num_steps):
            of_depth = (found.step == depth + 1).nonzero().squeeze(1)
            counts[depth] += len(of_depth)
            for part in torch.split(of_depth, 1024):
                logits = drafter.layer_of(depth)(found.features[part])
                kept = min(max(RANKS), logits.shape[-1])
                best = drafter.target_tokens(logits.topk(kept, dim=-1).indices)
                hit = best == labels[part].unsqueeze(1)
                hits[depth] += torch.tensor([int(hit[:, :k].any(dim=1).sum()) for k in RANKS])
    return hits / counts


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
    text = _text(written, config.held_out, config.seed, config.max_length)
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
    beside = replace(served, context_matches=CONTEXT_MATCHES)
    sampled = written.sampled[text.indices]
    return Evaluation(
        results=results,
        best=best,
        served=served,
        config=config,
        accuracy=_top_accuracy(drafter, target, rows, max(s.beam_length for s in grid)),
        acceptance=measure_acceptance(drafter, target, rows, sampled, served),
        with_matches=estimate_acceptance(drafter, target, rows, beside),
        matches_alone=estimate_matches(text, beside, drafter.config.vocab_size),
        by_candidates=by_candidates,
    )


def _text(written: WrittenData, held_out: int | None, seed: int, max_length: int) -> DatasetRows:
    indices = list(range(len(written.dataset)))
    if held_out is not None:
        away = held_out_conversations(written.conversations, held_out, seed)
        indices = away.nonzero().flatten().tolist()
    return DatasetRows(written.dataset, indices, max_length)
