"""Python in a process of its own, without GPUs."""

from __future__ import annotations

import os
import subprocess
import sys


def in_own_process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Without GPUs, whatever the machine has."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *arguments],
        env={**inherited, "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
