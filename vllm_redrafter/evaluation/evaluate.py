# SPDX-License-Identifier: Apache-2.0
"""`vllm-redrafter evaluate`: how good a drafter is, by replays of what its target wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from vllm_redrafter.checkpoints.acceptance import NOTHING_RECORDED, PerSampling
from vllm_redrafter.checkpoints.fit import misfits_of, require_fit
from vllm_redrafter.checkpoints.reading import load_drafter
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
from vllm_redrafter.training.training_config import TargetDtype
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.progress import progress_bar

CONTEXT_MATCHES = ReDrafterConfig.context_matches
"""Of which an evaluation says what they bring."""
RANKS = (1, 2, 4, 8)
"""k of the top-k accuracies."""
BATCH_SIZE = 16
"""Rows that the target reads at once."""


@dataclass(frozen=True)
class ShapeResult:
    """One shape on the grid."""

    shape: ReDrafterConfig
    acceptance: Acceptance
    cost: float
    """Of a step, as assumed; a plain step is 1."""

    @property
    def speed_up(self) -> float:
        """Over plain decoding, if a step costs that."""
        return self.acceptance.tokens_per_step / self.cost


@dataclass(frozen=True)
class Evaluation:
    """Results of the whole grid.

    Attributes:
        results: one per shape.
        config: with what steps are assumed to cost.
        accuracy: [L, RANKS] shares of positions whose token is among the drafter's best.
        acceptance: how nodes of the fastest shape are accepted.
        with_matches: of the fastest shape beside CONTEXT_MATCHES continuations found in the text.
        matches_alone: of these without a drafter, with K of the same shape.
        by_candidates: of the fastest shape by C, see `compare_candidates`.
    """

    results: list[ShapeResult]
    config: EvaluationConfig
    accuracy: Tensor
    acceptance: PerSampling = NOTHING_RECORDED
    with_matches: Acceptance = field(default_factory=lambda: Acceptance(0, 0))
    matches_alone: Acceptance = field(default_factory=lambda: Acceptance(0, 0))
    by_candidates: dict[int, Acceptance] = field(default_factory=dict)

    @property
    def best(self) -> ShapeResult:
        """The fastest at the given costs."""
        return max(self.results, key=lambda result: result.speed_up)

    @property
    def served(self) -> ReDrafterConfig:
        """The fastest shape, with as few candidates as lose nearly nothing."""
        return replace(self.best.shape, candidates=fewest(self.by_candidates))


def shapes(
    beam_widths: Sequence[int],
    beam_lengths: Sequence[int],
    num_nodes: Sequence[int],
    tree: TreeKind = "explored",
) -> list[ReDrafterConfig]:
    """The grid; a K that a search cannot fill is left out, for a smaller one is the same.

    Raises:
        ConfigError: a value out of range, or nothing is left.
    """
    grid = []
    for width in beam_widths:
        for length in beam_lengths:
            shape = ReDrafterConfig(1, width, length, tree, context_matches=0)
            most = length if tree == "chain" else shape.max_explored
            nodes = sorted({k for k in num_nodes if k <= most})
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
) -> Evaluation:
    """Replay the decoding of target-written text with every shape.

    Args:
        drafter: the draft head.
        target: the transformers model that wrote the text.
        rows: the text.
        grid: the shapes.
        config: what steps are assumed to cost.
        console: where the progress bar goes.

    Raises:
        ConfigError: there is nothing to replay, or the head cannot draft as far as a shape asks.
    """
    for shape in grid:
        drafter.config.require_beam_length("evaluation", shape.beam_length)
    with progress_bar(console) as progress:
        num_replays = len(grid) * -(-len(rows) // BATCH_SIZE)
        task = progress.add_task("replaying", total=num_replays, status="")
        totals = estimate_shapes(
            drafter,
            target,
            rows,
            grid,
            BATCH_SIZE,
            on_replay=lambda: progress.update(task, advance=1),
        )
    if not totals[0].steps:
        raise ConfigError("evaluation: the text has no answer of two tokens or more")
    costs = map(config.step_cost, grid)
    results = [ShapeResult(*result) for result in zip(grid, totals, costs, strict=True)]
    length = max(shape.beam_length for shape in grid)
    return Evaluation(results, config, top_accuracy(drafter, target, rows, length))


@torch.no_grad()
def top_accuracy(drafter: DraftHead, target: Any, rows: TextRows, num_steps: int) -> Tensor:
    """How often the text's token is among the drafter's best, teacher-forced.

    Args:
        drafter: the draft head.
        target: the transformers model that wrote the text.
        rows: the text.
        num_steps: L.

    Returns:
        [L, RANKS] shares; NaN for a step that no position counts for.
    """
    hits, counts = torch.zeros(num_steps, len(RANKS)), torch.zeros(num_steps, 1)
    device = target.get_input_embeddings().weight.device
    for batch in batches_by_length(rows, 8, device, num_steps + 2):
        outputs = read_target(target, batch, drafter.config.target_layers)
        found = predictions(drafter, batch.generated, outputs, num_steps)
        labels = batch.tokens.flatten()[found.start + found.step + 1]
        for depth in range(num_steps):
            of_depth = (found.step == depth + 1).nonzero().squeeze(1)
            counts[depth] += len(of_depth)
            for part in torch.split(of_depth, 1024):
                logits = drafter.vocabulary_layer(depth)(found.features[part])
                kept = min(max(RANKS), logits.shape[-1])
                best = drafter.target_tokens(logits.topk(kept, dim=-1).indices)
                hit = best == labels[part].unsqueeze(1)
                hits[depth] += torch.tensor([int(hit[:, :k].any(dim=1).sum()) for k in RANKS])
    return hits / counts


@dataclass(frozen=True)
class EvaluationJob:
    """What to evaluate, and on what.

    Attributes:
        target: folder or hub id.
        drafter: checkpoint folder or hub id.
        data: folders that generate-data wrote, other than the training's; or the training's, all
            of them, with the config's `held_out` and `seed` as they were given to `train`.
        grid: the shapes; matches of the text are measured beside the fastest alone.
        config: what of the data is read, how, and what steps are assumed to cost.
        other_target: the data may come from another target with the same tokenizer.
        device: where to compute; None for a GPU, if there is one.
        hidden_states: folders that capture wrote, one for each of `data`; the target's layers are
            not loaded then. None of them: the target computes its hidden states.
    """

    target: str
    drafter: str
    data: tuple[Path, ...]
    grid: list[ReDrafterConfig]
    config: EvaluationConfig = field(default_factory=EvaluationConfig)
    other_target: bool = False
    device: str | None = None
    hidden_states: tuple[Path, ...] = ()


def _load_models(
    target: Target,
    drafter: str,
    target_dtype: TargetDtype,
    device: str,
    ends_only: bool = False,
) -> tuple[Any, DraftHead]:
    """The target and its drafter, which is of the target's dtype.

    Args:
        target: what was opened of it.
        drafter: folder or hub id.
        target_dtype: see `EvaluationConfig`.
        device: where to put them.
        ends_only: leave the target's layers out.

    Raises:
        ConfigError: no such models, or the drafter was trained for another target.
    """
    model = (load_ends if ends_only else load_target)(target, target_dtype, device)
    head = load_drafter(drafter, model.dtype).to(device)
    # Captured states are asked for their layers instead.
    reasons = misfits_of(head.config, target.config, with_layers=not ends_only)
    require_fit(f"drafter {drafter!r}", target.name, reasons)
    return model, head


def evaluate(job: EvaluationJob, console: Console | None = None) -> Evaluation:
    """Evaluate a drafter.

    Raises:
        ConfigError: input that cannot work.
    """
    config, check_target = job.config, not job.other_target
    opened = Target.open(job.target)
    written = read_all(job.data, opened, check_target)
    text = _text(written, config.held_out, config.seed, config.max_length)
    states = states_of(written, job.hidden_states, check_target) if job.hidden_states else []
    device = job.device or ("cuda" if torch.cuda.is_available() else "cpu")
    target, drafter = _load_models(opened, job.drafter, config.target_dtype, device, bool(states))
    rows: TextRows = text
    if states:
        sizes = drafter.config
        rows = CapturedRows(text, states, sizes.hidden_size, sizes.target_layers)
    if console:
        ways = dict.fromkeys((i.sampling.temperature, i.sampling.top_p) for i in written.infos)
        sampling = " and ".join(f"temperature {way[0]:g}, top-p {way[1]:g}" for way in ways)
        tokens = rows.lengths.sum()
        console.print(f"{len(rows)} rows, {tokens:,} tokens, written at {sampling}")
    grid = [replace(shape, tree=config.tree, context_matches=0) for shape in job.grid]
    evaluation = evaluate_shapes(drafter, target, rows, grid, config, console)
    sampled = written.sampled[text.indices]
    found = compare_candidates(drafter, target, rows, evaluation.best.shape)
    evaluation = replace(evaluation, by_candidates=found)
    served = evaluation.served
    acceptance = measure_acceptance(drafter, target, rows, sampled, served)
    beside = replace(served, context_matches=CONTEXT_MATCHES)
    return replace(
        evaluation,
        acceptance=acceptance,
        with_matches=estimate_acceptance(drafter, target, rows, beside),
        matches_alone=estimate_matches(text, beside, drafter.config.vocab_size),
    )


def _text(written: WrittenData, held_out: int | None, seed: int, max_length: int) -> DatasetRows:
    """All rows, or those of the conversations that a training held out."""
    indices = list(range(len(written.dataset)))
    if held_out is not None:
        away = held_out_conversations(written.conversations, held_out, seed)
        indices = away.nonzero().flatten().tolist()
    return DatasetRows(written.dataset, indices, max_length)
