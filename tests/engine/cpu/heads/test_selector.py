# SPDX-License-Identifier: Apache-2.0
"""A selector on packed products tells what the plain one does."""

import pytest
import torch
from torch import nn

from vllm_redrafter.engine.cpu.heads.selector import PackedSelector
from vllm_redrafter.engine.cpu.packed_weights import packed
from vllm_redrafter.heads.selector import Selector, SelectorConfig

WIDTH, DEPTHS, RANK = 37, 3, 9


def selector(dtype: torch.dtype = torch.float32) -> Selector:
    torch.manual_seed(0)
    made = Selector(WIDTH, SelectorConfig(DEPTHS, RANK)).to(dtype).requires_grad_(False)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


@pytest.mark.parametrize("length", range(1, DEPTHS + 2))
def test_it_tells_the_same_for_drafts_of_each_length(length: int) -> None:
    plain, x = selector(), torch.randn(2, 1, WIDTH)
    torch.testing.assert_close(PackedSelector(plain, packed)(x, length), plain(x, length))


def test_what_is_wider_than_the_weights_stays_so() -> None:
    plain, x = selector(torch.bfloat16), torch.randn(2, 1, WIDTH)
    found = PackedSelector(plain, packed)(x, DEPTHS + 1)
    assert found.dtype == torch.float32 and found[..., 0, :].equal(x)
    torch.testing.assert_close(found, plain.float()(x, DEPTHS + 1), rtol=0.05, atol=0.05)
