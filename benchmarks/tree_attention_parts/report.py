"""From times to bandwidths and ratios. Imports neither torch nor Triton."""

from __future__ import annotations

from dataclasses import dataclass

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
        error: the largest difference, as a share of the reference's largest number.
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
        beams: (b) every leaf's path a sequence of its own.
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
    beams: Cell

    def __str__(self) -> str:
        return f"{self.heads}, batch {self.batch}, context {self.context}, nodes {self.nodes}"

    @property
    def gbps(self) -> float | None:
        """Of the floor's bytes; what the kernel moves beyond them does not count."""
        if isinstance(self.tree, Missing):
            return None
        return self.floor_bytes / self.tree.median / 1000


def floor_us(num_bytes: int, copy_gbps: float) -> float:
    """The time that these bytes take at the measured copy bandwidth."""
    return num_bytes / copy_gbps / 1000
