"""A sweep with invented times: what is tried, what is chosen, and the table that the package reads.

In a process of its own, as test_run.py says.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from redrafter_testing.benchmarks.own_process import in_own_process
from vllm_redrafter.triton_kernels.tree_attention_plan import PartAims
from vllm_redrafter.triton_kernels.tree_attention_tiles import Tile
from vllm_redrafter.triton_kernels.tree_attention_tuning import Tuning, read_tuning

ROOT = Path(__file__).parents[3]
PATH = os.pathsep.join(str(ROOT / folder) for folder in ("benchmarks", "tests/support"))
NAME = "Imaginary GPU 9000"
USUAL = {"rows": 16, "keys": 64, "num_warps": 4, "num_stages": 5, "max_registers": 255}
BEST = USUAL | {"keys": 128, "num_warps": 2}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `tune_something`'s files."""
    folder = tmp_path_factory.mktemp("tuned")
    module = "redrafter_testing.benchmarks.tune_something"
    done = in_own_process("-P", "-m", module, str(folder), TRITON_INTERPRET="1", PYTHONPATH=PATH)
    assert done.returncode == 0, done.stderr
    return folder


def load(path: Path) -> Any:
    return json.loads(path.read_text())


def test_the_package_reads_what_was_found(tuned: Path, tmp_path: Path) -> None:
    """Two steps from the usual tile: more keys first, then fewer warps."""
    shutil.copy(tuned / "tiles.json", tmp_path / "imaginary-gpu-9000.json")
    best = Tuning({(2, 64, 16): Tile(**BEST)}, PartAims(min_keys=64))
    assert read_tuning(NAME, tmp_path) == best
    assert "copy it to triton_kernels/tiles/imaginary-gpu-9000.json" in (
        tuned / "tune.txt"
    ).read_text().replace("\n", " ")


def test_the_best_time_is_beside_the_usual_one_s(tuned: Path) -> None:
    table = load(tuned / "tiles.json")
    (entry,) = table["tiles"]
    assert (entry["tile"], entry["usual"]) == (BEST, USUAL)
    assert entry["usual_microseconds"] == pytest.approx(100)
    assert entry["microseconds"] == pytest.approx(100 / 3)
    (case,) = entry["cases"]
    assert case["case"] == "tiny, batch 2, context 20, nodes 2"
    assert case["usual_microseconds"] == 100
    # On top of the tile that was found.
    assert table["parts"]["usual_microseconds"] == pytest.approx(100 / 3)
    assert table["parts"]["microseconds"] == pytest.approx(100 / 12)
    assert table["date"] == "a day" and table["capability"] == 0
    assert "usually 100.0 µs" in (tuned / "tune.txt").read_text()


def test_what_is_wrong_is_not_timed_and_what_fails_is_not_chosen(tuned: Path) -> None:
    timed = load(tuned / "timed.json")
    assert timed["complete"]
    assert {warps for _, warps, _, _ in timed["cells"]} == {2, 4}
    (entry,) = load(tuned / "tiles.json")["tiles"]
    reasons = {(f["num_warps"], f["num_stages"]): f["reason"] for f in entry["failed"]}
    assert reasons[8, 5].startswith("wrong: differs from the reference by 100%")
    assert reasons[4, 7] == "failed: RuntimeError: out of resource: shared memory"
    # The usual tile; keys, warps and stages up and down; warps and stages again, with 128.
    assert entry["tried"] == 1 + 6 + 4


def test_cases_beyond_memory_are_named_once(tuned: Path) -> None:
    skipped = load(tuned / "tiles.json")["skipped"]
    assert len(skipped) == len(set(skipped)) == 1
    assert skipped[0].startswith("tiny, batch 2, context 40000, nodes 2: skipped: the KV cache")


def test_options_reach_the_sweep(tuned: Path) -> None:
    table = load(tuned / "options.json")
    assert table["device"] == NAME and table["driver"] == "none"
    assert table["versions"]["triton"] == table["triton"]
    assert table["options"]["contexts"] == [30]
    (entry,) = table["tiles"]
    assert [case["case"] for case in entry["cases"]] == ["tiny, batch 1, context 30, nodes 2"]
    # One round: no further than one number from the usual tile.
    assert entry["tile"] == USUAL | {"keys": 128}
