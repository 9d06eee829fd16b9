# SPDX-License-Identifier: Apache-2.0
"""Draw docs/speedups.svg: tokens per second over plain vLLM's, of results in benchmarks/results.

The picture follows the reader's light or dark scheme. Run it when one of its results is replaced.
"""

from __future__ import annotations

import json
from pathlib import Path

REPO = Path(__file__).parents[1]
H100, LOAD, SUITES = (
    f"throughput-{name}.json"
    for name in (
        "llama-3-8b-sizes-h100-2026-11-27",
        "smollm2-adaptive-lengths-cpu-2026-11-25",
        "smollm2-suites-cpu-2026-11-27",
    )
)
GROUPS = (
    ("H100, a small pair at 8B costs, greedy", H100, 0.0, "4x5:12"),
    ("H100, the same, temperature 0.7", H100, 0.7, "4x5:12"),
    ("CPU core, SmolLM2-135M, greedy, with matches", SUITES, 0.0, "4x4:12, matches 2"),
    ("CPU core, SmolLM2-135M, greedy, without matches", LOAD, 0.0, "4x4:12"),
    ("CPU core, the same, temperature 0.7", LOAD, 0.7, "4x4:12"),
)
"""Title, file, temperature and shape of the rows that are drawn, one bar per number of requests."""

LEFT, UNIT, HEIGHT, WIDTH = 190, 100, 22, 800  # in pixels; UNIT is that of 1 x plain

STYLE = """
  svg { color-scheme: light dark; }
  rect.page { fill: #ffffff; }
  text { font: 13px sans-serif; fill: #24292f; }
  .title { font-weight: bold; }
  .faster { fill: #4a7bd0; }
  .slower { fill: #d0743c; }
  .range, .plain { stroke: #24292f; stroke-width: 1.5; }
  .plain { stroke-dasharray: 3 3; }
  @media (prefers-color-scheme: dark) {
    rect.page { fill: #1e2129; }
    text { fill: #e6e6e6; }
    .range, .plain { stroke: #e6e6e6; }
  }
"""


def rows(file: str, temperature: float, shape: str) -> list[tuple[int, int, list[float]]]:
    """Requests in flight, prompts, and [median, least, most] of the repeats."""
    results = json.loads((REPO / "benchmarks" / "results" / file).read_text())
    per_request = results["settings"]["prompts_per_request"]
    drawn = []
    for row in results["rows"]:
        kind = row["temperature"], row["task"], row["method"], row["shape"]
        if kind == (temperature, None, "adaptive", shape):
            requests = row["concurrency"]
            prompts = requests * per_request if per_request else results["settings"]["num_prompts"]
            drawn.append((requests, prompts, row["ratio"]))
    return drawn


def chart() -> str:
    """The picture as SVG."""
    shapes, y, plain = [], 34, LEFT + UNIT
    for title, file, temperature, shape in GROUPS:
        shapes.append(f'<text class="title" x="10" y="{y}">{title}</text>')
        y += 8
        top = y
        for requests, prompts, (median, least, most) in rows(file, temperature, shape):
            middle, right = y + HEIGHT / 2, LEFT + UNIT * median
            kind = "faster" if median >= 1 else "slower"
            low, high = LEFT + UNIT * least, LEFT + UNIT * most
            label = f"{requests} request{'s' * (requests > 1)}, n = {prompts}"
            value = f"{median:.2f} [{least:.2f}–{most:.2f}]"
            shapes += (
                f'<text x="{LEFT - 8}" y="{middle + 4}" text-anchor="end">{label}</text>',
                f'<rect class="{kind}" x="{LEFT}" y="{y + 3}" width="{right - LEFT:.1f}" '
                f'height="{HEIGHT - 6}"/>',
                f'<path class="range" d="M{low:.1f} {middle}H{high:.1f}"/>',
                f'<text x="{max(right, high, plain) + 8:.1f}" y="{middle + 4}">{value}</text>',
            )
            y += HEIGHT
        shapes.append(f'<path class="plain" d="M{plain} {top}V{y}"/>')
        y += 24
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img">\n'
        "<title>Tokens per second over plain vLLM's, by requests in flight</title>\n"
        f"<style>{STYLE}</style>\n"
        f'<rect class="page" width="{WIDTH}" height="{y}" rx="6"/>\n'
        f'<text x="{plain}" y="{y - 10}" text-anchor="middle">plain vLLM</text>\n'
        + "\n".join(shapes)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    (REPO / "docs" / "speedups.svg").write_text(chart())
