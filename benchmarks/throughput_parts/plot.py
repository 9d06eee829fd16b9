"""Ratios to plain decoding as grouped bars: a panel per temperature, a group per concurrency and,
where prompts have tasks, per task.

Panels stand one above the other, as many levels and methods make them wide.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # draws without a display

import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from throughput_parts.report import Row
from vllm_redrafter.data.repetition import NGRAM

COLOURS = {
    "n-gram": "#e8a33d",
    "ReDrafter": "#6a9fd4",
    "adaptive": "#1f5a94",
    "other drafter": "#5b9e6f",
    "random drafter": "#9a9a9a",
    "plain again": "#c9c9c9",
}
BAR, GAP = 0.85, 1.0
"""Widths of a bar, and of the gap between groups, in units of the distance between bars."""


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw the rows of `summarise`; above each bar its ratio and its share of repeated 8-grams."""
    temperatures = sorted({row.temperature for row in rows})
    compared = [row for row in rows if row.method != "plain"]
    widest = max(sum(row.temperature == t for row in compared) for t in temperatures)
    figure, panels = plt.subplots(
        len(temperatures),
        1,
        figsize=(max(6, 0.6 * widest + 3), 4 * len(temperatures) + 0.5),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for panel, temperature in zip(panels[:, 0], temperatures, strict=True):
        _draw_panel(panel, [row for row in rows if row.temperature == temperature])
        panel.set_title("greedy" if temperature == 0 else f"temperature {temperature:g}")
    # Room for the two lines above the highest bar; limits are shared by the panels.
    panels[0][0].set_ylim(0, 1.18 * max([1.0, *(row.ratio.high for row in compared)]))
    figure.supylabel("tokens per second, as a multiple of plain decoding's", fontsize="medium")
    named = [name for name in COLOURS if any(row.method == name for row in compared)]
    figure.legend(
        handles=[Patch(color=COLOURS[name], label=name) for name in named],
        loc="outside right upper",
        frameon=False,
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize="medium")
    figure.supxlabel(
        f"requests in flight. Above a bar: ratio, and share of repeated {NGRAM}-grams in the\n"
        "output. Lines: lowest and highest repeat.",
        fontsize="small",
    )
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _draw_panel(panel: Any, rows: Sequence[Row]) -> None:
    ticks, labels = [], []
    has_tasks = any(row.task is not None for row in rows)
    left = 0.0
    # In the order of the rows: by concurrency, and all tasks together behind the last of them.
    for level, task in dict.fromkeys((row.concurrency, row.task) for row in rows):
        group = [row for row in rows if (row.concurrency, row.task) == (level, task)]
        plain = [row.tokens_per_second.median for row in group if row.method == "plain"]
        bars = [row for row in group if row.method != "plain"]
        for i, row in enumerate(bars):
            _draw_bar(panel, left + i, row)
        ticks.append(left + (len(bars) - 1) / 2)
        named = f"{task or 'all'}, " if has_tasks else ""
        labels.append(f"{named}{level}\n(plain: {plain[0]:.0f} tok/s)")
        left += len(bars) + GAP
    panel.set_xticks(ticks, labels)
    panel.tick_params(axis="x", length=0)
    panel.axhline(1, color="black", linewidth=0.8, linestyle="--", zorder=3)
    panel.grid(axis="y", alpha=0.3)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def _draw_bar(panel: Any, x: float, row: Row) -> None:
    ratio = row.ratio
    below, above = ratio.median - ratio.low, ratio.high - ratio.median
    panel.bar(
        x,
        ratio.median,
        width=BAR,
        color=COLOURS[row.method],
        yerr=[[below], [above]],
        error_kw={"linewidth": 1, "ecolor": "#333333"},
    )
    panel.annotate(
        f"{ratio.median:.2f}×\n{row.repeated_ngrams:.0%}",
        (x, ratio.high),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        fontsize="small",
    )
    shape = f"K={row.shape}" if row.method == "n-gram" else row.shape
    panel.annotate(
        shape,
        (x, 0),
        xytext=(0, 5),
        textcoords="offset points",
        ha="center",
        va="bottom",
        rotation=90,
        color="white",
        fontsize="small",
    )
