"""Compiled loops, and what importing numba must not break."""

from __future__ import annotations

import subprocess
import sys

from vllm_redrafter.utils.compiled import compiled


def test_a_compiled_function_computes_what_it_says() -> None:
    @compiled
    def triangular(number: int) -> int:
        total = 0
        for value in range(number + 1):
            total += value
        return total

    assert triangular(100) == 5050


def test_an_engine_can_start_after_numba_is_loaded() -> None:
    """vLLM's CPU worker reads the dict of whatever stands in any module, llvmlite's too."""
    code = """
import sys
import vllm_redrafter.budget.ranking
for module in list(sys.modules.values()):
    for value in list(getattr(module, "__dict__", {}).values()):
        ours = str(type(value).__module__).startswith("llvmlite")
        if ours and hasattr(value, "__dict__"):
            vars(value).get("kernel")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
