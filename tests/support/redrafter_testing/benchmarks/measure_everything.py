"""All of benchmarks/tree_attention.py's measurements, with a stopwatch that is not a GPU's.

To be run as a module, in a process of its own that Triton's interpreter was chosen for.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock, patch

import tree_attention
from rich.console import Console
from shared_parts import gpu
from tree_attention_parts import run as run_module
from tree_attention_parts.cases import HEADS
from tree_attention_parts.report import Check
from tree_attention_parts.run import Report, run

from redrafter_testing.benchmarks.tree_attention_results import CPU, TINY, tiny


class Stopwatch:
    """Runs each launch once, and invents its time."""

    name = "not a GPU"
    device = CPU
    free_bytes = 10_000_000  # the last case does not fit

    def __init__(self, failing: bool = False) -> None:
        self.failing = failing

    def in_graph(self, launch: Callable[[], object]) -> float:
        if self.failing:
            raise ValueError("out of luck")
        launch()
        return 20.0

    def copy_bandwidth(self) -> float:
        return 1000.0

    def describe(self) -> dict[str, str]:
        return {"driver": "none"}


def measure_everything(folder: Path) -> None:
    """Write what each kind of run reports into files of the folder, for tests to read."""
    cases = [tiny("4"), tiny("8", batch=1), tiny("3x2"), tiny("4", context=40_000)]
    right = [Check("tree", "a case", 0.0, 0.0)]
    wrong = [Check("tree", "a case", float("inf"), 0.0)]
    passed = {}
    for name, some, checks in (
        ("sweep", cases, right),
        ("wrong", cases[:1], wrong),
        ("failing", cases[:1], right),
    ):
        report = Report({"machine": {"gpu": "none"}}, folder / f"{name}.json")
        with (
            (folder / f"{name}.txt").open("w") as file,
            patch.object(run_module, "check_kernels", Mock(return_value=checks)),
        ):
            console = Console(file=file, width=200)
            stopwatch = Stopwatch(failing=name == "failing")
            passed[name] = run(stopwatch, some, report, console)
    (folder / "passed.json").write_text(json.dumps(passed))

    args = tree_attention.parser().parse_args(
        [
            *("--batches", "1", "--contexts", "30", "--nodes", "2", "--repeats", "1"),
            *("--output", str(folder / "options.json")),
        ]
    )
    with (
        patch.dict(HEADS, {"llama-7b": TINY}, clear=True),
        patch.object(gpu, "Gpu", lambda repeats: Stopwatch()),
        patch.object(run_module, "check_kernels", lambda *arguments: right),
    ):
        tree_attention.on_gpu(args)


if __name__ == "__main__":
    measure_everything(Path(sys.argv[1]))
