# SPDX-License-Identifier: Apache-2.0
"""One level of beam search, on the device: from each beam's best tokens to the next W beams.

A beam b of the level above, of cumulative log-probability p_b, has W candidates: a beam of the
next level is among its parent's W best, so B x W candidates suffice. With z a candidate's logit
and Z_b the normaliser of its beam's 50 best logits,

    p = p_b + (z - Z_b);    the W largest p, ties by beam, then by rank within the beam

One launch does what softmax, addition, selection, back-pointers and the choice of the states to
go on from are as operations of torch. Where a budget needs it, each kept node's log-odds given its
parent and its log-survival come with it (`budget/acceptance.py` has their formulas):

    f = log(q / (1 - q)), q = exp(z - Z_b);    s = s_b + log sigmoid(w f + bias of the level)

where w and the biases are those of greedy, or of sampled requests.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_redrafter.config import TOP_TOKENS
from vllm_redrafter.triton_kernels.checks import require, require_layout
from vllm_redrafter.triton_kernels.ordered_keys import BEHIND_ALL, ordered_pair
from vllm_redrafter.triton_kernels.top_candidates import TopTokens

MAX_LOG_ODDS = 40.0
"""As in `budget/acceptance.py`; a test holds the two together."""


@triton.jit
def _log_odds(log_q, MOST: tl.constexpr):
    """log(q / (1 - q)) of q = exp(log_q), within +-MOST."""
    small = tl.minimum(log_q, 0.0)
    # 1 - exp(x) loses its digits near 0, where a few terms of the series are exact.
    series = -small * (1.0 + small * (0.5 + small * (1.0 / 6.0 + small * (1.0 / 24.0))))
    rest = tl.where(small > -0.02, series, 1.0 - tl.exp(small))
    log_odds = tl.where(rest > 0.0, small - tl.log(tl.maximum(rest, 1e-37)), MOST)
    return tl.minimum(tl.maximum(log_odds, -MOST), MOST)


@triton.jit
def _log_sigmoid(x):
    return tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit(do_not_specialize=["level"])
def _grow_beams(
    top_logits,  # [R * BEAMS, WIDTH] fp32
    top_tokens,  # [R * BEAMS, WIDTH] int32, draft tokens
    normalisers,  # [R * BEAMS] fp32
    to_target,  # [draft tokens] int64, what to add to a draft token; read where HAS_TO_TARGET
    tokens,  # [R, LEVELS, WIDTH] int64, level `level` written
    back_pointers,  # [R, LEVELS, WIDTH] int64, likewise
    log_probs,  # [R, LEVELS, WIDTH] fp32, likewise; the level above is read
    log_odds,  # [R, LEVELS, WIDTH] fp32, likewise where HAS_SURVIVAL
    log_survival,  # [R, LEVELS, WIDTH] fp32, likewise; the level above is read
    slopes,  # [2, 1] fp32; read where HAS_SURVIVAL
    biases,  # [2, DEPTHS] fp32; likewise
    temperatures,  # [R] fp32; likewise
    last_tokens,  # [R * WIDTH] int64, written: the level's tokens
    parents,  # [R * WIDTH] int32, written: the rows of the level above that they continue
    level,
    LEVELS: tl.constexpr,
    DEPTHS: tl.constexpr,
    BEAMS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_ABOVE: tl.constexpr,
    HAS_TO_TARGET: tl.constexpr,
    HAS_SURVIVAL: tl.constexpr,
    MAX_LOG_ODDS: tl.constexpr,
):
    """One request."""
    request = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    is_candidate = index < BEAMS * WIDTH
    beam = index // WIDTH
    row = request * BEAMS + beam
    at = request * BEAMS * WIDTH + index
    to_level = (request * LEVELS + level) * WIDTH
    beam_above = to_level - WIDTH + beam
    logit = tl.load(top_logits + at, mask=is_candidate, other=float("-inf"))
    given_parent = logit - tl.load(normalisers + row, mask=is_candidate, other=0.0)
    score = given_parent
    if HAS_ABOVE:
        score += tl.load(log_probs + beam_above, mask=is_candidate, other=0.0)

    pair = ordered_pair(score, index)
    behind = tl.full([BLOCK], BEHIND_ALL, tl.int64) << 32
    pair = tl.where(is_candidate, pair, behind)
    rank = tl.full([BLOCK], WIDTH, tl.int32)
    for nth in range(WIDTH):
        is_best = pair == tl.max(pair, axis=0)
        rank = tl.where(is_best & is_candidate, nth, rank)
        pair = tl.where(is_best, behind, pair)

    kept = rank < WIDTH
    token = tl.load(top_tokens + at, mask=kept, other=0).to(tl.int64)
    if HAS_TO_TARGET:
        token += tl.load(to_target + token, mask=kept, other=0)
    tl.store(tokens + to_level + rank, token, mask=kept)
    tl.store(back_pointers + to_level + rank, beam.to(tl.int64), mask=kept)
    tl.store(log_probs + to_level + rank, score, mask=kept)
    tl.store(last_tokens + request * WIDTH + rank, token, mask=kept)
    tl.store(parents + request * WIDTH + rank, row, mask=kept)
    if HAS_SURVIVAL:
        own_log_odds = _log_odds(given_parent, MAX_LOG_ODDS)
        kind = (tl.load(temperatures + request) > 0.0).to(tl.int32)
        bias = tl.load(biases + kind * DEPTHS + level)
        survival = _log_sigmoid(tl.load(slopes + kind) * own_log_odds + bias)
        if HAS_ABOVE:
            survival += tl.load(log_survival + beam_above, mask=is_candidate, other=0.0)
        survival = tl.where(score == float("-inf"), float("-inf"), survival)
        tl.store(log_odds + to_level + rank, own_log_odds, mask=kept)
        tl.store(log_survival + to_level + rank, survival, mask=kept)


class BeamBuffers:
    """What a search of W beams and L levels writes, allocated once.

    Attributes:
        tokens, back_pointers: [R, L, W] int64, as in `ExploredNodes`.
        log_probs: [R, L, W] float32, likewise.
        log_odds: [R, L, W] float32, the log-odds of a node given its parent.
        log_survival: [R, L, W] float32, never above the parent's; -inf where no beam is.
        last_tokens: [R * W] int64, the tokens of the level grown last, of the target's.
        parents: [R * W] int32, which row of the level above (request by request, beam by beam)
            each of them continues.
    """

    def __init__(
        self, max_requests: int, beam_length: int, beam_width: int, device: torch.device | str
    ) -> None:
        """Room for R = max_requests; at most 50 beams."""
        require(
            1 <= beam_width <= TOP_TOKENS, f"beam_width must be 1 to {TOP_TOKENS}, got {beam_width}"
        )
        shape, rows = (max_requests, beam_length, beam_width), max_requests * beam_width
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self.back_pointers = torch.zeros_like(self.tokens)
        self.log_probs = torch.zeros(shape, dtype=torch.float32, device=device)
        self.log_odds = torch.zeros_like(self.log_probs)
        self.log_survival = torch.zeros_like(self.log_probs)
        self.last_tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.parents = torch.zeros(rows, dtype=torch.int32, device=device)

    def explored(self, requests: int, ranked: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Tokens, back-pointers, log-probabilities; `ranked`: survival, and the log-odds last."""
        tokens, back_pointers = self.tokens[:requests], self.back_pointers[:requests]
        if not ranked:
            return tokens, back_pointers, self.log_probs[:requests], None
        return tokens, back_pointers, self.log_survival[:requests], self.log_odds[:requests]


def grow_beams(
    top: TopTokens,
    level: int,
    requests: int,
    out: BeamBuffers,
    to_target: Tensor | None = None,
    survival: tuple[Tensor, Tensor, Tensor] | None = None,
    beams: int | None = None,
) -> None:
    """Choose a level's beams among the best tokens of those above.

    Args:
        top: of [rows, W]: on level 0 a row per request, its root; then one for each beam.
        level: 0 to L - 1; those above have been grown.
        requests: how many, R.
        out: at least R requests; what is there of the level above is read.
        to_target: [draft tokens] int64, `d2t`; None where the drafter ranks all tokens.
        survival: slopes [2, 1] and biases [2, L or more] fp32 of the budget's estimator, and
            temperatures fp32 of all requests in `out`; None writes neither log-odds nor survival.
        beams: how many of the level above go on; None for all. `top` has as many rows per request.
    """
    max_requests, length, width = out.tokens.shape
    beams = beams or (1 if level == 0 else width)
    require(0 <= level < length, f"level: must be 0 to {length - 1}, got {level}")
    require(1 <= requests <= max_requests, f"requests: must be 1 to {max_requests}")
    rows, float32 = requests * beams, torch.float32
    depths = length if survival is None else max(length, survival[1].shape[-1])
    layouts: dict[str, tuple[Tensor, torch.dtype, tuple[int, ...]]] = {
        "logits": (top.logits, float32, (rows, width)),
        "tokens": (top.tokens, torch.int32, (rows, width)),
        "normalisers": (top.normalisers, float32, (rows,)),
    }
    if to_target is not None:
        layouts["to_target"] = to_target, torch.int64, (1,)
    if survival is not None:
        layouts["slopes"] = survival[0], float32, (2, 1)
        layouts["biases"] = survival[1], float32, (2, depths)
        layouts["temperatures"] = survival[2], float32, (max_requests,)
    require_layout(out.tokens.device, **layouts)
    block = triton.next_power_of_2(beams * width)
    _grow_beams[(requests,)](
        *top,
        to_target if to_target is not None else top.tokens,
        out.tokens,
        out.back_pointers,
        out.log_probs,
        out.log_odds,
        out.log_survival,
        *(survival or (top.normalisers,) * 3),
        out.last_tokens,
        out.parents,
        level,
        LEVELS=length,
        DEPTHS=depths,
        BEAMS=beams,
        WIDTH=width,
        BLOCK=block,
        HAS_ABOVE=level > 0,
        HAS_TO_TARGET=to_target is not None,
        HAS_SURVIVAL=survival is not None,
        MAX_LOG_ODDS=MAX_LOG_ODDS,
        num_warps=max(1, min(8, block // 128)),
    )
