"""What the methods yield beside plain decoding: a table, JSON, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from replay_parts.simulation import Yield
from vllm_redrafter.budget.calibration import Calibration

COLOURS = ("#e8a33d", "#c2571a", "#8a8a8a", "#5aa469", "#9b6fb0")
"""Of fixed shapes, in turn."""
ADAPTIVE_COLOUR = "#1f5a94"


@dataclass(frozen=True)
class Result:
    """One method at one number of requests, on one text.

    Attributes:
        case: the text's name.
        method: `adaptive`, or the shape that is fixed.
        requests: N.
        plain_rate: tokens per second of plain decoding.
        yielded: what the method gives.
        calibration: of an adaptive method's acceptance probabilities; None of others.
    """

    case: str
    method: str
    requests: int
    plain_rate: float
    yielded: Yield
    calibration: Calibration | None

    @property
    def ratio(self) -> float:
        """Throughput as a multiple of plain decoding's."""
        return self.yielded.tokens_per_second / self.plain_rate


def as_json(results: Sequence[Result]) -> list[dict[str, Any]]:
    return [{**asdict(result), "ratio": result.ratio} for result in results]


def print_results(results: Sequence[Result], console: Console) -> None:
    """A table per text: a line for each number of requests."""
    for case in dict.fromkeys(result.case for result in results):
        found = [result for result in results if result.case == case]
        methods = list(dict.fromkeys(result.method for result in found))
        table = Table(title=f"{case}: × plain decoding (arithmetic, nothing measured)")
        for name in ("requests", *methods, "nodes", "undrafted", "calibration error"):
            table.add_column(name, justify="right")
        for requests in dict.fromkeys(result.requests for result in found):
            line = {r.method: r for r in found if r.requests == requests}
            table.add_row(
                str(requests),
                *(f"{line[method].ratio:.2f}" for method in methods),
                *_adaptive_cells(line["adaptive"]),
            )
        console.print(table)
    console.print(
        "nodes: verified per request and step; undrafted: steps without a draft; calibration "
        "error: of the draft's own probabilities → of the calibrated ones. All of the adaptive "
        "method."
    )


def _adaptive_cells(result: Result) -> list[str]:
    calibration = result.calibration
    assert calibration is not None
    error = f"{calibration.draft:.3f} → {calibration.calibrated:.3f}"
    return [
        f"{result.yielded.nodes:.2f}",
        f"{result.yielded.undrafted:.0%}",
        error if calibration.judged else "–",
    ]


def plot(results: Sequence[Result], title: str, path: Path) -> None:
    """A panel per text: ratios to plain decoding by the number of requests."""
    import matplotlib

    matplotlib.use("Agg")  # draws without a display
    import matplotlib.pyplot as plt

    cases = list(dict.fromkeys(result.case for result in results))
    figure, panels = plt.subplots(
        1, len(cases), figsize=(5 * len(cases), 4), squeeze=False, layout="constrained"
    )
    for panel, case in zip(panels[0], cases, strict=True):
        found = [result for result in results if result.case == case]
        for number, method in enumerate(dict.fromkeys(result.method for result in found)):
            line = [result for result in found if result.method == method]
            adaptive = method == "adaptive"
            panel.plot(
                [result.requests for result in line],
                [result.ratio for result in line],
                label=method if adaptive else f"fixed {method}",
                marker="o",
                markersize=4,
                linewidth=2.5 if adaptive else 1.2,
                color=ADAPTIVE_COLOUR if adaptive else COLOURS[number % len(COLOURS)],
                zorder=3 if adaptive else 2,
            )
        panel.axhline(1, color="black", linewidth=0.8, linestyle="--", label="plain")
        panel.set_xscale("log", base=2)
        requests = sorted({result.requests for result in found})
        panel.set_xticks(requests, [str(n) for n in requests])
        panel.set_ylim(bottom=0)
        panel.set_xlabel("requests in flight")
        panel.set_title(case)
        panel.grid(axis="y", alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("throughput, × plain decoding")
    panels[0][-1].legend(frameon=False, fontsize="small")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=110)
    plt.close(figure)
