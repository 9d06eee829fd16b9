"""From steps' times to what speculation costs, and what it must accept to pay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

PAPER_TOKENS_PER_STEP = 4.2
"""ReDrafter's paper (arXiv 2403.09919), Vicuna 7B and 13B on MT-Bench, greedy."""

PARTS = ("draft", "verify", "accept", "compact", "gap")


@dataclass(frozen=True)
class Cost:
    """A decoding step, medians in milliseconds over many.

    Attributes:
        target: the target's shape, by name.
        nodes: K, or 0 for plain decoding.
        requests, context: batch size, and tokens in the cache of each request.
        step: from one step's begin to the next's.
        parts: what it is made of, by the names of PARTS.
        steps: how many were measured.
    """

    target: str
    nodes: int
    requests: int
    context: int
    step: float
    parts: dict[str, float]
    steps: int

    @classmethod
    def of(
        cls, target: str, nodes: int, requests: int, context: int, steps: Sequence[dict[str, float]]
    ) -> Cost:
        return cls(
            target=target,
            nodes=nodes,
            requests=requests,
            context=context,
            step=median(step["step"] for step in steps),
            parts={part: median(step[part] for step in steps) for part in PARTS},
            steps=len(steps),
        )


@dataclass(frozen=True)
class Comparison:
    """A ReDrafter step beside a plain one of the same target, batch and context."""

    cost: Cost
    plain: Cost

    @property
    def ratio(self) -> float:
        """How many plain steps one ReDrafter step takes."""
        return self.cost.step / self.plain.step

    def speedup(self, tokens_per_step: float) -> float:
        """Over plain decoding, which outputs one token per step and request."""
        return tokens_per_step / self.ratio


def comparisons(costs: Iterable[Cost]) -> list[Comparison]:
    """Every ReDrafter step with its plain one; those without one are left out."""
    costs = list(costs)
    plain = {(c.target, c.requests, c.context): c for c in costs if c.nodes == 0}
    return [
        Comparison(cost, plain[key])
        for cost in costs
        if cost.nodes and (key := (cost.target, cost.requests, cost.context)) in plain
    ]


def print_report(costs: Iterable[Cost], console: Console) -> None:
    """A table per target; times in milliseconds."""
    found = comparisons(costs)
    for target in dict.fromkeys(c.cost.target for c in found):
        table = Table(title=f"{target}: one decoding step, ms")
        for name in ("batch", "context", "K", "plain", "ReDrafter", "ratio", *PARTS):
            table.add_column(name, justify="right")
        table.add_column(f"speed-up at {PAPER_TOKENS_PER_STEP} tokens/step", justify="right")
        for c in found:
            if c.cost.target == target:
                table.add_row(*_cells(c))
        console.print(table)
    console.print(
        f"The speed-up is arithmetic: {PAPER_TOKENS_PER_STEP} tokens per step, which the paper "
        "reports for trained drafters, over the ratio; weights here are random. The ratio is "
        "also the tokens per step from which on speculation is faster."
    )


def _cells(c: Comparison) -> list[str]:
    return [
        str(c.cost.requests),
        str(c.cost.context),
        str(c.cost.nodes),
        f"{c.plain.step:.2f}",
        f"{c.cost.step:.2f}",
        f"{c.ratio:.2f}",
        *(f"{c.cost.parts[part]:.2f}" for part in PARTS),
        f"{c.speedup(PAPER_TOKENS_PER_STEP):.2f}",
    ]


def as_json(costs: Iterable[Cost]) -> list[dict[str, Any]]:
    costs = list(costs)
    ratio = {id(c.cost): c.ratio for c in comparisons(costs)}
    return [{**vars(cost), "ratio": ratio.get(id(cost))} for cost in costs]
