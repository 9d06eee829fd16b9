# SPDX-License-Identifier: Apache-2.0
"""How often nodes of matches are accepted, by class of the match and depth: in one launch.

A node is judged, and accepted, as `observe_nodes.py` has it. With n nodes judged in a step, of
matches of a class, at depth d and of requests of one kind (greedy or sampled), and k of them
accepted,

    judged' = judged + n,    accepted' = accepted + k,    P = accepted' / judged',

where both fade so that at most MEMORY nodes are remembered, and accepted' never below 1: see
`budget/match_acceptance.py`. A program has one class and one depth, and counts whole nodes: all
ranks of tensor parallelism get the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_redrafter.tree.context_matches import LENGTH_CLASSES, LONGEST_MATCH
from vllm_redrafter.triton_kernels.checks import require, require_layout
from vllm_redrafter.triton_kernels.observe_nodes import VerifiedTrees

OWN_LENGTHS, LENGTHS = tl.constexpr(LONGEST_MATCH), tl.constexpr(LENGTH_CLASSES)
NODES = 1024
"""That a program looks at, at a time."""


@triton.jit
def _count(
    counts,  # [2] fp32, added to: judged, accepted
    probability,  # [1] fp32, written
    judged,
    accepted,
    memory,
):
    """Add a step's nodes of one kind, class and depth."""
    all_judged = tl.load(counts) + judged.to(tl.float32)
    all_accepted = tl.load(counts + 1) + accepted.to(tl.float32)
    kept = tl.minimum(memory / all_judged, 1.0)
    tl.store(counts, all_judged * kept)
    all_accepted = tl.maximum(all_accepted * kept, 1.0)
    tl.store(counts + 1, all_accepted)
    tl.store(probability, all_accepted / (all_judged * kept))


@triton.jit(do_not_specialize=["REQUESTS"])
def _observe_matches(
    entries,  # [R] int64
    match_classes,  # [entries, SLOTS] int32
    tokens,  # [R, SLOTS] int32
    parents,  # [R, SLOTS] int32
    depths,  # [R, SLOTS] int32
    num_verified,  # [R] int32
    path,  # [R, SLOTS] int32
    temperatures,  # [R] fp32
    counts,  # [2, MATCHES, DEPTH, 2] fp32, added to
    probabilities,  # [2, MATCHES, DEPTH] fp32, written
    totals,  # [4] int64, added to
    memory,
    REQUESTS,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Nodes of one depth, of matches of one class."""
    of_class, level = tl.program_id(0), tl.program_id(1)
    node = tl.arange(0, BLOCK)[None, :]
    judged, accepted = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32)
    of_sampled, accepted_of_sampled = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32)
    verified_here = tl.zeros([TILE], tl.int32)
    for start in range(0, REQUESTS, TILE):
        request = start + tl.arange(0, TILE)
        is_request = request < REQUESTS
        verified = tl.load(num_verified + request, mask=is_request, other=0)
        is_node = (node > 0) & (node < verified[:, None])
        at = request[:, None] * SLOTS + node
        entry = tl.load(entries + request, mask=is_request, other=0)
        match = tl.load(match_classes + entry[:, None] * SLOTS + node, mask=is_node, other=0)
        depth = tl.load(depths + at, mask=is_node, other=0)
        is_here = (match == of_class + 1) & (depth == level + 1)
        verified_here += tl.sum(is_here.to(tl.int32), axis=1)
        parent = tl.load(parents + at, mask=is_here, other=0)
        # A token of -1: the request's grammar was not asked about it.
        is_asked = tl.load(tokens + at, mask=is_here, other=-1) >= 0
        to_path = path + request * SLOTS + level
        reached = tl.load(to_path, mask=is_request, other=-1)
        next_reached = tl.load(to_path + 1, mask=is_request, other=-1)
        is_judged = is_asked & (parent == reached[:, None])
        is_accepted = is_judged & (node == next_reached[:, None])
        samples = (tl.load(temperatures + request, mask=is_request, other=0.0) > 0.0).to(tl.int32)
        judged_here = tl.sum(is_judged.to(tl.int32), axis=1)
        accepted_here = tl.sum(is_accepted.to(tl.int32), axis=1)
        judged += judged_here
        accepted += accepted_here
        of_sampled += judged_here * samples
        accepted_of_sampled += accepted_here * samples
    kind = tl.num_programs(0) * tl.num_programs(1)
    at = of_class * tl.num_programs(1) + level
    sampled, accepted_sampled = tl.sum(of_sampled, axis=0), tl.sum(accepted_of_sampled, axis=0)
    all_accepted = tl.sum(accepted, axis=0)
    greedy, accepted_greedy = tl.sum(judged, axis=0) - sampled, all_accepted - accepted_sampled
    of_source = totals + 2 * (of_class % LENGTHS >= OWN_LENGTHS).to(tl.int32)
    tl.atomic_add(of_source, tl.sum(verified_here, axis=0).to(tl.int64))
    tl.atomic_add(of_source + 1, all_accepted.to(tl.int64))
    _count(counts + 2 * at, probabilities + at, greedy, accepted_greedy, memory)
    at += kind
    _count(counts + 2 * at, probabilities + at, sampled, accepted_sampled, memory)


def observe_matches(
    entries: Tensor,
    match_classes: Tensor,
    trees: VerifiedTrees,
    memory: float,
    counts: Tensor,
    probabilities: Tensor,
    totals: Tensor,
) -> None:
    """Add a step's judged nodes that are on paths, and say how probable such nodes are.

    Args:
        entries: [R] int64, each request's entry of `match_classes`.
        match_classes: [entries, K+1] int32, class of the match that a node continues; 0 for none.
        trees: of these requests; the paths have D nodes or fewer, and D is at most K.
        memory: judged nodes of a class and depth that are remembered.
        counts: [2, MATCH_CLASSES, D, 2] fp32, of greedy and of sampled requests, by class and
            depth: nodes judged (above 0) and accepted; changed.
        probabilities: [2, MATCH_CLASSES, D] fp32, written.
        totals: [4] int64, added to: nodes on paths of own text that were verified, and those
            accepted; then of earlier answers.
    """
    requests, slots = entries.shape[0], match_classes.shape[1]
    _, matches, depth = probabilities.shape
    room = trees.tokens.shape[0]
    require(1 <= requests <= room, f"entries: {requests} requests, trees have room for {room}")
    int32, float32 = torch.int32, torch.float32
    require_layout(
        match_classes.device,
        entries=(entries, torch.int64, (requests,)),
        match_classes=(match_classes, int32, (1, slots)),
        **trees.layout(slots),
        counts=(counts, float32, (2, matches, depth, 2)),
        probabilities=(probabilities, float32, (2, matches, depth)),
        totals=(totals, torch.int64, (4,)),
    )
    require(depth < slots, f"probabilities: of {depth} depths, trees have {slots - 1} nodes")
    block = triton.next_power_of_2(slots)
    _observe_matches[(matches, depth)](
        *(entries, match_classes, *trees, counts, probabilities, totals, memory, requests),
        SLOTS=slots,
        BLOCK=block,
        TILE=max(1, NODES // block),
        num_warps=4,
    )
