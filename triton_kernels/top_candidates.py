# SPDX-License-Identifier: Apache-2.0
"""The draft's best tokens, and the log-sum-exp of its 50 best logits, in two launches.

Draft logits keep their top 50 before the log-softmax (Apple's `warp_logits`). Of those, a search
of W beams needs the first W by name; of the others, only their part of the normaliser:

    top50(V tokens) = top50(of each block of the vocabulary, its top 50)

`keep_top` finds each block's 50 best in any order, `rank_rows` the W best of all blocks in
descending order, and the normaliser. Neither sorts: the 50th largest is found by halving the range
of the keys (`nth_largest`), of equal logits the lower tokens are kept, and the few of which the
order matters are taken out one after the other.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_redrafter.config import TOP_TOKENS
from vllm_redrafter.triton_kernels.checks import require, require_last_dim_contiguous
from vllm_redrafter.triton_kernels.ordered_keys import (
    BEHIND_ALL,
    LAST_INDEX,
    float_of_pair,
    index_of_pair,
    key_of,
    nth_largest,
    ordered_pair,
)
from vllm_redrafter.triton_kernels.registers import register_limit

TOP = tl.constexpr(TOP_TOKENS)

MAX_BLOCKS = 64
"""Of the vocabulary; their candidates are merged by one thread block."""

ZERO_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
"""By a logit's dtype: its last bits as float32 that are always 0, and need not be searched."""


class TopTokens(NamedTuple):
    """What is kept of a row of draft logits.

    Attributes:
        logits: [rows, num] float32, in descending order; -inf where the vocabulary has no more.
        tokens: [rows, num] int32; of equal logits the lower first; 0 where there is none.
        normalisers: [rows] float32, the log-sum-exp of the 50 best; 0 where all are -inf.
    """

    logits: Tensor
    tokens: Tensor
    normalisers: Tensor


@triton.jit
def is_kept(logit, exists, count, ZEROS: tl.constexpr):
    """Which of a block's logits are its `count` best; of equal ones, the first."""
    key = tl.where(exists, key_of(logit), BEHIND_ALL) >> ZEROS
    last = nth_largest(key, count, 32 - ZEROS)
    above = key > last
    tie = (key == last) & exists
    places = count - tl.sum(above.to(tl.int32), axis=0)
    return above | (tie & (tl.cumsum(tie.to(tl.int32), axis=0) <= places))


@triton.jit(do_not_specialize=["first_rows"])
def keep_top(
    logits,  # [rows, VOCAB] bf16, fp16 or fp32
    row_stride,
    kept_logits,  # [rows, blocks, MOST] fp32, the first `count` of each block written
    kept_tokens,  # [rows, blocks, MOST] int32, likewise
    VOCAB,
    first_rows,
    FIRST_COUNT: tl.constexpr,
    COUNT: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_MOST: tl.constexpr,
    ZEROS: tl.constexpr,
):
    """One row and block of the vocabulary: its `count` best, in the order of tokens.

    These are FIRST_COUNT of the first rows, COUNT of the others, and MOST at most.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count = tl.where(row < first_rows, FIRST_COUNT, COUNT)
    token = block * BLOCK + tl.arange(0, BLOCK)
    exists = token < VOCAB
    logit = tl.load(logits + row * row_stride + token, mask=exists, other=0.0).to(tl.float32)
    kept = is_kept(logit, exists, count, ZEROS)
    nth = tl.cumsum(kept.to(tl.int32), axis=0) - 1
    to = (row * tl.num_programs(1) + block) * MOST
    tl.store(kept_logits + to + nth, logit, mask=kept)
    tl.store(kept_tokens + to + nth, token, mask=kept)
    place = tl.arange(0, BLOCK_MOST)
    empty = (place >= tl.sum(kept.to(tl.int32), axis=0)) & (place < count)
    tl.store(kept_logits + to + place, float("-inf"), mask=empty)
    tl.store(kept_tokens + to + place, LAST_INDEX, mask=empty)


@triton.jit
def rank_row(
    logit,  # [BLOCK] fp32 values
    token,  # [BLOCK] int32 values; LAST_INDEX where there is none
    row,
    top_logits,  # [rows, FIRST] fp32, written
    top_tokens,  # [rows, FIRST] int32, written
    normalisers,  # [rows] fp32, written
    FIRST: tl.constexpr,
    ZEROS: tl.constexpr,
):
    """The log-sum-exp of a row's TOP best, and the first of them in order."""
    exists = token != LAST_INDEX
    key = tl.where(exists, key_of(logit), BEHIND_ALL) >> ZEROS
    last = nth_largest(key, TOP, 32 - ZEROS)
    most = tl.max(logit, axis=0)
    most = tl.where(most == float("-inf"), 0.0, most)
    weight = tl.exp(logit - most)
    above = key > last
    # Whichever of the last one's equals are kept, they weigh the same.
    weight_of_last = tl.max(tl.where((key == last) & exists, weight, 0.0), axis=0)
    places = TOP - tl.sum(above.to(tl.int32), axis=0)
    total = tl.sum(tl.where(above, weight, 0.0), axis=0) + places * weight_of_last
    has_any = total > 0.0
    normaliser = most + tl.log(tl.where(has_any, total, 1.0))
    tl.store(normalisers + row, tl.where(has_any, normaliser, 0.0))

    pair = ordered_pair(logit, token)
    nothing = tl.full(logit.shape, float("-inf"), tl.float32)
    missing = ordered_pair(nothing, tl.full(logit.shape, LAST_INDEX, tl.int32))
    for nth in range(FIRST):
        best = tl.max(pair, axis=0)
        pair = tl.where(pair == best, missing, pair)
        best_token = index_of_pair(best)
        tl.store(top_logits + row * FIRST + nth, float_of_pair(best))
        tl.store(top_tokens + row * FIRST + nth, tl.where(best_token == LAST_INDEX, 0, best_token))


@triton.jit
def rank_rows(
    logits,  # [rows, NUM] fp32
    tokens,  # [rows / GROUP, NUM] int32; LAST_INDEX where there is none
    top_logits,  # [rows, FIRST] fp32, written
    top_tokens,  # [rows, FIRST] int32, written
    normalisers,  # [rows] fp32, written
    NUM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    ZEROS: tl.constexpr,
):
    """One row: the log-sum-exp of its TOP best, and the first of them in order."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    logit = tl.load(logits + row * NUM + index, mask=index < NUM, other=float("-inf"))
    of_group = tokens + row // GROUP * NUM
    token = tl.load(of_group + index, mask=index < NUM, other=LAST_INDEX)
    rank_row(logit, token, row, top_logits, top_tokens, normalisers, FIRST, ZEROS)


def top_candidates(logits: Tensor, num: int) -> TopTokens:
    """The `num` best tokens of each row, and what normalises them over the 50 best.

    Args:
        logits: [rows, V] bf16, fp16 or fp32, rows contiguous.
        num: how many; at most 50.

    Returns:
        See `TopTokens`; `logits - normalisers[:, None]` are the log-probabilities of
        `beam_search.log_softmax_of_top`.
    """
    check_logits(logits, num)
    rows, vocabulary = logits.shape
    kept_logits, kept_tokens = best_of_blocks(logits, vocabulary_block(vocabulary))
    blocks = kept_logits.shape[1]
    top = empty_top(rows, num, logits.device)
    merged = triton.next_power_of_2(blocks * TOP_TOKENS)
    rank_rows[(rows,)](
        kept_logits,
        kept_tokens,
        *top,
        NUM=blocks * TOP_TOKENS,
        GROUP=1,
        BLOCK=merged,
        FIRST=num,
        ZEROS=ZERO_BITS[logits.dtype],
        num_warps=4 if merged <= 1024 else 8,
        # Room for three blocks on a multiprocessor, which there are too few of, would be bought
        # by spilling: Triton 3.6's assembler does so for sm_80 to sm_89.
        **register_limit(128),
    )
    return top


def best_of_blocks(
    logits: Tensor, block: int, first_rows: int | None = None, count: int = TOP_TOKENS
) -> tuple[Tensor, Tensor]:
    """The best of each block of the vocabulary, in one launch.

    Args:
        logits: [rows, V] bf16, fp16 or fp32, rows contiguous.
        block: tokens of each, a power of two.
        first_rows: of how many rows 50 are kept; None for all.
        count: how many are kept of each other row.

    Returns:
        (logits [rows, blocks, max(50, count)] float32, tokens likewise int32): of each block as
        many as are kept, in the order of tokens; -inf and LAST_INDEX where it has no more.
    """
    rows, vocabulary = logits.shape
    blocks, most = triton.cdiv(vocabulary, block), max(TOP_TOKENS, count)
    kept_logits = logits.new_empty(rows, blocks, most, dtype=torch.float32)
    kept_tokens = logits.new_empty(rows, blocks, most, dtype=torch.int32)
    keep_top[(rows, blocks)](
        logits,
        logits.stride(0),
        kept_logits,
        kept_tokens,
        vocabulary,
        rows if first_rows is None else first_rows,
        FIRST_COUNT=TOP_TOKENS,
        COUNT=count,
        MOST=most,
        BLOCK=block,
        BLOCK_MOST=triton.next_power_of_2(most),
        ZEROS=ZERO_BITS[logits.dtype],
        num_warps=4 if block <= 2048 else 8,
    )
    return kept_logits, kept_tokens


def empty_top(rows: int, num: int, device: torch.device) -> TopTokens:
    """What a kernel writes."""
    return TopTokens(
        torch.empty(rows, num, dtype=torch.float32, device=device),
        torch.empty(rows, num, dtype=torch.int32, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
    )


def check_logits(logits: Tensor, num: int) -> None:
    """Raise a ValueError unless these are [rows, V] of draft logits, and of each row `num` best."""
    require(1 <= num <= TOP_TOKENS, f"num: must be 1 to {TOP_TOKENS}, got {num}")
    require(logits.dim() == 2, f"logits: expected [rows, V], got {list(logits.shape)}")
    require(logits.dtype in ZERO_BITS, f"logits: bf16, fp16 or fp32 expected, got {logits.dtype}")
    require_last_dim_contiguous(logits=logits)
    vocabulary = logits.shape[1]
    require(1 <= vocabulary < LAST_INDEX.value, f"logits: {vocabulary} tokens are not supported")


def vocabulary_block(vocabulary: int) -> int:
    """Tokens per block: small ones keep more multiprocessors busy, large ones leave less to merge.

    1,024 for V = 32k, 2,048 for 128k; at most MAX_BLOCKS blocks.
    """
    return max(1024, triton.next_power_of_2(triton.cdiv(vocabulary, MAX_BLOCKS)))
