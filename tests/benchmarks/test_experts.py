"""benchmarks/experts.py as a user runs it, on a tiny mixture."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import experts
import pytest

pytestmark = pytest.mark.engine

TINY = """--rows 1 3 --hidden-size 64 --layers 1 --experts 4 --experts-per-row 2 --expert-size 32
    --vocab-size 64 --tokens 12 --dtype float32"""


def test_it_prints_and_writes_steps_and_curve_of_each_number_of_rows(tmp_path: Path) -> None:
    output = tmp_path / "experts.json"
    done = subprocess.run(
        [sys.executable, experts.__file__, *TINY.split(), "--output", str(output)],
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
        check=True,
        capture_output=True,
        text=True,
    )
    record = json.loads(output.read_text())
    assert [row["rows"] for row in record["measurements"]] == [1, 3]
    for row in record["measurements"]:
        assert min(row["steps"], row["curve"], row["equal_tokens"]) > 0
    assert record["settings"]["experts"] == 4
    assert "curve / steps" in done.stdout
