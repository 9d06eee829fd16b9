# SPDX-License-Identifier: Apache-2.0
"""benchmarks/heads.py: from a target and its text to runs, a table and a file."""

import json
from pathlib import Path

import heads
import pytest

from redrafter_testing.models.tiny_models import make_worded_target
from redrafter_testing.models.training_data import write_data

V = 64
HEADS = ["recurrent", "gated, fused", "gated, fused, selector"]


def test_runs_are_made_once_and_reported_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = make_worded_target(tmp_path / "target", V)
    write_data(tmp_path / "text", target, num=20, max_tokens=12)
    write_data(tmp_path / "other", target, num=4, max_tokens=12, seed=6)
    runs, output = tmp_path / "runs", tmp_path / "out.json"
    arguments = [
        *(str(target), "--data", str(tmp_path / "text"), "--measure", str(tmp_path / "other")),
        *("--runs", str(runs), "--conversations", "20", "--held-out", "4", "--epochs", "1"),
        *("--shape", "2x2:2", "--shape", "2x3:4", "--target-layers", "1,2"),
        *("--draft-vocab-size", "40", "--unroll-steps", "3"),
        *("--output", str(output)),
    ]
    some = [part for name in HEADS for part in ("--head", name)]
    assert heads.main([*arguments, *some]) == 0
    made = {path: path.stat().st_mtime_ns for path in runs.glob("*.json")}
    assert len(made) == len(HEADS)

    record = json.loads(output.read_text())
    assert [run["head"] for run in record["runs"]] == HEADS
    assert record["shapes"] == ["2x2:2", "2x3:4"] and record["target_layers"] == [1, 2]
    for run in record["runs"]:
        assert run["learnt_rows"] == 16
        assert list(run["texts"]) == ["greedy", "greedy, text 2"]
        for shapes in run["texts"].values():
            for counts in shapes.values():
                assert 0 < counts["steps"] <= counts["tokens"]
    assert str(tmp_path) not in json.dumps(record), "paths stay here"
    assert "gated, fused" in capsys.readouterr().out

    assert heads.main([*arguments, "--head", "recurrent", "--seeds", "2"]) == 0
    assert all(path.stat().st_mtime_ns == time for path, time in made.items())
    assert len(list(runs.glob("*.json"))) == len(HEADS) + 1
