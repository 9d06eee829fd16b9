"""The table of all runs, and what is written of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from rich.table import Table

from vllm_redrafter.training.estimate import Acceptance


@dataclass(frozen=True)
class Row:
    """One way of drafting: its runs, a seed each.

    Attributes:
        head: the variant's name.
        loss: that it was trained with.
        values: tokens per step of each seed, by text and shape.
        parameters: all of its parameters.
    """

    head: str
    loss: str
    values: Mapping[tuple[str, str], Sequence[float]]
    parameters: int

    def mean(self, text: str, shape: str) -> float:
        return mean(self.values[text, shape])


def rows_of(runs: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row per head and loss, in the order in which they first come."""
    grouped: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for run in sorted(runs, key=lambda run: run["seed"]):
        grouped.setdefault((run["head"], run["loss"]), []).append(run)
    return [
        Row(head, loss, _values(same), same[0]["parameters"])
        for (head, loss), same in grouped.items()
    ]


def _values(runs: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], list[float]]:
    found: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        for text, shapes in run["texts"].items():
            for shape, counts in shapes.items():
                acceptance = Acceptance(counts["steps"], counts["tokens"])
                found.setdefault((text, shape), []).append(acceptance.tokens_per_step)
    return found


def table(rows: Sequence[Row]) -> Table:
    """Tokens per step: mean, lowest to highest seed, and over the first row's mean."""
    made = Table(title="Tokens per target step")
    for column in ("head", "loss", "seeds", "parameters"):
        made.add_column(column, justify="left" if column in ("head", "loss") else "right")
    columns = list(dict.fromkeys(column for row in rows for column in row.values))
    for text, shape in columns:
        made.add_column(f"{text}, {shape}", justify="right")
    for row in rows:
        made.add_row(
            row.head,
            row.loss,
            str(len(next(iter(row.values.values())))),
            f"{row.parameters / 1e6:.2f} M",
            *(_cell(row, rows[0], *column) for column in columns),
        )
    return made


def _cell(row: Row, first: Row, text: str, shape: str) -> str:
    values = row.values.get((text, shape), ())
    if not values:
        return ""
    seeds = f" ({min(values):.3f}–{max(values):.3f})" if len(values) > 1 else ""
    if (text, shape) not in first.values:
        return f"{mean(values):.3f}{seeds}"
    return f"{mean(values):.3f}{seeds} {mean(values) / first.mean(text, shape):.2f}×"
