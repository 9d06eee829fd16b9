"""`vllm-redrafter evaluate`: how good a drafter is, without serving it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from vllm_redrafter.checkpoints.acceptance_record import (
    NOTHING_RECORDED,
    ByKind,
    acceptance_entry,
)
from vllm_redrafter.checkpoints.fit import differences_from
from vllm_redrafter.checkpoints.reading import load_drafter
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.data.captured import CapturedRows, check_hidden_size, states_of
from vllm_redrafter.data.rows import DatasetRows, TextRows
from vllm_redrafter.data.source import held_out_conversations, read_all
from vllm_redrafter.heads.fp8 import rounded_rows
from vllm_redrafter.heads.head import DraftHead
from vllm_redrafter.heads.target_layers import missing_layers
from vllm_redrafter.training.estimate import Acceptance, batches, replay, top_accuracy
from vllm_redrafter.training.measured_acceptance import measure_acceptance
from vllm_redrafter.training.target import load_ends, load_target, read_target
from vllm_redrafter.training.training_config import EvaluationConfig
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.progress import progress_bar

RANKS = (1, 2, 4, 8)
"""k of the top-k accuracies."""


class Costs(Protocol):
    """What steps cost, assumed (`StepCosts`) or measured (`MeasuredCosts`)."""

    def of(self, shape: ReDrafterConfig) -> float:
        """A step of this shape, in units of a plain step."""
        ...

    def check(self, shapes: Iterable[ReDrafterConfig]) -> None:
        """Raises ConfigError where the costs of one of the shapes are not known."""
        ...

    def facts(self) -> dict[str, Any]:
        """For a file of figures."""
        ...


@dataclass(frozen=True)
class ShapeResult:
    """One shape on the grid."""

    shape: ReDrafterConfig
    acceptance: Acceptance
    costs: Costs

    @property
    def speed_up(self) -> float:
        """Over plain decoding, if the costs are as given."""
        return self.acceptance.tokens_per_step / self.costs.of(self.shape)


@dataclass(frozen=True)
class Evaluation:
    """Results of the whole grid.

    Attributes:
        results: one per shape.
        accuracy: [L, RANKS] shares of positions whose token is among the drafter's best.
        acceptance: how nodes of the fastest shape are accepted.
    """

    results: list[ShapeResult]
    accuracy: Tensor
    acceptance: ByKind = NOTHING_RECORDED

    @property
    def best(self) -> ShapeResult:
        """The fastest at the given costs."""
        return max(self.results, key=lambda result: result.speed_up)

    def to_json(self) -> str:
        """All figures."""
        return json.dumps(
            {
                "results": [
                    {
                        **asdict(result.shape),
                        "tokens_per_step": result.acceptance.tokens_per_step,
                        "steps": result.acceptance.steps,
                        "accepted_by_depth": result.acceptance.by_depth,
                        "speed_up": result.speed_up,
                    }
                    for result in self.results
                ],
                "costs": self.results[0].costs.facts(),
                "top_accuracy": {
                    f"top-{rank}": self.accuracy[:, column].tolist()
                    for column, rank in enumerate(RANKS)
                },
                **acceptance_entry(self.acceptance),
            },
            indent=2,
        )


def shapes(
    beam_widths: Sequence[int], beam_lengths: Sequence[int], num_nodes: Sequence[int]
) -> list[ReDrafterConfig]:
    """The grid; a K that a search cannot fill is left out, for a smaller one is the same.

    Raises:
        ConfigError: a value out of range, or nothing is left.
    """
    grid = []
    for width in beam_widths:
        for length in beam_lengths:
            wanted = [ReDrafterConfig(k, width, length) for k in sorted(set(num_nodes))]
            grid += [
                shape for shape in wanted if shape.num_speculative_tokens <= shape.max_explored
            ]
    if not grid:
        raise ConfigError(
            f"evaluation: no search of widths {list(beam_widths)} and lengths "
            f"{list(beam_lengths)} explores {min(num_nodes, default=0)} nodes; ask for fewer"
        )
    return grid


def evaluate_shapes(
    drafter: DraftHead,
    target: Any,
    rows: TextRows,
    grid: Sequence[ReDrafterConfig],
    costs: Costs,
    console: Console | None = None,
    batch_size: int = 16,
) -> Evaluation:
    """Replay the decoding of target-written text with every shape.

    Args:
        drafter: the draft head.
        target: the transformers model that wrote the text.
        rows: the text.
        grid: the shapes.
        costs: for the recommendation.
        console: where the progress bar goes.
        batch_size: rows read by the target at once.

    Raises:
        ConfigError: there is nothing to replay, or the head cannot draft as far as a shape asks.
    """
    for shape in grid:
        drafter.config.require_beam_length("evaluation", shape.beam_length)
    totals = [Acceptance(0, 0)] * len(grid)
    embed = target.get_input_embeddings()
    with progress_bar(console) as progress:
        num_replays = len(grid) * -(-len(rows) // batch_size)
        task = progress.add_task("replaying", total=num_replays, status="")
        for batch in batches(rows, batch_size, embed.weight.device):
            outputs = read_target(target, batch, drafter.config.target_layers)
            for index, shape in enumerate(grid):
                totals[index] += replay(drafter, embed, outputs, batch, shape)
                progress.update(task, advance=1)
    if not totals[0].steps:
        raise ConfigError("evaluation: the text has no answer of two tokens or more")
    results = [ShapeResult(s, total, costs) for s, total in zip(grid, totals, strict=True)]
    length = max(shape.beam_length for shape in grid)
    return Evaluation(results, top_accuracy(drafter, target, rows, length, RANKS))


@dataclass(frozen=True)
class EvaluationJob:
    """What to evaluate, and on what.

    Attributes:
        target: folder or hub id.
        drafter: checkpoint folder or hub id.
        data: folders that generate-data wrote, other than the training's; or the training's, all
            of them, with the config's `held_out` and `seed` as they were given to `train`.
        grid: the shapes.
        costs: for the recommendation.
        config: what of the data is read, and how.
        other_target: the data may come from another target with the same tokenizer.
        device: where to compute; None for a GPU, if there is one.
        hidden_states: folders that capture wrote, one for each of `data`; the target's layers are
            not loaded then. None of them: the target computes its hidden states.
    """

    target: str
    drafter: str
    data: tuple[Path, ...]
    grid: list[ReDrafterConfig]
    costs: Costs
    config: EvaluationConfig = field(default_factory=EvaluationConfig)
    other_target: bool = False
    device: str | None = None
    hidden_states: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Material:
    """What an evaluation works on.

    Attributes:
        drafter: the draft head, of the target's dtype.
        target: the transformers model; its two ends alone where the rows bring hidden states.
        rows: text that it wrote.
        sampled: [rows] bool, which of it was sampled, not written greedily.
        sampling: how it was written, in words.
    """

    drafter: DraftHead
    target: Any
    rows: TextRows
    sampled: Tensor
    sampling: str


def load_material(
    target: str,
    drafter: str,
    data: Sequence[Path],
    config: EvaluationConfig,
    other_target: bool = False,
    device: str | None = None,
    hidden_states: Sequence[Path] = (),
) -> Material:
    """Load both models and the text; the parameters are those of `EvaluationJob`.

    Raises:
        ConfigError: input that cannot work.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    written = read_all(data, target, not other_target)
    indices = list(range(len(written.dataset)))
    if config.held_out is not None:
        away = held_out_conversations(written.conversations, config.held_out, config.seed)
        indices = away.nonzero().flatten().tolist()
    read = DatasetRows(written.dataset, indices, config.max_length)
    rows: TextRows = read
    states = states_of(written, hidden_states, not other_target) if hidden_states else []
    model = (load_ends if states else load_target)(target, config.target_dtype, device)
    head = load_drafter(drafter, model.dtype).to(device)
    if states:
        rows = captured = CapturedRows(read, states, head.config.target_layers)
        check_hidden_size(captured, model.config.get_text_config().hidden_size)
    if config.head_dtype == "fp8":
        for layer in head.vocabulary_layers:
            layer.weight.data = rounded_rows(layer.weight)
    for size in differences_from(head.config, model.config):
        raise ConfigError(
            f"drafter {drafter!r} has {size.entry} {size.drafter}, target {target!r} "
            f"{size.target}: give the target it was trained for"
        )
    num_layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    # Captured states have been asked for their layers.
    if not states and (missing := missing_layers(head.config.target_layers, num_layers)):
        raise ConfigError(
            f"drafter {drafter!r} does not fit target {target!r}: {missing}: give the target it "
            "was trained for"
        )
    ways = dict.fromkeys((i.sampling.temperature, i.sampling.top_p) for i in written.infos)
    sampling = " and ".join(f"temperature {way[0]:g}, top-p {way[1]:g}" for way in ways)
    return Material(head, model, rows, written.sampled[indices], sampling)


def evaluate(job: EvaluationJob, console: Console | None = None) -> Evaluation:
    """Evaluate a drafter.

    Raises:
        ConfigError: input that cannot work.
    """
    job.costs.check(job.grid)
    found = load_material(
        job.target,
        job.drafter,
        job.data,
        job.config,
        job.other_target,
        job.device,
        job.hidden_states,
    )
    if console:
        console.print(
            f"{len(found.rows)} rows, {found.rows.lengths.sum():,} tokens, written at "
            f"{found.sampling}"
        )
    grid = [replace(shape, head_dtype=job.config.head_dtype) for shape in job.grid]
    models_and_text = found.drafter, found.target, found.rows
    evaluation = evaluate_shapes(*models_and_text, grid, job.costs, console)
    acceptance = measure_acceptance(*models_and_text, found.sampled, evaluation.best.shape)
    return replace(evaluation, acceptance=acceptance)


def print_evaluation(console: Console, evaluation: Evaluation) -> None:
    """Tables: the grid, acceptance by depth, top-k accuracy; and what to use."""
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
    console.print(recommendation(best))


def recommendation(best: ShapeResult) -> str:
    """What to serve with, by which costs."""
    shape = best.shape
    text = (
        f"{best.costs}: --spec-tokens {shape.num_speculative_tokens}, beam_width "
        f"{shape.beam_width}, beam_length {shape.beam_length} "
        f"({best.acceptance.tokens_per_step:.2f} tokens per step, {best.speed_up:.2f}×)."
    )
    if best.speed_up > 1:
        return text
    return f"{text} Even this is not faster than plain decoding."


def write_json(evaluation: Evaluation, path: Path) -> None:
    """All figures, as JSON.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_text(evaluation.to_json() + "\n")
    except OSError as error:
        raise ConfigError(f"--json {path}: cannot be written: {error}") from error


def draw_heat_map(evaluation: Evaluation, path: Path) -> None:
    """Tokens per step: a panel per K, beam widths against beam lengths.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError('--plot needs matplotlib: pip install "vllm-redrafter[train]"') from error
    matplotlib.use("Agg")  # draws without a display
    import matplotlib.pyplot as plt

    results = evaluation.results
    nodes = sorted({result.shape.num_speculative_tokens for result in results})
    widths = sorted({result.shape.beam_width for result in results})
    lengths = sorted({result.shape.beam_length for result in results})
    size = (max(2.5, 0.8 * len(widths) + 1) * len(nodes), 0.6 * len(lengths) + 2)
    figure, panels = plt.subplots(
        1, len(nodes), figsize=size, squeeze=False, sharey=True, layout="constrained"
    )
    values = [result.acceptance.tokens_per_step for result in results]
    for panel, k in zip(panels[0], nodes, strict=True):
        grid = torch.full((len(lengths), len(widths)), torch.nan)
        for result in results:
            if result.shape.num_speculative_tokens == k:
                row = lengths.index(result.shape.beam_length)
                column = widths.index(result.shape.beam_width)
                value = result.acceptance.tokens_per_step
                grid[row, column] = value
                panel.text(column, row, f"{value:.2f}", ha="center", va="center", color="white")
        panel.imshow(
            grid.numpy(),
            vmin=min(1.0, *values),
            vmax=max(values) * 1.15,
            cmap="viridis",
            origin="lower",
        )
        panel.set_title(f"K = {k}")
        panel.set_xticks(range(len(widths)), [str(width) for width in widths])
        panel.set_yticks(range(len(lengths)), [str(length) for length in lengths])
        panel.set_xlabel("beam width")
    panels[0][0].set_ylabel("beam length")
    figure.suptitle("Tokens per target step", y=1.06)
    try:
        figure.savefig(path, dpi=110, bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: cannot be written: {error}") from error
    plt.close(figure)
