# SPDX-License-Identifier: Apache-2.0
"""The interpreter reports kernels that read or write outside their arguments."""

import pytest
import torch

from redrafter_testing.gpu.triton_interpreter import Memory
from vllm_redrafter.triton_kernels.compact_kv import CacheTable, compact_kv

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU")


def test_memory_outside_the_arguments_is_an_error(memory: Memory) -> None:
    from triton.runtime.errors import InterpreterError

    caches = [torch.arange(8.0).view(1, 8, 1, 1) for _ in range(2)]
    table, slots = CacheTable.of(caches), torch.arange(3)
    path, num_sampled, start = (torch.tensor(x).int() for x in ([[0, 2]], [2], [0]))
    with pytest.raises(InterpreterError, match="outside its arguments"):
        compact_kv(table, path, num_sampled, start, slots)
    with memory.allow(caches):
        with pytest.raises(InterpreterError, match="outside its arguments"):
            compact_kv(table, path, num_sampled, start + 2, slots)
        compact_kv(table, path, num_sampled, start, slots)
    assert [int(cache[0, 1]) for cache in caches] == [2, 2]
