# SPDX-License-Identifier: Apache-2.0
"""The demo on mlx-lm, with a small target and a drafter that knows its answers."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from redrafter_testing.models.reciting_target import make_reciting_pair
from vllm_redrafter.cli.demo import smollm2

pytest.importorskip("mlx.core")

from vllm_redrafter.cli.demo.mlx_engine import DTYPE


def test_the_demo_reports_mlx_lm_without_and_with_the_drafter(tmp_path: Path) -> None:
    file = io.StringIO()
    console = Console(file=file, width=1000)
    target, drafter = make_reciting_pair(tmp_path / "pair")
    smollm2.run_demo(tmp_path / "cache", str(target), str(drafter), console, backend="mlx")
    output = file.getvalue()
    assert f"Greedy decoding in mlx-lm, {DTYPE}" in output and "vLLM" not in output
    assert all(question in output for question in smollm2.PROMPTS)
    assert "yes" in output and "target steps" in output
