# SPDX-License-Identifier: Apache-2.0
"""The interpreter's set-up: a watch that never barks would prove nothing."""

from typing import Any

import pytest
import torch

from redrafter_testing.gpu.triton_interpreter import Memory
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
