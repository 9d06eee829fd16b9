# SPDX-License-Identifier: Apache-2.0
"""Compiled loops choose and rank the candidates that torch does."""

import pytest
import torch
from torch import Tensor

from vllm_redrafter.engine.cpu.heads.shortlist import CompiledShortlist
from vllm_redrafter.heads.shortlist import Shortlist

V, E, R, L, W = 500, 37, 3, 4, 2


def both(dtype: torch.dtype, count: int) -> tuple[CompiledShortlist, Shortlist]:
    torch.manual_seed(0)
    logits, weight = torch.randn(R, L, V), torch.randn(V, E, dtype=dtype)
    return CompiledShortlist.of(logits, weight, count), Shortlist.of(logits, weight, count)


@pytest.mark.parametrize("count", [1, 32, V, V + 1])
def test_the_same_tokens_are_chosen(count: int) -> None:
    found, expected = both(torch.float32, count)
    assert found.tokens.sort().values.equal(expected.tokens.sort().values)
    assert found.root_logits.equal(expected.root_logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, W])
def test_logits_are_products_of_features_with_the_candidates_rows(
    dtype: torch.dtype, width: int
) -> None:
    found, _ = both(dtype, 32)
    features = torch.randn(R, width, E, dtype=dtype)
    for depth in range(1, L):
        rows = found.weight[found.tokens[:, depth - 1]].double()
        exact = features.double() @ rows.transpose(1, 2)
        # What float16 is rounded to behind the product; the others are summed up in float32.
        error = 0.01 if dtype == torch.float16 else 1e-5
        logits = found.logits(features, depth)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits.double(), exact, rtol=error, atol=error)


def chosen(logits: Tensor, count: int) -> list[int]:
    found = CompiledShortlist.of(logits.view(1, 2, -1), torch.ones(logits.shape[-1], E), count)
    unchosen = found.tokens[0, 0] < 0
    assert (found.logits(torch.ones(1, 1, E), 1)[0, 0] == -torch.inf).equal(unchosen)
    return found.tokens[0, 0].tolist()


def test_what_is_not_a_number_is_no_candidate() -> None:
    logits = torch.full((2, V), torch.nan)
    assert chosen(logits, 3) == [-1, -1, -1]
    logits[1, 7], logits[1, 400] = 1.0, 2.0
    assert chosen(logits, 3) == [400, 7, -1]
