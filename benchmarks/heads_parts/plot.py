"""Tokens per step against the number of verified nodes: a panel per text, a line per head."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draws without a display

import matplotlib.pyplot as plt

from heads_parts.report import Row


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw all rows; bars show the lowest and the highest seed."""
    texts = list(dict.fromkeys(text for text, _ in rows[0].values))
    figure, panels = plt.subplots(
        1, len(texts), figsize=(5 * len(texts) + 2, 4), squeeze=False, layout="constrained"
    )
    for panel, text in zip(panels[0], texts, strict=True):
        for row in rows:
            # A chain, which the EAGLE head alone is measured as, is no further number of nodes.
            shapes = [
                shape for t, shape in rows[0].values if (t, shape) in row.values and t == text
            ]
            means = [row.mean(text, shape) for shape in shapes]
            spread = [
                [m - min(row.values[text, s]) for s, m in zip(shapes, means, strict=True)],
                [max(row.values[text, s]) - m for s, m in zip(shapes, means, strict=True)],
            ]
            label = row.head if row.loss == rows[0].loss else f"{row.head}, {row.loss}"
            panel.errorbar(range(len(shapes)), means, spread, marker="o", capsize=3, label=label)
        panel.set_xticks(range(len(shapes)), shapes)
        panel.set_title(text)
        panel.set_xlabel("beams × length : verified nodes")
        panel.grid(axis="y", alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("tokens per target step")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize="medium")
    figure.savefig(path, dpi=100)
    plt.close(figure)
