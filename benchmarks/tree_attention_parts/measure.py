"""What is timed in a case, and what it is compared with.

Imports the kernels: whether Triton's interpreter runs them has to be settled before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from shared_parts.timing import Timing
from torch import Tensor

from tree_attention_parts.cases import Case
from tree_attention_parts.check import TOLERANCE, relative_error
from tree_attention_parts.problem import Problem, make_problem
from tree_attention_parts.report import (
    AttentionResult,
    Cell,
    Missing,
)
from vllm_redrafter.triton_kernels.tree_attention import tree_attention


class Stopwatch(Protocol):
    """See `Gpu`, of which this is what measuring needs."""

    device: torch.device

    @property
    def free_bytes(self) -> int: ...

    def in_graph(self, launch: Callable[[], object]) -> Timing: ...

    def launched(self, launch: Callable[[], object]) -> Timing: ...

    def copy_bandwidth(self) -> float: ...


@dataclass(frozen=True)
class Settings:
    """How cases are measured.

    Attributes:
        parts: num_parts of the trees' launches; None leaves it to the launcher.
        memory: the fraction of free GPU memory that a case may take.
    """

    parts: int | None = None
    memory: float = 0.8


def attempt(measure: Callable[[], Cell]) -> Cell:
    """Its cell, or what it failed with."""
    try:
        return measure()
    except Exception as error:
        lines = str(error).strip().splitlines()
        return Missing(f"failed: {type(error).__name__}: {lines[0] if lines else ''}")


def measure_attention(
    stopwatch: Stopwatch, case: Case, settings: Settings
) -> AttentionResult | Missing:
    """All figures of a case; Missing as a whole if its caches do not fit."""
    problem = allocate_problem(stopwatch, case, settings)
    if isinstance(problem, Missing):
        return problem

    def tree() -> Tensor:
        return tree_attention(*problem.tree, num_parts=settings.parts)

    return AttentionResult(
        heads=case.heads.name,
        batch=case.batch,
        context=case.context,
        nodes=case.shape.label,
        rows=int(case.tree.num_nodes.sum()),
        leaves=sum(len(paths) for paths in case.paths),
        floor_bytes=case.floor_bytes,
        tree=attempt(lambda: stopwatch.in_graph(tree)),
        launched=attempt(lambda: stopwatch.launched(tree)),
        one_node=attempt(lambda: stopwatch.in_graph(lambda: tree_attention(*problem.plain))),
        beams=attempt(lambda: time_beams(stopwatch, case, problem)),
    )


def allocate_problem(stopwatch: Stopwatch, case: Case, settings: Settings) -> Problem | Missing:
    """The case's tensors, if they fit into the part of free memory that may be used."""
    free = stopwatch.free_bytes
    if case.cache_bytes > settings.memory * free:
        return Missing(
            f"skipped: the KV cache would take {case.cache_bytes / 1e9:.2f} GB, more than "
            f"{settings.memory:.0%} of the {free / 1e9:.2f} GB of GPU memory that are free"
        )
    try:
        return make_problem(case, stopwatch.device)
    except torch.OutOfMemoryError:
        return Missing(f"skipped: out of GPU memory, {free / 1e9:.2f} GB, for the KV cache")


def time_beams(stopwatch: Stopwatch, case: Case, problem: Problem) -> Cell:
    """(b): each beam apart; it has to find what the tree found."""
    different = disagreement(
        case, tree_attention(*problem.beams), tree_attention(*problem.tree)[problem.beam_rows]
    )
    return different or stopwatch.in_graph(lambda: tree_attention(*problem.beams))


def disagreement(case: Case, found: Tensor, expected: Tensor) -> Missing | None:
    """A time for another result would be no comparison."""
    error = relative_error(found.float(), expected.float())
    if error <= 2 * TOLERANCE[case.dtype]:
        return None
    return Missing(f"wrong: differs from tree attention by {error:.0%} of its largest number")
