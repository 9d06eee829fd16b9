"""A run's results for a terminal. Imports neither torch nor Triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich import box
from rich.table import Table

from tree_attention_parts.report import (
    AttentionResult,
    Cell,
    Check,
    Missing,
    floor_us,
    ratio,
)


@dataclass
class Footnotes:
    """Reasons for missing cells, numbered; the same reason gets the same number."""

    reasons: list[str] = field(default_factory=list)

    def mark(self, reason: str) -> str:
        if reason not in self.reasons:
            self.reasons.append(reason)
        head = reason.partition(":")[0]
        return f"{head} ({self.reasons.index(reason) + 1})"

    def time(self, cell: Cell) -> str:
        return self.mark(cell.reason) if isinstance(cell, Missing) else f"{cell.median:.1f}"

    def ratio(self, above: Cell, below: Cell) -> str:
        for cell in (above, below):
            if isinstance(cell, Missing):
                return self.mark(cell.reason)
        value = ratio(above, below)
        assert value is not None
        return f"{value:.2f}"

    def lines(self) -> list[str]:
        return [f"({number}) {reason}" for number, reason in enumerate(self.reasons, start=1)]


def _table(title: str, caption: str, left: Sequence[str], right: Sequence[str]) -> Table:
    made = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        title=title,
        caption=caption,
        title_justify="left",
        caption_justify="left",
    )
    for name in left:
        made.add_column(name, no_wrap=True)
    for name in right:
        made.add_column(name, justify="right")
    return made


def check_table(checks: Sequence[Check]) -> Table:
    made = _table(
        "Against the references",
        "error: the largest difference, as a share of the reference's largest number (float64); "
        "of kernels that move integers and rows, how many differ.",
        ("kernel", "case"),
        ("error", "allowed", "verdict"),
    )
    for check in checks:
        made.add_row(
            check.kernel,
            check.case,
            f"{check.error:.1e}" if check.error else "0",
            f"{check.tolerance:g}",
            "agrees" if check.ok else "DIFFERS",
        )
    return made


def attention_table(
    results: Sequence[AttentionResult], copy_gbps: float, notes: Footnotes
) -> Table:
    made = _table(
        "Tree attention",
        f"floor: the bytes that have to move, at the measured copy bandwidth, {copy_gbps:.0f} "
        "GB/s. µs, GB/s, of copy: the tree, in a CUDA graph; launched: from Python. × one node: "
        "to plain decoding by the same kernel. beams apart: their time to the tree's.",
        ("heads",),
        (
            *("batch", "context", "nodes", "floor µs", "µs", "launched µs", "GB/s", "of copy"),
            *("× one node", "beams apart ÷ tree"),
        ),
    )
    previous = None
    for result in results:
        group = (result.heads, result.batch, result.context)
        if previous not in (None, group):
            made.add_section()
        previous = group
        gbps = result.gbps
        made.add_row(
            result.heads,
            str(result.batch),
            str(result.context),
            result.nodes,
            f"{floor_us(result.floor_bytes, copy_gbps):.1f}",
            notes.time(result.tree),
            notes.time(result.launched),
            "–" if gbps is None else f"{gbps:.0f}",
            "–" if gbps is None else f"{gbps / copy_gbps:.0%}",
            notes.ratio(result.tree, result.one_node),
            notes.ratio(result.beams, result.tree),
        )
    return made
