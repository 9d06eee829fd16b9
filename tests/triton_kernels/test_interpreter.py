"""The interpreter's set-up: a watch that never barks would prove nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from redrafter_testing.gpu.triton_interpreter import Memory, import_interpreted
from redrafter_testing.python_path import SUPPORT, python_path
from vllm_redrafter.triton_kernels.accept_path import accept_path
from vllm_redrafter.triton_kernels.compact_kv import CacheTable, compact_kv

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU")


def integers(*values: Any) -> torch.Tensor:
    return torch.tensor(*values, dtype=torch.int32)


def one_walk(row_start: int) -> None:
    """A root and its child, which the target sampled."""
    path, num_sampled = integers([[-7, -7]]), integers([-7])
    accept_path(
        tokens=integers([[4, 5]]),
        parents=integers([[0, 0]]),
        depths=integers([[0, 1]]),
        ancestors=integers([[[1], [3]]]),
        num_nodes=integers([2]),
        sampled=integers([5, 6]),
        row_start=integers([row_start]),
        output_tokens=integers([[-7, -7]]),
        num_sampled=num_sampled,
        path=path,
        last_row=integers([-7]),
    )
    assert path.tolist() == [[0, 1]] and num_sampled.tolist() == [2]


def test_reading_outside_the_arguments_is_an_error() -> None:
    from triton.runtime.errors import InterpreterError

    one_walk(row_start=0)
    with pytest.raises(InterpreterError, match="outside its arguments"):
        one_walk(row_start=2)
    with pytest.raises(InterpreterError, match="outside its arguments"):
        one_walk(row_start=-1)


def test_writing_outside_the_arguments_is_an_error(memory: Memory) -> None:
    from triton.runtime.errors import InterpreterError

    caches = [torch.arange(8.0).view(1, 8, 1, 1) for _ in range(2)]
    arguments = integers([[0, 2]]), integers([2]), integers([0]), torch.arange(3)
    table = CacheTable.of(caches)
    with pytest.raises(InterpreterError, match="outside its arguments"):
        compact_kv(table, *arguments)
    with memory.allow(caches):
        compact_kv(table, *arguments)
    assert [int(cache[0, 1]) for cache in caches] == [2, 2]


def test_the_environment_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests start vLLM, which must not run under the interpreter."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    import_interpreted("vllm_redrafter.triton_kernels.checks")
    assert "TRITON_INTERPRET" not in os.environ


@pytest.mark.parametrize("before", ["", "import triton", "import vllm"])
def test_kernels_run_whatever_was_imported_before(before: str) -> None:
    script = f"""
{before}
from redrafter_testing.gpu import triton_interpreter
triton_interpreter.import_interpreted("vllm_redrafter.triton_kernels.accept_path")
import test_interpreter
with triton_interpreter.interpreted():
    test_interpreter.one_walk(row_start=0)
"""
    environment = {**os.environ, "PYTHONPATH": python_path(SUPPORT, Path(__file__).parent)}
    environment.pop("TRITON_INTERPRET", None)
    subprocess.run([sys.executable, "-c", script], check=True, env=environment, cwd=SUPPORT)
