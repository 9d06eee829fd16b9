# SPDX-License-Identifier: Apache-2.0
"""The largest of many values."""

import numpy as np
import pytest
import torch

from vllm_redrafter.utils.top_of_many import FOLDS, top_of_many


@pytest.mark.parametrize("size", [49, 2 * 50 * FOLDS - 1, 2 * 50 * FOLDS, 32003])
@pytest.mark.parametrize("kinds_of_values", [5, 10**6])
@pytest.mark.parametrize("share", [1.0, 0.001, 0.0])
def test_the_largest_numbers_are_found_the_first_of_equal_ones_first(
    size: int, kinds_of_values: int, share: float
) -> None:
    torch.manual_seed(size)
    values = torch.randint(kinds_of_values, (size,)).float()
    is_number = torch.rand(size) < share
    values[~is_number] = torch.nan
    values[::2].masked_fill_(~is_number[::2], -torch.inf)
    best, index = np.empty(50, dtype=np.float32), np.empty(50, dtype=np.int64)
    found = top_of_many(values.numpy(), best, index)
    places = is_number.nonzero().flatten()
    ordered = values[places].sort(descending=True, stable=True)
    assert found == min(50, len(places))
    assert best[:found].tolist() == ordered.values[:50].tolist()
    assert index[:found].tolist() == places[ordered.indices][:50].tolist()
