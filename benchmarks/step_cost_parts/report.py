"""From steps' times to what speculation costs, and what it must accept to pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

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


def as_json(costs: Sequence[Cost]) -> list[dict[str, Any]]:
    """The figures; `ratio` is how many plain steps of the same kind one ReDrafter step takes."""
    plain = {(c.target, c.requests, c.context): c.step for c in costs if c.nodes == 0}
    return [{**asdict(c), "ratio": c.step / plain[c.target, c.requests, c.context]} for c in costs]


def print_report(costs: Sequence[Cost], console: Console) -> None:
    """A table of all targets; times in milliseconds."""
    table = Table(title="One decoding step, ms")
    for name in ("target", "batch", "context", "K", "step", "ratio", *PARTS):
        table.add_column(name, justify="left" if name == "target" else "right")
    for cost in as_json(costs):
        table.add_row(
            *(str(cost[name]) for name in ("target", "requests", "context", "nodes")),
            f"{cost['step']:.2f}",
            f"{cost['ratio']:.2f}",
            *(f"{cost['parts'][part]:.2f}" for part in PARTS),
        )
    console.print(table)
    console.print("ratio: to a plain step, K = 0; so many tokens must a step yield to pay.")
