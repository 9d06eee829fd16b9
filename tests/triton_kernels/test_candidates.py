# SPDX-License-Identifier: Apache-2.0
"""The best tokens, candidates and their ranks are those of a stable sort in float64."""

import pytest
import torch
from torch import Tensor

from redrafter_testing.gpu.kernel_references import naive_top_candidates
from vllm_redrafter.triton_kernels import candidates
from vllm_redrafter.triton_kernels.candidates import choose_candidates, rank_candidates
from vllm_redrafter.triton_kernels.top_candidates import TopTokens, top_candidates, vocabulary_block


def naive_choose_candidates(
    logits: Tensor, requests: int, count: int, num: int
) -> tuple[TopTokens, Tensor]:
    """`choose_candidates` by a stable sort."""
    top = naive_top_candidates(logits[:requests], num)
    best = logits[requests:].double().sort(dim=1, descending=True, stable=True).indices
    chosen = best[:, :count].sort(dim=1).values
    return top, chosen.view(-1, requests, chosen.shape[1]).int()


def naive_rank_candidates(logits: Tensor, tokens: Tensor, num: int) -> TopTokens:
    """`rank_candidates` by stable sorts, in float64."""
    by_row = tokens.repeat_interleave(len(logits) // len(tokens), dim=0)
    # Of equal logits the lower token first.
    by_row, order = by_row.sort(dim=1)
    found = naive_top_candidates(logits.gather(1, order), num)
    best = by_row.gather(1, found.tokens.long())
    best[:, logits.shape[1] :] = 0
    return found._replace(tokens=best)


def random_logits(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(columns)
    return (3 * torch.randn(rows, columns, generator=generator)).to(dtype)


def assert_same(found: TopTokens, expected: TopTokens) -> None:
    assert torch.equal(found.logits.cpu(), expected.logits)
    assert torch.equal(found.tokens.cpu(), expected.tokens)
    torch.testing.assert_close(found.normalisers.cpu(), expected.normalisers, rtol=1e-6, atol=1e-6)


def check_chosen(
    device: torch.device, logits: Tensor, requests: int, count: int, num: int = 4
) -> None:
    top, found = choose_candidates(logits.to(device), requests, count, num)
    expected_top, expected = naive_choose_candidates(logits, requests, count, num)
    assert torch.equal(found.cpu().sort().values, expected)
    assert_same(top, expected_top)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("vocabulary", "count"), [(3, 32), (70, 32), (2500, 512)])
def test_candidates_of_each_depth_are_those_of_a_sort(
    device: torch.device, vocabulary: int, count: int, dtype: torch.dtype
) -> None:
    """Also of fewer tokens than are asked for, of a block that is not full, and of equal ones."""
    check_chosen(device, random_logits(6, vocabulary, dtype), 2, count)


def test_of_equal_and_impossible_logits_the_lower_tokens_are_chosen(device: torch.device) -> None:
    logits = torch.full((3, 1100), -2.0)
    logits[1, 200:] = 5.0
    logits[2, [7, 1030]] = 9.0
    check_chosen(device, logits, 1, 64, num=50)
    logits[1, 40:] = logits[2] = -torch.inf
    check_chosen(device, logits, 1, 64)


def test_what_no_thread_block_merges_is_torch_s(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "MOST_AT_ONCE", 128)
    check_chosen(device, random_logits(3, 1100), 1, 100)


@pytest.mark.parametrize("count", [1, 49, 512])
def test_candidates_are_ranked_for_each_beam(device: torch.device, count: int) -> None:
    """Beams of a request share its candidates, whose order does not matter."""
    logits = random_logits(6, count)
    tokens = torch.stack([torch.randperm(1000)[:count] for _ in range(2)]).int()
    found = rank_candidates(logits.to(device), tokens.to(device), 4)
    assert_same(found, naive_rank_candidates(logits, tokens, 4))


def test_equal_and_impossible_candidates_are_ranked_by_token(device: torch.device) -> None:
    logits, tokens = torch.zeros(3, 40), torch.arange(40).flip(0).int().unsqueeze(0)
    logits[1, 3:] = -torch.inf
    logits[2] = -torch.inf
    found = rank_candidates(logits.to(device), tokens.to(device), 5)
    assert_same(found, naive_rank_candidates(logits, tokens, 5))
    assert found.tokens[0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("vocabulary", [1, 32_000, 128_256, 262_208, 600_000])
def test_a_vocabulary_has_at_most_64_blocks(vocabulary: int) -> None:
    assert vocabulary <= 64 * vocabulary_block(vocabulary)


def tied_logits() -> Tensor:
    """Equal ones in two blocks, more equal ones than are kept, signed zeros."""
    logits = random_logits(2, 2100).clamp(max=0.0)
    logits[0, [5, 1030, 2099]] = 7.0
    logits[0, 100:160] = -0.0
    logits[1] = -2.0
    return logits


def impossible_logits() -> Tensor:
    logits = random_logits(3, 1100)
    logits[0, 7:] = logits[1] = logits[2, ::2] = -torch.inf
    return logits


LOGITS = {
    **{
        f"{columns} tokens, {dtype}": random_logits(2, columns, dtype)
        for columns in (1, 49, 51, 2500)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    },
    "ties": tied_logits(),
    "impossible tokens": impossible_logits(),
    "rows apart": random_logits(2, 60)[:, :40],
}


@pytest.mark.parametrize("num", [4, 50])
@pytest.mark.parametrize("logits", LOGITS.values(), ids=LOGITS)
def test_the_best_are_those_of_a_sort(device: torch.device, logits: Tensor, num: int) -> None:
    assert_same(top_candidates(logits.to(device), num), naive_top_candidates(logits, num))
