# SPDX-License-Identifier: Apache-2.0
"""What became of a step's nodes, added to the budget's statistics: on the device, in two launches.

Greedy and sampled requests have each their own parameters and sums, as temperatures tell.

A node is accepted if it is on the path that the walk took, and judged if it was verified and its
parent is on the path: only then could it be accepted. With f the drafter's log-odds of a node, d
its depth, y whether it was accepted, and a = sigmoid(w f + b_d), the sums over the judged nodes of

    a (1 - a) (f f, f, 1), (y - a) (f, 1), 1

by depth are what `budget/acceptance.py` refits itself by. Nodes that are only on a path found in
the text (f is -inf) are left out. The first launch sums over each request's nodes, the second over
requests, always in the same order: all ranks of tensor parallelism get the same bits.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_redrafter.triton_kernels.checks import require, require_layout

COLUMNS = 6
"""Sums by depth."""

TILE = 32
"""Requests and sums that the second launch adds at a time."""


@triton.jit
def _observe_nodes(
    entries,  # [R] int64
    log_odds,  # [entries, SLOTS] fp32
    tokens,  # [R, SLOTS] int32
    parents,  # [R, SLOTS] int32
    depths,  # [R, SLOTS] int32
    num_verified,  # [R] int32
    path,  # [R, SLOTS] int32
    temperatures,  # [R] fp32
    slopes,  # [2, 1] fp32
    biases,  # [2, DEPTHS] fp32
    sums,  # [R, DEPTHS, COLUMNS] fp32, written
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTHS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One request."""
    request = tl.program_id(0)
    node = tl.arange(0, BLOCK)
    is_slot = node < SLOTS
    at = request * SLOTS + node
    # Behind the path's end: the root once more.
    on_path = tl.maximum(tl.load(path + at, mask=is_slot, other=0), 0)
    parent = tl.load(parents + at, mask=is_slot, other=0)
    accepted = tl.max((on_path[None, :] == node[:, None]).to(tl.int32), axis=1) > 0
    below_path = tl.max((on_path[None, :] == parent[:, None]).to(tl.int32), axis=1) > 0
    # A token of -1: the request's grammar was not asked about it.
    is_asked = tl.load(tokens + at, mask=is_slot, other=-1) >= 0
    verified = (node > 0) & (node < tl.load(num_verified + request)) & is_slot
    judged = verified & is_asked & below_path

    f = tl.load(log_odds + tl.load(entries + request) * SLOTS + node, mask=judged, other=0.0)
    # Of what the drafter did not find, only the text tells.
    judged = judged & (f != float("-inf"))
    f = tl.where(judged & (f == f), f, 0.0)
    depth = tl.load(depths + at, mask=judged, other=1)
    level = tl.minimum(tl.maximum(depth - 1, 0), DEPTHS - 1)
    kind = (tl.load(temperatures + request) > 0.0).to(tl.int32)
    x = tl.load(slopes + kind) * f + tl.load(biases + kind * DEPTHS + level)
    a = 1.0 / (1.0 + tl.exp(-x))
    y = accepted.to(tl.float32)
    weight, residual = a * (1.0 - a), y - a
    to = sums + request * DEPTHS * COLUMNS
    for index in range(DEPTHS):
        here = (judged & (depth == index + 1)).to(tl.float32)
        row = to + index * COLUMNS
        tl.store(row, tl.sum(here * weight * f * f, axis=0))
        tl.store(row + 1, tl.sum(here * weight * f, axis=0))
        tl.store(row + 2, tl.sum(here * weight, axis=0))
        tl.store(row + 3, tl.sum(here * residual * f, axis=0))
        tl.store(row + 4, tl.sum(here * residual, axis=0))
        tl.store(row + 5, tl.sum(here, axis=0))


@triton.jit(do_not_specialize=["REQUESTS"])
def _add_sums(
    sums,  # [R, NUM] fp32
    temperatures,  # [R] fp32
    total,  # [2, NUM] fp32, added to
    REQUESTS,
    NUM,
    TILE: tl.constexpr,
):
    """TILE of the sums, over all requests of their kind."""
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_sum = column < 2 * NUM
    of_sampled = column >= NUM
    added = tl.zeros([TILE], tl.float32)
    for start in range(0, REQUESTS, TILE):
        request = start + tl.arange(0, TILE)
        is_request = request < REQUESTS
        samples = tl.load(temperatures + request, mask=is_request, other=0.0) > 0.0
        is_here = (samples[:, None] == of_sampled[None, :]) & is_request[:, None]
        tile = tl.load(
            sums + request[:, None] * NUM + (column % NUM)[None, :],
            mask=is_here & is_sum[None, :],
            other=0.0,
        )
        added += tl.sum(tile, axis=0)
    before = tl.load(total + column, mask=is_sum, other=0.0)
    tl.store(total + column, before + added, mask=is_sum)


class VerifiedTrees(NamedTuple):
    """A step's trees and what came of them, in the batch's order, for R requests at least.

    Attributes:
        tokens, parents, depths: [R, K+1] int32, as they were verified.
        num_verified: [R] int32, how many nodes were, the root counted; 0 for none.
        path: [R, K+1] int32, the accepted nodes, root first; -1 behind its end.
        temperatures: [R] fp32, above 0 for requests that sample.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    num_verified: Tensor
    path: Tensor
    temperatures: Tensor

    def layout(self, slots: int) -> dict[str, tuple[Tensor, torch.dtype, tuple[int, ...]]]:
        """What `require_layout` is to hold each to, with K+1 `slots`."""
        requests, int32 = self.tokens.shape[0], torch.int32
        return {
            "tokens": (self.tokens, int32, (requests, slots)),
            "parents": (self.parents, int32, (requests, slots)),
            "depths": (self.depths, int32, (requests, slots)),
            "num_verified": (self.num_verified, int32, (requests,)),
            "path": (self.path, int32, (requests, slots)),
            "temperatures": (self.temperatures, torch.float32, (requests,)),
        }


def observe_nodes(
    entries: Tensor,
    log_odds: Tensor,
    trees: VerifiedTrees,
    slopes: Tensor,
    biases: Tensor,
    sums: Tensor,
    statistics: Tensor,
) -> None:
    """Add a step's judged nodes to the statistics of greedy and of sampled requests.

    Args:
        entries: [R] int64, each request's entry of `log_odds`.
        log_odds: [entries, K+1] fp32, the drafter's log-odds of each node; -inf where it has none.
        trees: of these requests.
        slopes, biases: [2, 1] and [2, L] fp32, of the estimator.
        sums: [R or more, L, 6] fp32, written.
        statistics: [2, L, 6] fp32, added to.
    """
    requests, slots = entries.shape[0], log_odds.shape[1]
    depths, num = biases.shape[-1], biases.shape[-1] * COLUMNS
    room, float32 = min(trees.tokens.shape[0], sums.shape[0]), torch.float32
    require_layout(
        log_odds.device,
        entries=(entries, torch.int64, (requests,)),
        log_odds=(log_odds, float32, (1, slots)),
        **trees.layout(slots),
        slopes=(slopes, float32, (2, 1)),
        biases=(biases, float32, (2, depths)),
        sums=(sums, float32, (1, depths, COLUMNS)),
        statistics=(statistics, float32, (2, depths, COLUMNS)),
    )
    require(
        1 <= requests <= room, f"entries: {requests} requests, trees and sums have room for {room}"
    )
    block = triton.next_power_of_2(slots)
    _observe_nodes[(requests,)](
        entries,
        log_odds,
        *trees,
        slopes,
        biases,
        sums,
        SLOTS=slots,
        BLOCK=block,
        DEPTHS=depths,
        COLUMNS=COLUMNS,
        num_warps=1 if block <= 32 else 4,
    )
    tiles = triton.cdiv(2 * num, TILE)
    _add_sums[(tiles,)](sums, trees.temperatures, statistics, requests, num, TILE=TILE, num_warps=4)
