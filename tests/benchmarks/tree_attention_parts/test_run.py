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
from tree_attention_parts.report import STEP

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


def test_every_comparison_is_measured_or_says_why_not(measured: Path) -> None:
    first, second, third = load(measured / "sweep.json")["timings"]["attention"]

    timed = {"microseconds": [10.0, 30.0, 20.0]}
    for result in (first, second, third):
        for name in ("tree", "launched", "one_node", "beams"):
            assert result[name] == timed, result
    # See Stopwatch.compile.
    assert first["flex"] == {"reason": "failed: RuntimeError: no compiler found"}
    assert second["flex"]["reason"].startswith("wrong: differs from tree attention by 100% of its")
    assert third["flex"] == timed
    assert (third["nodes"], third["leaves"], third["heads"]) == ("3x2", 6, "tiny")


def test_cases_beyond_memory_are_skipped_aloud(measured: Path) -> None:
    skipped = "the KV cache would take 0.04 GB, more than 80% of the 0.01 GB of GPU memory"

    assert skipped in load(measured / "sweep.json")["skipped"][0]
    said = (measured / "sweep.txt").read_text()
    assert said.count(skipped) == 2  # as it happens, and below the tables


def test_floors_are_printed_before_times(measured: Path) -> None:
    lines = (measured / "sweep.txt").read_text().splitlines()
    at = lines.index("tiny, batch 2, context 20, nodes 4: 0.0 MB, floor 0.0 µs")

    assert lines[at + 1] == "  20.0 µs"
    assert "Copy bandwidth: 1000 GB/s" in lines[:at]


def test_what_surrounds_attention_is_measured(measured: Path) -> None:
    steps = load(measured / "sweep.json")["timings"]["steps"]
    walks = [step for step in steps if step["kernel"] == STEP]
    builds = [step for step in steps if step["kernel"] == "build_tree"]

    assert [step["nodes"] for step in walks] == ["4", "8", "3x2"]
    assert all(step["floor_bytes"] > 0 and step["layers"] == 2 for step in walks)
    assert [step["nodes"] for step in builds] == ["4", "8", "3x2"]
    assert all("microseconds" in step[form] for step in steps for form in ("graph", "launched"))


def test_verdicts_are_printed_and_written(measured: Path) -> None:
    goals = load(measured / "sweep.json")["goals"]
    printed = (measured / "sweep.txt").read_text()

    assert [goal["status"] for goal in goals] == ["not measured"] * 4
    assert printed.count("not measured") == 4
    assert "This is another GPU (none)." in printed


def test_a_wrong_kernel_is_not_timed(measured: Path) -> None:
    assert load(measured / "wrong.json")["timings"] is None
    assert "nothing is timed" in (measured / "wrong.txt").read_text()


def test_success_means_that_our_kernels_are_right_and_ran(measured: Path) -> None:
    """flex_attention may fail."""
    passed = load(measured / "passed.json")
    assert passed == {"sweep": True, "wrong": False, "failing": False}
    (result, *_) = load(measured / "failing.json")["timings"]["attention"]
    assert result["tree"] == {"reason": "failed: ValueError: out of luck"}


def test_options_reach_the_measurement(measured: Path) -> None:
    written = load(measured / "options.json")

    assert written["options"]["contexts"] == [30]
    assert (written["driver"], written["machine"]["gpu"]) == ("none", "not a GPU")
    assert "triton" in written["versions"]
    (result,) = written["timings"]["attention"]
    assert {name: result[name] for name in ("heads", "batch", "context", "nodes")} == {
        "heads": "tiny",
        "batch": 1,
        "context": 30,
        "nodes": "2",
    }
    assert result["flex"] == {"reason": "not run: --no-flex"}
