# SPDX-License-Identifier: Apache-2.0
"""What a Mac has: the commands start without vLLM and what it brings."""

import subprocess
import sys

import pytest

pytest.importorskip("mlx_lm")

MISSING = ("vllm", "triton", "datasets", "pyarrow", "accelerate", "psutil", "gguf", "llguidance")

SCRIPT = f"""
import sys
for name in {MISSING}:
    sys.modules[name] = None
import vllm_redrafter.cli.main
import vllm_redrafter.cli.chat.run
import vllm_redrafter.cli.demo.smollm2
import vllm_redrafter.cli.demo.mlx_engine
import vllm_redrafter.mlx.serve
print(vllm_redrafter.cli.main.serving_backend())
"""


def test_what_serves_with_mlx_needs_no_vllm() -> None:
    command = [sys.executable, "-P", "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "mlx\n", done.stderr
