"""benchmarks/step_cost.py as a user without a GPU runs it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import step_cost
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run(
        [sys.executable, step_cost.__file__], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "torch finds none here; nothing is measured" in done.stderr
