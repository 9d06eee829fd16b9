# SPDX-License-Identifier: Apache-2.0
"""The largest of many values."""

import numpy as np
import pytest
import torch
from torch import Tensor

from vllm_redrafter.utils.top_of_many import FOLDS, top_of_many


def best_of(values: Tensor, most: int) -> tuple[list[float], list[int]]:
    best, index = np.empty(most, dtype=np.float32), np.empty(most, dtype=np.int64)
    found = top_of_many(values.numpy(), best, index)
    return best[:found].tolist(), index[:found].tolist()


@pytest.mark.parametrize("size", [49, 2 * 50 * FOLDS - 1, 2 * 50 * FOLDS, 32003])
@pytest.mark.parametrize("kinds_of_values", [5, 10**6])
def test_of_many_values_the_largest_are_found_the_first_of_equal_ones_first(
    size: int, kinds_of_values: int
) -> None:
    torch.manual_seed(size)
    values = torch.randint(kinds_of_values, (size,)).float()
    ordered = values.sort(descending=True, stable=True)
    best, index = best_of(values, 50)
    assert best == ordered.values[:50].tolist()
    assert index == ordered.indices[:50].tolist()


@pytest.mark.parametrize("numbers", [0, 3, 60])
def test_of_many_values_those_that_are_none_are_left_out(numbers: int) -> None:
    torch.manual_seed(numbers)
    values = torch.full((8192,), torch.nan)
    values[::2] = -torch.inf
    at = torch.randperm(8192)[:numbers]
    values[at] = torch.randn(numbers)
    best, index = best_of(values, 50)
    assert len(best) == min(numbers, 50)
    assert best == values[at].sort(descending=True).values[:50].tolist()
    assert best == values[index].tolist()
