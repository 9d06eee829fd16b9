"""benchmarks/step_parts.py as a user runs it, on a small drafter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import step_parts
import torch

from vllm_redrafter.config import DrafterConfig


def test_it_prints_and_writes_each_size(tmp_path: Path) -> None:
    output = tmp_path / "parts.json"
    options = ["--vocab-size", "300", "--hidden-size", "32", "--repeats", "2", "--threads", "1"]
    sizes = ["--requests", "1", "3", "--shapes", "4x3", "1x2", "--output", str(output)]
    command = [sys.executable, step_parts.__file__, *options, *sizes]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    record = json.loads(output.read_text())
    found = [(cost["requests"], cost["shape"]) for cost in record["draft"]]
    assert found == [(1, "4x3"), (1, "1x2"), (3, "4x3"), (3, "1x2")]
    for cost in record["draft"]:
        assert cost["floor"] == max(cost["products"], cost["bytes"]) > 0
        assert cost["packed_over_floor"] == pytest.approx(cost["packed"] / cost["floor"])
        assert cost["plain"] > 0
    assert record["settings"]["threads"] == 1
    assert "packed / floor" in done.stdout


def test_bytes_are_those_of_the_weights_that_a_draft_reads() -> None:
    hidden, vocab, levels = 8, 20, 3
    draft = step_parts.Draft(DrafterConfig(vocab, hidden, exit_dim=hidden), torch.bfloat16)
    square, bias = hidden * hidden, hidden
    cell, head = 2 * square + bias, square + bias + vocab * hidden
    # Of the input projection, the half that reads s and the bias, and once the half that reads h.
    expected = levels * (cell + square + bias + head) + square
    assert draft.num_bytes(levels) == 2 * expected
