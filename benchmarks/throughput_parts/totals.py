"""All tasks together: their measurements added up to one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from throughput_parts.engine import Generation, Run

N = TypeVar("N", int, float)


def with_totals(runs: Sequence[Run]) -> list[Run]:
    """The runs, and for each concurrency and temperature with tasks one of all its tasks.

    Args:
        runs: of one method in one repeat.

    Returns:
        `runs`, then the totals, whose task is None: outputs one after the other, and everything
        else summed.
    """
    found: dict[tuple[int, float], list[Run]] = {}
    for run in runs:
        if run.task is not None:
            found.setdefault((run.concurrency, run.temperature), []).append(run)
    return [*runs, *map(_total, found.values())]


def _total(runs: Sequence[Run]) -> Run:
    made = [run.generation for run in runs]
    parts = [run.parts for run in runs if run.parts is not None]
    return Run(
        concurrency=runs[0].concurrency,
        temperature=runs[0].temperature,
        generation=Generation(
            outputs=[output for generation in made for output in generation.outputs],
            seconds=sum(generation.seconds for generation in made),
            steps=sum(generation.steps for generation in made),
            request_steps=sum(generation.request_steps for generation in made),
        ),
        spec_decode=_summed(run.spec_decode for run in runs),
        parts=_summed(parts) if parts else None,
    )


def _summed(counted: Iterable[Mapping[str, N]]) -> dict[str, N]:
    """By name, the sum of all values."""
    total: dict[str, N] = {}
    for values in counted:
        for name, value in values.items():
            total[name] = total.get(name, 0) + value
    return total
