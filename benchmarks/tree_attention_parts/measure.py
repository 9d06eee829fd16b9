"""What is timed in a case, and what it is compared with.

Imports the kernels: whether Triton's interpreter runs them has to be settled before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from shared_parts.timing import Timing
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tree_attention_parts.cases import Case
from tree_attention_parts.check import TOLERANCE, relative_error
from tree_attention_parts.problem import Problem, contiguous, make_problem, tree_mask
from tree_attention_parts.report import (
    BUILD,
    STEP,
    AttentionResult,
    Cell,
    Missing,
    StepResult,
)
from tree_attention_parts.steps import make_build, make_walk
from vllm_redrafter.triton_kernels.tree_attention import tree_attention

T = TypeVar("T")


class Stopwatch(Protocol):
    """See `Gpu`, of which this is what measuring needs."""

    device: torch.device

    @property
    def free_bytes(self) -> int: ...

    def in_graph(self, launch: Callable[[], object]) -> Timing: ...

    def launched(self, launch: Callable[[], object]) -> Timing: ...

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]: ...

    def copy_bandwidth(self) -> float: ...


@dataclass(frozen=True)
class Settings:
    """How cases are measured.

    Attributes:
        parts: num_parts of the trees' launches; None leaves it to the launcher.
        with_flex: compare with flex_attention.
        memory: the fraction of free GPU memory that a case may take.
        layers: of the target whose cache is compacted.
    """

    parts: int | None = None
    with_flex: bool = True
    memory: float = 0.8
    layers: int = 32


def attempt(measure: Callable[[], Cell]) -> Cell:
    """Its cell, or what it failed with."""
    try:
        return measure()
    except Exception as error:
        lines = str(error).strip().splitlines()
        return Missing(f"failed: {type(error).__name__}: {lines[0] if lines else ''}")


def allocate(
    what: str, num_bytes: int, make: Callable[[], T], stopwatch: Stopwatch, settings: Settings
) -> T | Missing:
    """What `make` makes, if its bytes are within the fraction of free memory that may be used."""
    free = stopwatch.free_bytes
    if num_bytes > settings.memory * free:
        return Missing(
            f"skipped: {what} would take {num_bytes / 1e9:.2f} GB, more than "
            f"{settings.memory:.0%} of the {free / 1e9:.2f} GB of GPU memory that are free"
        )
    try:
        return make()
    except torch.OutOfMemoryError:
        return Missing(f"skipped: out of GPU memory, {free / 1e9:.2f} GB, for {what}")


def measure_attention(
    stopwatch: Stopwatch, case: Case, settings: Settings
) -> AttentionResult | Missing:
    """All figures of a case; Missing as a whole if its caches do not fit."""
    problem = allocate_problem(stopwatch, case, settings)
    if isinstance(problem, Missing):
        return problem

    def tree() -> Tensor:
        return tree_attention(*problem.tree, num_parts=settings.parts)

    def flex() -> Cell:
        if not settings.with_flex:
            return Missing("not run: --no-flex")
        # The gathered pages exist beside the result for a moment.
        tensors = allocate(
            "flex_attention's contiguous K and V",
            2 * case.contiguous_bytes,
            lambda: contiguous(problem.tree, case.tree),
            stopwatch,
            settings,
        )
        if isinstance(tensors, Missing):
            return tensors
        return time_flex(stopwatch, case, problem, *tensors)

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
        flex=attempt(flex),
        beams=attempt(lambda: time_beams(stopwatch, case, problem)),
    )


def allocate_problem(stopwatch: Stopwatch, case: Case, settings: Settings) -> Problem | Missing:
    return allocate(
        "the KV cache",
        case.cache_bytes,
        lambda: make_problem(case, stopwatch.device),
        stopwatch,
        settings,
    )


def time_beams(stopwatch: Stopwatch, case: Case, problem: Problem) -> Cell:
    """(c): each beam apart; it has to find what the tree found."""
    different = disagreement(
        case, tree_attention(*problem.beams), tree_attention(*problem.tree)[problem.beam_rows]
    )
    return different or stopwatch.in_graph(lambda: tree_attention(*problem.beams))


def time_flex(
    stopwatch: Stopwatch, case: Case, problem: Problem, query: Tensor, keys: Tensor, values: Tensor
) -> Cell:
    """(b): flex_attention; it has to find what the tree found. Its block mask is made before."""
    device = stopwatch.device
    mask = create_block_mask(
        tree_mask(case.context, case.tree.ancestor_mask.to(device)),
        B=case.batch,
        H=None,
        Q_LEN=query.shape[2],
        KV_LEN=keys.shape[2],
        device=device,
    )
    compiled = stopwatch.compile(flex_attention)

    def launch() -> Tensor:
        return compiled(
            query, keys, values, block_mask=mask, enable_gqa=query.shape[1] != keys.shape[1]
        )

    found = launch().transpose(1, 2)[case.tree.is_node.to(device)]
    different = disagreement(case, found, tree_attention(*problem.tree))
    return different or stopwatch.in_graph(launch)


def disagreement(case: Case, found: Tensor, expected: Tensor) -> Missing | None:
    """A time for another result would be no comparison."""
    error = relative_error(found.float(), expected.float())
    if error <= 2 * TOLERANCE[case.dtype]:
        return None
    return Missing(f"wrong: differs from tree attention by {error:.0%} of its largest number")


def measure_walk(stopwatch: Stopwatch, case: Case, settings: Settings) -> StepResult | Missing:
    """accept_path and compact_kv, together."""
    layers = settings.layers
    walk = allocate(
        f"{layers} layers' KV cache",
        layers * case.paged_bytes,
        lambda: make_walk(case, layers, stopwatch.device),
        stopwatch,
        settings,
    )
    if isinstance(walk, Missing):
        return walk
    return StepResult(
        kernel=STEP,
        heads=case.heads.name,
        batch=case.batch,
        nodes=case.shape.label,
        layers=layers,
        floor_bytes=walk.moved_bytes,
        graph=attempt(lambda: stopwatch.in_graph(walk.accept_and_compact)),
        launched=attempt(lambda: stopwatch.launched(walk.accept_and_compact)),
    )


def measure_build(stopwatch: Stopwatch, case: Case) -> StepResult:
    """build_tree."""
    build = make_build(case, stopwatch.device)
    return StepResult(
        kernel=BUILD,
        heads="",
        batch=case.batch,
        nodes=case.shape.label,
        layers=0,
        floor_bytes=0,
        graph=attempt(lambda: stopwatch.in_graph(build.build)),
        launched=attempt(lambda: stopwatch.launched(build.build)),
    )
