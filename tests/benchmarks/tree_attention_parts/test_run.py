"""A whole measurement with a stopwatch that is not a GPU's.

No test imports the kernels in this process: Triton's interpreter, once chosen, is chosen for all.
The measurement runs in a process of its own, which imports what this one does.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from redrafter_testing.benchmarks.own_process import in_own_process

ROOT = Path(__file__).parents[3]
PATH = os.pathsep.join(str(ROOT / folder) for folder in ("benchmarks", "tests/support"))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `measure_everything`'s files."""
    folder = tmp_path_factory.mktemp("measured")
    module = "redrafter_testing.benchmarks.measure_everything"
    # -P: not from the current folder.
    done = in_own_process("-P", "-m", module, str(folder), TRITON_INTERPRET="1", PYTHONPATH=PATH)
    assert done.returncode == 0, done.stderr
    return folder


def load(path: Path) -> Any:
    return json.loads(path.read_text())


def test_every_comparison_is_measured(measured: Path) -> None:
    first, second, third = load(measured / "sweep.json")["attention"]

    for result in (first, second, third):
        for name in ("tree", "one_node", "beams"):
            assert result[name] == 20.0, result
    assert (third["nodes"], third["leaves"], third["heads"]) == ("3x2", 6, "tiny")


def test_cases_beyond_memory_are_skipped_aloud(measured: Path) -> None:
    skipped = "the KV cache would take 0.04 GB, more than 80% of the 0.01 GB of GPU memory"

    assert skipped in load(measured / "sweep.json")["skipped"][0]
    assert skipped in (measured / "sweep.txt").read_text()


def test_a_wrong_kernel_is_not_timed(measured: Path) -> None:
    written = load(measured / "wrong.json")
    assert (written["copy_gbps"], written["attention"]) == (None, [])
    assert written["checks"][0]["error"] is None
    assert "nothing is timed" in (measured / "wrong.txt").read_text()


def test_success_means_that_our_kernels_are_right_and_ran(measured: Path) -> None:
    passed = load(measured / "passed.json")
    assert passed == {"sweep": True, "wrong": False, "failing": False}
    (failed,) = load(measured / "failing.json")["failed"]
    assert failed.endswith("nodes 4: ValueError('out of luck')")


def test_options_reach_the_measurement(measured: Path) -> None:
    written = load(measured / "options.json")

    assert (written["driver"], written["machine"]["gpu"]) == ("none", "not a GPU")
    assert "triton" in written["versions"] and written["repeats"] == 1
    (result,) = written["attention"]
    assert {name: result[name] for name in ("heads", "batch", "context", "nodes")} == {
        "heads": "tiny",
        "batch": 1,
        "context": 30,
        "nodes": "2",
    }
