# SPDX-License-Identifier: Apache-2.0
"""A draft's candidates: chosen for all depths in two launches, ranked at each level in one.

One product with the vocabulary-wide layer has the logits of the roots, and behind them those of
every depth below (`heads/shortlist.py`). Of the roots a search needs what `top_candidates` finds;
of a depth, its C best tokens in any order. Both begin with the best of each block of the
vocabulary, which `keep_top` finds; `_merge_depths` merges the blocks. Hundreds of candidates of
more than 128k tokens are torch's to find: too many are left to merge.

A level below then has logits of its C candidates alone (`gather_dot.py`), which fit one block.
"""

from math import isqrt

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_redrafter.config import TOP_TOKENS
from vllm_redrafter.triton_kernels.checks import require, require_layout
from vllm_redrafter.triton_kernels.ordered_keys import LAST_INDEX
from vllm_redrafter.triton_kernels.top_candidates import (
    TOP,
    ZERO_BITS,
    TopTokens,
    best_of_blocks,
    check_logits,
    empty_top,
    is_kept,
    rank_row,
    rank_rows,
    top_candidates,
)

MOST_AT_ONCE = 8192
"""Tokens that a thread block ranks: of more, registers or shared memory would not hold them."""


@triton.jit(do_not_specialize=["requests"])
def _merge_depths(
    kept_logits,  # [L * requests, BLOCKS, KEPT] fp32, the roots first
    kept_tokens,  # [L * requests, BLOCKS, KEPT] int32; LAST_INDEX where there is none
    top_logits,  # [requests, FIRST] fp32, written
    top_tokens,  # [requests, FIRST] int32, written
    normalisers,  # [requests] fp32, written
    candidates,  # [(L - 1) * requests, COUNT] int32, written
    requests,
    BLOCKS: tl.constexpr,
    KEPT: tl.constexpr,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    MERGED_TOP: tl.constexpr,
    MERGED: tl.constexpr,
    ZEROS: tl.constexpr,
):
    """One row: what a search needs of a root, or the candidates of a depth."""
    # Names would have one shape in both branches.
    row = tl.program_id(0).to(tl.int64)
    if row < requests:
        of_root, its_tokens = _load_kept(
            kept_logits, kept_tokens, row, BLOCKS, KEPT, TOP, MERGED_TOP
        )
        rank_row(of_root, its_tokens, row, top_logits, top_tokens, normalisers, FIRST, ZEROS)
    else:
        logit, token = _load_kept(kept_logits, kept_tokens, row, BLOCKS, KEPT, COUNT, MERGED)
        kept = is_kept(logit, token != LAST_INDEX, COUNT, ZEROS)
        nth = tl.cumsum(kept.to(tl.int32), axis=0) - 1
        tl.store(candidates + (row - requests) * COUNT + nth, token, mask=kept)


@triton.jit
def _load_kept(
    kept_logits,
    kept_tokens,
    row,
    BLOCKS: tl.constexpr,
    KEPT: tl.constexpr,
    NUM: tl.constexpr,
    MERGED: tl.constexpr,
):
    """(logits [MERGED] fp32, tokens [MERGED] int32): the NUM that are kept of each block."""
    index = tl.arange(0, MERGED)
    at = (row * BLOCKS + index // NUM) * KEPT + index % NUM
    logit = tl.load(kept_logits + at, mask=index < BLOCKS * NUM, other=float("-inf"))
    token = tl.load(kept_tokens + at, mask=index < BLOCKS * NUM, other=LAST_INDEX)
    return logit, token


def choose_candidates(
    logits: Tensor, requests: int, count: int, num: int
) -> tuple[TopTokens, Tensor]:
    """What a draft takes from its one product with the vocabulary-wide layer.

    Args:
        logits: [L * R, V] bf16, fp16 or fp32, rows contiguous: those of the R roots, then those of
            all requests at each depth.
        requests: R.
        count: C, how many candidates a depth has.
        num: of the roots' best tokens, how many; at most 50.

    Returns:
        (the roots' best, see `top_candidates`; candidates [L-1, R, min(C, V)] int32 in any
        order).
    """
    check_logits(logits, num)
    require(count >= 1, f"count: must be at least 1, got {count}")
    rows, vocabulary = logits.shape
    require(
        requests >= 1 and rows % requests == 0 and rows > requests,
        f"logits: {rows} rows are not those of two or more depths of {requests} requests",
    )
    count = min(count, vocabulary)
    # About as many tokens per block as are left to merge, which thread blocks have room for: 2,048
    # for V = 32k and 128 kept of each block, 4,096 for 128k.
    even = triton.next_power_of_2(isqrt(vocabulary * count))
    block = min(MOST_AT_ONCE, max(1024, even))
    if triton.cdiv(vocabulary, block) * count > MOST_AT_ONCE:
        chosen = logits[requests:].topk(count, sorted=False).indices
        return top_candidates(logits[:requests], num), chosen.int().view(-1, requests, count)
    kept_logits, kept_tokens = best_of_blocks(logits, block, requests, count)
    _, blocks, kept = kept_logits.shape
    merged_top, merged = (triton.next_power_of_2(blocks * num) for num in (TOP_TOKENS, count))
    top = empty_top(requests, num, logits.device)
    shape = rows // requests - 1, requests, count
    candidates = torch.empty(shape, dtype=torch.int32, device=logits.device)
    _merge_depths[(rows,)](
        kept_logits,
        kept_tokens,
        *top,
        candidates,
        requests,
        BLOCKS=blocks,
        KEPT=kept,
        FIRST=num,
        COUNT=count,
        MERGED_TOP=merged_top,
        MERGED=merged,
        ZEROS=ZERO_BITS[logits.dtype],
        num_warps=max(4, min(16, max(merged_top, merged) // 256)),
    )
    return top, candidates


def rank_candidates(logits: Tensor, tokens: Tensor, num: int) -> TopTokens:
    """The `num` best candidates of each row, and what normalises them over the 50 best.

    Args:
        logits: [R * beams, C] float32, contiguous.
        tokens: [R, C] int32, contiguous, the candidates of each request.
        num: how many; at most 50.

    Returns:
        See `TopTokens`.
    """
    check_logits(logits, num)
    rows, count = logits.shape
    require(rows % len(tokens) == 0, f"tokens: {len(tokens)} do not fit {rows} rows of logits")
    require_layout(
        logits.device,
        logits=(logits, torch.float32, (1, count)),
        tokens=(tokens, torch.int32, (1, count)),
    )
    top = empty_top(rows, num, logits.device)
    block = triton.next_power_of_2(count)
    rank_rows[(rows,)](
        logits,
        tokens,
        *top,
        NUM=count,
        GROUP=rows // len(tokens),
        BLOCK=block,
        FIRST=num,
        ZEROS=0,
        num_warps=max(1, min(4, block // 128)),
    )
    return top
