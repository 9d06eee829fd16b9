"""A run's results, and their tables. Imports neither torch nor Triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table


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
    """One case; times are medians in microseconds.

    Attributes:
        heads, batch, context, nodes: what was measured; `nodes` is the tree shape's label.
        rows: nodes of all trees together.
        leaves: of all trees together: how many beams there are without dedup.
        floor_bytes: see `Case.floor_bytes`.
        tree: all nodes at once.
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
    tree: float
    one_node: float
    beams: float

    @property
    def gbps(self) -> float:
        """Of the floor's bytes; what the kernel moves beyond them does not count."""
        return self.floor_bytes / self.tree / 1000


def _table(title: str, caption: str, left: Sequence[str], right: Sequence[str]) -> Table:
    made = Table(title=title, caption=caption, caption_justify="left")
    for name in left:
        made.add_column(name, no_wrap=True)
    for name in right:
        made.add_column(name, justify="right")
    return made


def check_table(checks: Sequence[Check]) -> Table:
    made = _table(
        "Against the references",
        "error: the largest difference, as a share of the reference's largest number (float64).",
        ("kernel", "case"),
        ("error", "allowed", "verdict"),
    )
    for check in checks:
        verdict = "agrees" if check.ok else "DIFFERS"
        figures = f"{check.error:.1e}", f"{check.tolerance:g}"
        made.add_row(check.kernel, check.case, *figures, verdict)
    return made


def attention_table(results: Sequence[AttentionResult], copy_gbps: float) -> Table:
    made = _table(
        "Tree attention",
        f"floor: the bytes that have to move, at the measured copy bandwidth, {copy_gbps:.0f} "
        "GB/s. × one node: to plain decoding by the same kernel. beams apart: their time to the "
        "tree's.",
        ("heads",),
        (
            *("batch", "context", "nodes", "floor µs", "µs", "GB/s", "of copy"),
            *("× one node", "beams apart ÷ tree"),
        ),
    )
    for result in results:
        made.add_row(
            result.heads,
            str(result.batch),
            str(result.context),
            result.nodes,
            f"{result.floor_bytes / copy_gbps / 1000:.1f}",
            f"{result.tree:.1f}",
            f"{result.gbps:.0f}",
            f"{result.gbps / copy_gbps:.0%}",
            f"{result.tree / result.one_node:.2f}",
            f"{result.beams / result.tree:.2f}",
        )
    return made
