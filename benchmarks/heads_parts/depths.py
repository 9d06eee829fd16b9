"""By depth: what one head gains on another by its first tokens, and what by those that follow.

With p_j how often some node of depth j is right where one of depth j - 1 was, a step yields

    1 + p_1 + p_1 p_2 + … + p_1 ⋯ p_L

tokens, so that the p_j of two heads can be exchanged one by one, on paper: a head's first draft
token comes of the hidden state alone, the later ones of what it knows of the drafted tokens, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from operator import mul
from statistics import mean
from typing import Any

from rich.table import Table

Rates = Sequence[float]


def tokens_per_step(rates: Rates) -> float:
    """What a step yields with these p_1, p_2, …."""
    return 1.0 + sum(accumulate(rates, mul))


def rates_of(runs: Sequence[Mapping[str, Any]], text: str, shape: str) -> list[float]:
    """p_1, p_2, … of one head: the mean of its runs, a seed each."""
    counts = [run["texts"][text][shape] for run in runs]
    by_run = [
        [right / above if above else 0.0 for above, right in pairwise([c["steps"], *c["by_depth"]])]
        for c in counts
    ]
    return [mean(rates) for rates in zip(*by_run, strict=True)]


def exchanged(rates: Rates, other: Rates) -> dict[str, float]:
    """Tokens per step over the other head's: as it is, and with some of the p_j exchanged."""
    first, later = rates[0], list(rates[1:])
    yields = {
        "as it is": rates,
        "its first alone": [first, *other[1:]],
        "its later ones alone": [other[0], *later],
        "later ones as its first": [first] * len(rates),
    }
    return {name: tokens_per_step(p) / tokens_per_step(other) for name, p in yields.items()}


def table(runs: Sequence[Mapping[str, Any]], baseline: str) -> Table:
    """Of the heads that were trained with one loss, over the baseline.

    Args:
        runs: of one loss or several; heads are compared under the same one.
        baseline: the name of a head among them.
    """
    made = Table(title=f"By depth, and × {baseline} with p exchanged between the two")
    for column in ("head", "loss", "text", "shape", "p by depth", "tokens per step"):
        made.add_column(column)
    columns = list(exchanged([0.0], [0.0]))
    for column in columns:
        made.add_column(column, justify="right")
    grouped: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for run in runs:
        grouped.setdefault((run["head"], run["loss"]), []).append(run)
    for (head, loss), same in grouped.items():
        others = grouped.get((baseline, loss))
        for text, shape in _measured(same, others or ()):
            rates, other = (rates_of(each, text, shape) for each in (same, others or ()))
            found = exchanged(rates, other)
            made.add_row(
                head,
                loss,
                text,
                shape,
                " ".join(f"{p:.2f}" for p in rates),
                f"{tokens_per_step(rates):.2f}",
                *(f"{found[column]:.2f}" for column in columns),
            )
    return made


def _measured(
    runs: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str]]:
    """Text and shape of what all runs have; none without others."""
    had = [
        {(text, shape) for text, shapes in run["texts"].items() for shape in shapes}
        for run in (*runs, *others)
    ]
    common = set.intersection(*had) if others else set()
    first = runs[0]["texts"]
    return [(t, s) for t, shapes in first.items() for s in shapes if (t, s) in common]
