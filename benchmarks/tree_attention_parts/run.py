"""A run of benchmarks/tree_attention.py: checks, then measurements, then tables; saved as it goes.

Imports the kernels: whether Triton's interpreter runs them has to be settled before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from shared_parts import results
from shared_parts.timing import Timing

from tree_attention_parts.cases import Case, Heads, TreeShape
from tree_attention_parts.check import check_kernels
from tree_attention_parts.measure import (
    Settings,
    Stopwatch,
    measure_attention,
)
from tree_attention_parts.report import (
    AttentionResult,
    Check,
    Missing,
    floor_us,
)
from tree_attention_parts.tables import (
    Footnotes,
    attention_table,
    check_table,
)


@dataclass
class Report:
    """What is known so far, also on disk if there is a path: a run that is cut short keeps it.

    Attributes:
        surroundings: machine, versions, options.
        copy_gbps: None where nothing is timed.
        skipped: cases that were not measured, and why.
    """

    surroundings: dict[str, Any]
    path: Path | None = None
    checks: list[Check] = field(default_factory=list)
    copy_gbps: float | None = None
    attention: list[AttentionResult] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def save(self) -> None:
        results.write(self.path, self.as_json())

    def as_json(self) -> dict[str, Any]:
        known: dict[str, Any] = {
            "benchmark": "tree_attention",
            **self.surroundings,
            # None, which JSON has, for infinite, which it has not.
            "checks": [
                {**asdict(check), "error": check.error if check.error < torch.inf else None}
                for check in self.checks
            ],
        }
        if self.copy_gbps is None:
            return {**known, "timings": None}
        return {
            **known,
            "copy_gbps": self.copy_gbps,
            "timings": {"attention": [asdict(result) for result in self.attention]},
            "skipped": self.skipped,
        }


def check_interpreted(report: Report, console: Console) -> bool:
    """All that is possible without a GPU; whether the kernels agree with their references."""
    console.print(
        "No GPU: nothing is timed. The kernels run under Triton's interpreter, on tiny cases of\n"
        "their own, and are compared with their references. Options on cases do not apply.\n"
    )
    shapes = [TreeShape.parse("8"), TreeShape.parse("3x3")]
    heads = [Heads("tiny", 4, 2, 64)]
    found = check_kernels(heads, [torch.float32], shapes, torch.device("cpu"))
    return check(found, report, console)


def check(checks: Iterable[Check], report: Report, console: Console) -> bool:
    report.checks += checks
    report.save()
    console.print(check_table(report.checks))
    return all(found.ok for found in report.checks)


def run(
    stopwatch: Stopwatch,
    cases: Sequence[Case],
    settings: Settings,
    report: Report,
    console: Console,
) -> bool:
    """Check, then time; whether all our kernels agreed with their references and ran."""
    heads = list(dict.fromkeys(case.heads for case in cases))
    shapes = [TreeShape.parse("16"), TreeShape.parse("8x5")]
    dtypes = [cases[0].dtype, torch.float32]
    if not check(check_kernels(heads, dtypes, shapes, stopwatch.device), report, console):
        console.print("A kernel is wrong; nothing is timed.")
        return False
    report.copy_gbps = stopwatch.copy_bandwidth()
    console.print(f"Copy bandwidth: {report.copy_gbps:.0f} GB/s\n")
    sweep(stopwatch, cases, settings, report, console)

    notes = Footnotes()
    console.print(attention_table(report.attention, report.copy_gbps, notes))
    for line in (*notes.lines(), *report.skipped):
        console.print(line, markup=False)
    own = [cell for result in report.attention for cell in (result.tree, result.launched)]
    return all(isinstance(cell, Timing) for cell in own)


def sweep(
    stopwatch: Stopwatch,
    cases: Sequence[Case],
    settings: Settings,
    report: Report,
    console: Console,
) -> None:
    """Attention in all cases."""
    assert report.copy_gbps is not None
    for case in cases:
        announce(case, report.copy_gbps, console)
        result = measure_attention(stopwatch, case, settings)
        if isinstance(result, Missing):
            skip(str(case), result, report, console)
        else:
            report.attention.append(result)
            time = result.tree
            said = time.reason if isinstance(time, Missing) else f"{time.median:.1f} µs"
            console.print(f"  {said}", markup=False)
        report.save()


def announce(case: Case, copy_gbps: float, console: Console) -> None:
    """The floor, before anything is timed."""
    floor = floor_us(case.floor_bytes, copy_gbps)
    console.print(f"{case}: {case.floor_bytes / 1e6:.1f} MB, floor {floor:.1f} µs")


def skip(what: str, why: Missing, report: Report, console: Console) -> None:
    report.skipped.append(f"{what}: {why.reason}")
    console.print(f"  {why.reason}", markup=False)
