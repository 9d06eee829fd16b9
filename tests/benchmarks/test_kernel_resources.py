"""benchmarks/kernel_resources.py as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import kernel_resources

from redrafter_testing.gpu import kernel_names


def test_the_quick_run_reports_every_kernel(tmp_path: Path) -> None:
    output = tmp_path / "resources.json"
    options = ["--quick", "--architectures", "sm_86", "--output", str(output)]
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, kernel_resources.__file__, *options]
    done = subprocess.run(command, check=True, env=environment, capture_output=True, text=True)
    kernels = json.loads(output.read_text())["kernels"]
    names = {kernel["name"] for kernel in kernels}
    assert names == kernel_names.ATTENTION | kernel_names.AROUND_ATTENTION | kernel_names.DRAFT
    assert "sm_86 (RTX 3090, A10)" in done.stdout
    assert all(name in done.stdout for name in names)
    assert all(kernel["blocks"] >= 1 for kernel in kernels)
