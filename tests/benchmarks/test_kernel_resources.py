"""benchmarks/kernel_resources.py as a user runs it, and what it derives from the machine code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from redrafter_testing.gpu import kernel_names

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # as Python does for a script

from kernel_compiler import ARCHITECTURES, _longest_loop, _resident_blocks

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("architecture", "registers", "shared", "warps", "blocks"),
    [
        ("sm_90", 32, 0, 1, 32),  # as many as there may be
        ("sm_90", 32, 0, 4, 16),  # 64 warps
        ("sm_86", 32, 0, 4, 12),  # 48 warps
        ("sm_90", 128, 0, 8, 2),  # 65,536 registers
        ("sm_90", 129, 0, 8, 1),
        ("sm_90", 255, 0, 8, 1),
        ("sm_90", 32, 57_344, 4, 4),  # with the system's 1 KiB each, 233,472 bytes
        ("sm_90", 32, 57_345, 4, 3),
        ("sm_86", 32, 101_376, 4, 1),
        ("sm_86", 32, 101_377, 4, 0),  # cannot be launched
    ],
)
def test_how_many_blocks_a_multiprocessor_holds(
    architecture: str, registers: int, shared: int, warps: int, blocks: int
) -> None:
    assert _resident_blocks(ARCHITECTURES[architecture], registers, shared, warps) == blocks


def test_the_longest_loop_is_counted_and_the_codes_end_is_none() -> None:
    code = """
.L_x_0:
        /*0000*/                   MOV R1, R2 ;
.L_x_1:
        /*0010*/                   FADD R1, R1, R2 ;
        /*0020*/              @!P0 BRA `(.L_x_1) ;
        /*0030*/                   IADD3 R1, R1, R2, RZ ;
        /*0040*/               @P0 BRA `(.L_x_0) ;
        /*0050*/                   EXIT ;
.L_x_2:
        /*0060*/                   BRA `(.L_x_2);
"""
    assert _longest_loop(code) == 5


def test_the_quick_run_reports_every_kernel(tmp_path: Path) -> None:
    output = tmp_path / "resources.json"
    script = str(BENCHMARKS / "kernel_resources.py")
    options = ["--quick", "--architectures", "sm_86", "--output", str(output)]
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, script, *options]
    done = subprocess.run(command, check=True, env=environment, capture_output=True, text=True)
    kernels = json.loads(output.read_text())["kernels"]
    names = {kernel["name"] for kernel in kernels}
    assert names == kernel_names.ATTENTION | kernel_names.AROUND_ATTENTION
    assert "sm_86 (RTX 3090, A10)" in done.stdout
    assert all(name in done.stdout for name in names)
    assert all(kernel["blocks"] >= 1 for kernel in kernels)
