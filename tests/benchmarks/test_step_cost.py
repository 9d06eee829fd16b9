"""benchmarks/step_cost.py as a user without a GPU runs it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import step_cost
import torch


def test_floors_need_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--floor", "--targets", "llama-7b", "--batches", "1", "--contexts", "512"]
    assert step_cost.main([*arguments, "--nodes", "32"]) == 0
    printed = capsys.readouterr().out
    assert "nothing measured" in printed and "1.18" in printed
    assert step_cost.main([*arguments, "--nodes", "32", "--launch-time", "0"]) == 0
    assert "1.15" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run(
        [sys.executable, step_cost.__file__], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "torch finds none here; nothing is measured" in done.stderr
