"""benchmarks/step_parts.py as a user runs it, on a small drafter and a small target."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import step_parts


def run(output: Path, *options: str) -> tuple[dict[str, Any], str]:
    """What one repeat or two write and print."""
    shared = ["--repeats", "2", "--threads", "1", "--output", str(output)]
    command = [sys.executable, step_parts.__file__, *shared, *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(output.read_text()), done.stdout


TARGET = ["--layers", "2", "--heads", "4", "--kv-heads", "2", "--head-size", "32"]
DRAFTER = ["--vocab-size", "300", "--hidden-size", "32"]


def test_it_prints_and_writes_each_part_and_size(tmp_path: Path) -> None:
    sizes = ["--requests", "1", "3", "--shapes", "4x3", "1x2", "--contexts", "5", "130"]
    record, printed = run(tmp_path / "parts.json", *DRAFTER, *TARGET, *sizes)
    found = [(cost["requests"], cost["shape"]) for cost in record["draft"]]
    assert found == [(1, "4x3"), (1, "1x2"), (3, "4x3"), (3, "1x2")]
    for cost in record["draft"]:
        assert cost["floor"] == max(cost["products"], cost["bytes"]) > 0
        assert cost["packed_over_floor"] == pytest.approx(cost["packed"] / cost["floor"])
        assert cost["plain"] > 0
    found = [(cost["requests"], cost["context"]) for cost in record["attention"]]
    assert found == [(1, 5), (1, 130), (3, 5), (3, 130)]
    for cost in record["attention"]:
        assert min(cost["tree"], cost["chain"], cost["bytes"]) > 0
        assert cost["tree_over_chain"] == pytest.approx(cost["tree"] / cost["chain"])
        assert (cost["dtype"], cost["nodes"], cost["threads"]) == ("float32", 9, 1)
    assert record["settings"]["threads"] == 1
    assert "packed / floor" in printed and "tree / chain" in printed


def test_a_part_alone_leaves_no_trace_of_the_other(tmp_path: Path) -> None:
    options = ["--parts", "attention", "--requests", "2", "--contexts", "7", "--nodes", "4"]
    record, _ = run(tmp_path / "parts.json", *TARGET, *options, "--dtype", "bfloat16")
    assert "draft" not in record and "vocab_size" not in record["settings"]
    (cost,) = record["attention"]
    assert (cost["dtype"], cost["nodes"], cost["repeats"]) == ("bfloat16", 4, 2)


def test_a_draft_among_candidates(tmp_path: Path) -> None:
    options = ["--parts", "draft", "--head", "gated", "--candidates", "32", "--shapes", "4x3"]
    record, _ = run(tmp_path / "parts.json", *DRAFTER, *options, "--requests", "2")
    assert record["settings"]["candidates"] == 32
    (cost,) = record["draft"]
    assert min(cost["plain"], cost["packed"], cost["products"], cost["bytes"]) > 0


def test_query_heads_that_no_grouping_gives(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(SystemExit, match="2"),
    ):
        patch.setattr(sys, "argv", ["step_parts.py", "--heads", "9", "--kv-heads", "2"])
        step_parts.arguments()
    assert "--heads 9 is no multiple of --kv-heads 2" in capsys.readouterr().err
