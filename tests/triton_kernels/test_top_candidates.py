# SPDX-License-Identifier: Apache-2.0
"""The best tokens and their normaliser are those of a stable sort in float64."""

import pytest
import torch
from torch import Tensor

from redrafter_testing.gpu.kernel_references import naive_top_candidates
from vllm_redrafter.tree.beam_search import log_softmax_of_top
from vllm_redrafter.triton_kernels.top_candidates import (
    top_candidates,
    vocabulary_block,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_logits(rows: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(vocabulary)
    return (3 * torch.randn(rows, vocabulary, generator=generator)).to(dtype)


def check(device: torch.device, logits: Tensor, num: int) -> None:
    found = top_candidates(logits.to(device), num)
    expected = naive_top_candidates(logits, num)
    assert torch.equal(found.logits.cpu(), expected.logits)
    assert torch.equal(found.tokens.cpu(), expected.tokens)
    torch.testing.assert_close(found.normalisers.cpu(), expected.normalisers, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [1, 3, 49, 50, 51, 1024, 2500])
def test_they_are_those_of_a_sort(
    device: torch.device, vocabulary: int, dtype: torch.dtype
) -> None:
    """Also where a block is not full, where it has fewer than 50 tokens, and many equal logits."""
    check(device, random_logits(2, vocabulary, dtype), num=4)


@pytest.mark.parametrize("num", [1, 50])
def test_as_few_as_one_and_as_many_as_all_are_returned(device: torch.device, num: int) -> None:
    check(device, random_logits(1, 1500), num)


def test_the_lower_of_equal_tokens_come_first(device: torch.device) -> None:
    """All equal: the 50 that are kept are the first; equal ones in two blocks; signed zeros."""
    check(device, torch.full((1, 1100), -2.0), num=50)
    logits = random_logits(1, 2100).clamp(max=0.0)
    logits[0, [5, 1030, 2099]] = 7.0
    logits[0, 100:160] = -0.0
    check(device, logits, num=50)


def test_fifty_of_one_block_may_be_the_best_of_all(device: torch.device) -> None:
    logits = random_logits(2, 2100) - 100
    logits[0, 1024:1074] += 200
    logits[1, 2040:2090] += 200
    check(device, logits, num=50)


def test_impossible_tokens_weigh_nothing(device: torch.device) -> None:
    logits = random_logits(3, 1100)
    logits[0, 7:] = -torch.inf
    logits[1] = -torch.inf
    logits[2, ::2] = -torch.inf
    check(device, logits, num=9)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_logits_of_any_size_are_ranked(device: torch.device, scale: float) -> None:
    logits = random_logits(1, 1100) * scale
    found = top_candidates(logits.to(device), 5)
    assert torch.equal(found.tokens.cpu(), naive_top_candidates(logits, 5).tokens)


def test_rows_may_be_apart(device: torch.device) -> None:
    """A view of a wider tensor, whose other columns are the best."""
    wide = random_logits(2, 60)
    wide[:, 40:] = 100.0
    logits = wide[:, :40].to(device)
    found = top_candidates(wide.to(device)[:, :40], 3)
    assert torch.equal(found.tokens, top_candidates(logits.contiguous(), 3).tokens)


def test_log_probabilities_are_the_search_s(device: torch.device) -> None:
    logits = random_logits(3, 1300)
    found = top_candidates(logits.to(device), 6)
    log_probs, tokens = log_softmax_of_top(logits, 6)
    torch.testing.assert_close((found.logits - found.normalisers[:, None]).cpu(), log_probs)
    assert torch.equal(found.tokens.cpu().long(), tokens)


@pytest.mark.parametrize("vocabulary", [1, 32_000, 128_256, 262_208, 600_000])
def test_a_vocabulary_has_at_most_64_blocks(vocabulary: int) -> None:
    assert vocabulary <= 64 * vocabulary_block(vocabulary)


@pytest.mark.parametrize(
    ("logits", "num", "named"),
    [
        (torch.zeros(4), 1, "logits: expected"),
        (torch.zeros(2, 4, dtype=torch.float64), 1, "logits: bf16"),
        (torch.zeros(4, 2).t(), 1, "logits: the last dimension"),
        (torch.zeros(2, 4), 51, "num"),
        (torch.zeros(2, 4), 0, "num"),
        (torch.zeros(2, 0), 1, "logits: 0 tokens"),
    ],
)
def test_what_does_not_fit_is_named(logits: Tensor, num: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        top_candidates(logits, num)
