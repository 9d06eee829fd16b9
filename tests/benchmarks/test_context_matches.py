# SPDX-License-Identifier: Apache-2.0
"""benchmarks/context_matches.py as a user without a GPU runs it, on short texts."""

import json
from pathlib import Path

import context_matches
import pytest
from context_matches import KINDS


def test_each_text_and_size_of_the_index_is_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "costs.json"
    sizes = ["--tokens", "20", "1100", "--requests", "1", "3", "--repeats", "2"]
    context_matches.main([*sizes, "--output", str(output)])
    costs = json.loads(output.read_text())["index"]
    found = [(cost["text"], cost["tokens"], cost["requests"]) for cost in costs]
    assert found == [(kind, tokens, r) for kind in KINDS for tokens in (20, 1100) for r in (1, 3)]
    assert all(cost["step"] > 0 and cost["prompt"] > 0 and cost["bytes"] > 0 for cost in costs)
    assert "periodic" in capsys.readouterr().out
