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
from shared_parts.stopwatch import Stopwatch

from tree_attention_parts.cases import Case, Heads, TreeShape
from tree_attention_parts.check import check_kernels
from tree_attention_parts.measure import TooLargeError, measure_attention
from tree_attention_parts.report import AttentionResult, Check, attention_table, check_table


@dataclass
class Report:
    """What is known so far, also on disk if there is a path: a run that is cut short keeps it.

    Attributes:
        surroundings: machine, versions, options.
        copy_gbps: None where nothing is timed.
        skipped: cases that are too large, and why.
        failed: cases that could not be measured otherwise, and why.
    """

    surroundings: dict[str, Any]
    path: Path | None = None
    checks: list[Check] = field(default_factory=list)
    copy_gbps: float | None = None
    attention: list[AttentionResult] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def save(self) -> None:
        values = asdict(self)
        for check in values["checks"]:
            # None, which JSON has, for infinite, which it has not.
            check["error"] = check["error"] if check["error"] < torch.inf else None
        del values["path"]
        results.write(self.path, {**values.pop("surroundings"), **values})


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


def run(stopwatch: Stopwatch, cases: Sequence[Case], report: Report, console: Console) -> bool:
    """Check, then time; whether all kernels agreed with their references and ran."""
    heads = list(dict.fromkeys(case.heads for case in cases))
    shapes = [TreeShape.parse("16"), TreeShape.parse("8x5")]
    dtypes = [cases[0].dtype, torch.float32]
    if not check(check_kernels(heads, dtypes, shapes, stopwatch.device), report, console):
        console.print("A kernel is wrong; nothing is timed.")
        return False
    report.copy_gbps = stopwatch.copy_bandwidth()
    for case in cases:
        measure(stopwatch, case, report, console)
        report.save()
    console.print(attention_table(report.attention, report.copy_gbps))
    return not report.failed


def measure(stopwatch: Stopwatch, case: Case, report: Report, console: Console) -> None:
    """A case's figures, or why it has none: the next one is measured all the same."""
    try:
        result = measure_attention(stopwatch, case)
    except (TooLargeError, torch.OutOfMemoryError) as error:
        report.skipped.append(f"{case}: {error}")
        console.print(report.skipped[-1], markup=False)
    except Exception as error:
        report.failed.append(f"{case}: {error!r}")
        console.print(report.failed[-1], markup=False)
    else:
        report.attention.append(result)
        console.print(f"{case}: {result.tree:.1f} µs")
