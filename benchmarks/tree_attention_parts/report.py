"""From times to bandwidths, ratios and goals. Imports neither torch nor Triton."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from shared_parts.timing import Timing


@dataclass(frozen=True)
class Missing:
    """Why there is no time: shown in the table's cell and in full below it."""

    reason: str


Cell = Timing | Missing


def ratio(above: Cell, below: Cell) -> float | None:
    if isinstance(above, Missing) or isinstance(below, Missing):
        return None
    return above.median / below.median


@dataclass(frozen=True)
class Check:
    """A kernel beside its reference.

    Attributes:
        error: the largest difference, as a share of the reference's largest number; of kernels
            that move integers and rows, how many differ.
        tolerance: the largest error allowed.
    """

    kernel: str
    case: str
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance


@dataclass(frozen=True)
class AttentionResult:
    """One case.

    Attributes:
        heads, batch, context, nodes: what was measured; `nodes` is the tree shape's label.
        rows: nodes of all trees together.
        leaves: of all trees together: how many beams there are without dedup.
        floor_bytes: see `Case.floor_bytes`.
        tree: from a CUDA graph, as are the others but `launched`.
        launched: the same, called from Python.
        one_node: (a) plain decoding by the same kernel.
        flex: (b) flex_attention, compiled, on contiguous K and V.
        beams: (c) every leaf's path a sequence of its own.
    """

    heads: str
    batch: int
    context: int
    nodes: str
    rows: int
    leaves: int
    floor_bytes: int
    tree: Cell
    launched: Cell
    one_node: Cell
    flex: Cell
    beams: Cell

    def __str__(self) -> str:
        return f"{self.heads}, batch {self.batch}, context {self.context}, nodes {self.nodes}"

    @property
    def gbps(self) -> float | None:
        """Of the floor's bytes; what the kernel moves beyond them does not count."""
        if isinstance(self.tree, Missing):
            return None
        return self.floor_bytes / self.tree.median / 1000


STEP = "accept_path + compact_kv"
BUILD = "build_tree"


@dataclass(frozen=True)
class StepResult:
    """A kernel (or two) around attention.

    Attributes:
        kernel: STEP or BUILD.
        heads: empty where they do not matter.
        layers: of the target.
        floor_bytes: cache rows read and written; 0 where latency is all there is.
        graph: from a CUDA graph.
        launched: called from Python.
    """

    kernel: str
    heads: str
    batch: int
    nodes: str
    layers: int
    floor_bytes: int
    graph: Cell
    launched: Cell

    def __str__(self) -> str:
        where = f"{self.heads}, " if self.heads else ""
        return f"{where}batch {self.batch}, nodes {self.nodes}"


def floor_us(num_bytes: int, copy_gbps: float) -> float:
    """The time that these bytes take at the measured copy bandwidth."""
    return num_bytes / copy_gbps / 1000


R = TypeVar("R")


@dataclass(frozen=True)
class Goal(Generic[R]):
    """A bound on a value of some results; the worst of them has to keep it.

    Attributes:
        text: what is asked for.
        value: of one result; None if it was not measured.
        subject: whether a result is of the kind that the value is about.
        counts: whether it is in the range that the goal is set for.
        limit: the bound.
        at_least: whether it bounds from below.
        form: prints a value.
    """

    text: str
    value: Callable[[R], float | None]
    subject: Callable[[R], bool]
    counts: Callable[[R], bool]
    limit: float
    at_least: bool
    form: Callable[[float], str]

    def judge(self, results: Iterable[R]) -> Verdict:
        inside: list[tuple[float, str]] = []
        outside: list[tuple[float, str]] = []
        failed = 0
        for result in filter(self.subject, results):
            value = self.value(result)
            if value is not None:
                (inside if self.counts(result) else outside).append((value, str(result)))
            elif self.counts(result):
                failed += 1
        worst, elsewhere = self._worst(inside), self._worst(outside)
        if worst is None:
            status = "not measured"
        else:
            kept = worst[0] >= self.limit if self.at_least else worst[0] <= self.limit
            status = "met" if kept and not failed else "missed"
        return Verdict(
            goal=self.text,
            status=status,
            worst=None if worst is None else f"{self.form(worst[0])} ({worst[1]})",
            elsewhere=None if elsewhere is None else f"{self.form(elsewhere[0])} ({elsewhere[1]})",
            measured=len(inside),
            failed=failed,
        )

    def _worst(self, found: list[tuple[float, str]]) -> tuple[float, str] | None:
        if not found:
            return None
        return min(found) if self.at_least else max(found)


@dataclass(frozen=True)
class Verdict:
    """How a goal fared.

    Attributes:
        status: met, missed or not measured; a case in range whose measurement failed is a miss.
        worst: the worst value in the goal's range, and where.
        elsewhere: the worst value outside of it, for information.
        measured, failed: cases in range.
    """

    goal: str
    status: str
    worst: str | None
    elsewhere: str | None
    measured: int
    failed: int


def judge(
    attention: Sequence[AttentionResult], steps: Sequence[StepResult], copy_gbps: float
) -> list[Verdict]:
    """All goals, which are set for an H200."""

    def share(result: AttentionResult) -> float | None:
        return None if result.gbps is None else result.gbps / copy_gbps

    def large(result: AttentionResult) -> bool:
        return result.context >= 4096 and result.batch >= 8

    bandwidth = Goal[AttentionResult](
        "at least 80 % of the copy bandwidth (context ≥ 4k, batch ≥ 8)",
        share,
        lambda result: True,
        large,
        0.80,
        True,
        lambda value: f"{value:.0%}",
    )
    nodes = Goal[AttentionResult](
        "32 nodes cost at most 1.10 × one node (context ≥ 4k, batch ≥ 8)",
        lambda result: ratio(result.tree, result.one_node),
        lambda result: result.nodes == "32",
        large,
        1.10,
        False,
        lambda value: f"{value:.2f} ×",
    )
    beams = Goal[AttentionResult](
        "at least 3 × faster than 8 beams × 5 without dedup (context ≥ 4k, batch ≥ 8)",
        lambda result: ratio(result.beams, result.tree),
        lambda result: result.nodes == "8x5",
        large,
        3.0,
        True,
        lambda value: f"{value:.2f} ×",
    )
    step = Goal[StepResult](
        f"{STEP} take at most 20 µs in a graph (batch 8, 32 layers)",
        lambda result: None if isinstance(result.graph, Missing) else result.graph.median,
        lambda result: result.kernel == STEP,
        lambda result: result.batch == 8 and result.layers == 32,
        20.0,
        False,
        lambda value: f"{value:.1f} µs",
    )
    return [*(goal.judge(attention) for goal in (bandwidth, nodes, beams)), step.judge(steps)]
