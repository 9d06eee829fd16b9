# SPDX-License-Identifier: Apache-2.0
"""The table of all runs."""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from rich.table import Table

from vllm_redrafter.replay.estimate import Acceptance

Values = dict[tuple[str, str], list[float]]
"""Tokens per step of each seed, by text and shape."""


def table(runs: Sequence[Mapping[str, Any]]) -> Table:
    """Tokens per step of each head: mean, lowest to highest seed, and over the first row's mean."""
    by_head: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        by_head.setdefault(run["head"], []).append(run)
    values = {head: _values(same) for head, same in by_head.items()}
    columns = list(dict.fromkeys(column for of_head in values.values() for column in of_head))
    made = Table("head", title="Tokens per target step")
    for name in ("seeds", "parameters", *(f"{text}, {shape}" for text, shape in columns)):
        made.add_column(name, justify="right")
    first = next(iter(values.values()), {})
    for head, same in by_head.items():
        size = f"{same[0]['parameters'] / 1e6:.2f} M"
        cells = (_cell(values[head].get(column), first.get(column)) for column in columns)
        made.add_row(head, str(len(same)), size, *cells)
    return made


def _values(runs: Sequence[Mapping[str, Any]]) -> Values:
    found: Values = {}
    for run in runs:
        for text, shapes in run["texts"].items():
            for shape, counts in shapes.items():
                acceptance = Acceptance(counts["steps"], counts["tokens"])
                found.setdefault((text, shape), []).append(acceptance.tokens_per_step)
    return found


def _cell(values: Sequence[float] | None, first: Sequence[float] | None) -> str:
    if not values:
        return ""
    seeds = f" ({min(values):.3f}–{max(values):.3f})" if len(values) > 1 else ""
    over = "" if first is None else f" {mean(values) / mean(first):.2f}×"
    return f"{mean(values):.3f}{seeds}{over}"
