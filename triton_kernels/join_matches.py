# SPDX-License-Identifier: Apache-2.0
"""A search's nodes and the paths found in the text, in one grid that `build_tree` takes.

A path's nodes that the search explored too stand where the search has them; the others hang below
them, in a column of the path's own. With s a node's score (the log of how probable it is to be
accepted, or the draft's log-probability), q its parent, and P the probability of a path's node by
its match and depth, the joined nodes' scores are, level by level,

    s'(node) = s'(q) + max(s(node) - s(q), log P),

where a node that is not of the search has no first term, and one on no path no second: it is as
probable, given its parent, as the more confident says. The host's forms are `joined_nodes` of
`drafting/joining.py` and `joint_scores` of `tree/context_matches.py`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_redrafter.triton_kernels.checks import require, require_layout
from vllm_redrafter.triton_kernels.find_matches import MatchBuffers


@triton.jit
def _join_matches(
    tokens,  # [R, LENGTH, WIDTH] int64
    back_pointers,  # [R, LENGTH, WIDTH] int64
    scores,  # [R, LENGTH, WIDTH] fp32
    log_odds,  # [R, LENGTH, WIDTH] fp32; read where HAS_LOG_ODDS
    paths,  # [R, PATHS, DEPTH] int64
    path_classes,  # [R, PATHS, DEPTH] int32
    probabilities,  # [2, MATCHES, DEPTH] fp32
    temperatures,  # [R] fp32
    out_tokens,  # [R, LEVELS, COLUMNS] int64, written
    out_back_pointers,  # [R, LEVELS, COLUMNS] int64, written
    out_scores,  # [R, LEVELS, COLUMNS] fp32, written
    out_log_odds,  # [R, LEVELS, COLUMNS] fp32, written
    out_match_classes,  # [R, LEVELS, COLUMNS] int32, written
    LENGTH: tl.constexpr,
    WIDTH: tl.constexpr,
    PATHS: tl.constexpr,
    DEPTH: tl.constexpr,
    MATCHES: tl.constexpr,
    LEVELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_PATHS: tl.constexpr,
    HAS_LOG_ODDS: tl.constexpr,
):
    """One request."""
    request = tl.program_id(0)
    column, path = tl.arange(0, BLOCK), tl.arange(0, BLOCK_PATHS)
    own_column = WIDTH + path
    is_own = (column[None, :] == own_column[:, None]) & (path < PATHS)[:, None]
    kind = (tl.load(temperatures + request) > 0.0).to(tl.int32)
    # Of each path: the column of its last node, and whether the search has all of it so far.
    at_column, shared = tl.zeros([BLOCK_PATHS], tl.int32), path < PATHS
    above = tl.zeros([BLOCK], tl.float32)  # Of the level above: scores, and those of the search.
    found_above = tl.zeros([BLOCK], tl.float32)
    for level in range(LEVELS):
        at = (request * LENGTH + level) * WIDTH + column
        is_found = column < tl.where(level < LENGTH, WIDTH, 0)
        token = tl.load(tokens + at, mask=is_found, other=0)
        pointer = tl.load(back_pointers + at, mask=is_found, other=0).to(tl.int32)
        score = tl.load(scores + at, mask=is_found, other=float("-inf"))
        is_searched = score > float("-inf")

        on_path = path < tl.where(level < DEPTH, PATHS, 0)
        to_path = (request * PATHS + path) * DEPTH + level
        next_token = tl.load(paths + to_path, mask=on_path, other=-1)
        matched = tl.load(path_classes + to_path, mask=on_path, other=0)
        # The root is the parent of a first level's nodes, whatever their pointers say.
        parent = tl.where(level > 0, pointer, 0)
        same = (parent[None, :] == at_column[:, None]) & (token[None, :] == next_token[:, None])
        same = same & is_searched[None, :]
        first = tl.min(tl.where(same, column[None, :], BLOCK), axis=1)
        shared = shared & (matched > 0) & (first < BLOCK)
        is_new = is_own & ((matched > 0) & (shared == 0))[:, None]
        token += tl.sum(tl.where(is_new, next_token[:, None], 0), axis=0)
        pointer += tl.sum(tl.where(is_new, at_column[:, None], 0), axis=0)
        at_column = tl.where(shared, first, own_column)
        is_on = column[None, :] == at_column[:, None]
        match = tl.sum(tl.where(is_on, matched[:, None], 0), axis=0)

        is_parent = column[None, :] == pointer[:, None]
        found_parent = tl.sum(tl.where(is_parent, found_above[None, :], 0.0), axis=1)
        given_parent = tl.where(is_searched, score, 0.0) - found_parent
        given_parent = tl.where(is_searched, given_parent, float("-inf"))
        to_probability = (kind * MATCHES + match - 1) * DEPTH + level
        probability = tl.load(probabilities + to_probability, mask=match > 0, other=1.0)
        by_match = tl.where(match > 0, tl.log(probability), float("-inf"))
        given_parent = tl.maximum(given_parent, by_match)
        found_above = score
        above = given_parent + tl.sum(tl.where(is_parent, above[None, :], 0.0), axis=1)

        to = (request * LEVELS + level) * COLUMNS + column
        is_column = column < COLUMNS
        tl.store(out_tokens + to, token, mask=is_column)
        tl.store(out_back_pointers + to, pointer.to(tl.int64), mask=is_column)
        tl.store(out_scores + to, above, mask=is_column)
        tl.store(out_match_classes + to, match, mask=is_column)
        if HAS_LOG_ODDS:
            odds = tl.load(log_odds + at, mask=is_found, other=float("-inf"))
            tl.store(out_log_odds + to, odds, mask=is_column)


class SearchedNodes(NamedTuple):
    """What a search found for R requests; L and W are 0 where there was none.

    Attributes:
        tokens, back_pointers: [R, L, W] int64, as of `ExploredNodes`.
        scores: [R, L, W] fp32, cumulative logs; -inf where there is no node.
        log_odds: [R, L, W] fp32, the drafter's of each node given its parent; None where nobody
            asks for them.
    """

    tokens: Tensor
    back_pointers: Tensor
    scores: Tensor
    log_odds: Tensor | None


class JoinedBuffers:
    """A grid for a search's nodes and M paths of D tokens, allocated once.

    Attributes:
        tokens, back_pointers: [R, max(L, D), W + M] int64.
        scores: likewise fp32; -inf where there is no node.
        log_odds: likewise fp32; -inf where the search has no node.
        match_classes: likewise int32, of the path that a node is on; 0 for none.
    """

    def __init__(
        self,
        max_requests: int,
        search: tuple[int, int],
        paths: tuple[int, int],
        device: torch.device | str,
    ) -> None:
        """Room for R = max_requests, searches of (W, L) and (M, D) of paths."""
        (width, length), (num_paths, depth) = search, paths
        shape = (max_requests, max(length, depth), width + num_paths)
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self.back_pointers = torch.zeros_like(self.tokens)
        self.scores = torch.zeros(shape, dtype=torch.float32, device=device)
        self.log_odds = torch.zeros_like(self.scores)
        self.match_classes = torch.zeros(shape, dtype=torch.int32, device=device)


def join_matches(
    search: SearchedNodes,
    paths: MatchBuffers,
    probabilities: Tensor,
    temperatures: Tensor,
    out: JoinedBuffers,
) -> None:
    """Join the nodes of R requests.

    Args:
        search: contiguous.
        paths: of at least R requests, in the same order.
        probabilities: [2, MATCH_CLASSES, D] fp32, of a path's node given its parent, of greedy and
            of sampled requests, by class of the match and depth; above 0.
        temperatures: [R] fp32, above 0 for requests that sample.
        out: of these sizes, for at least R requests; the first R are written, `log_odds` where
            the search has them.
    """
    requests, length, width = search.tokens.shape
    max_requests, num_paths, depth = paths.tokens.shape
    most, levels, columns = out.tokens.shape
    grid, matches = (requests, length, width), probabilities.shape[1]
    log_odds = search.scores if search.log_odds is None else search.log_odds
    int64, float32 = torch.int64, torch.float32
    require_layout(
        out.tokens.device,
        tokens=(search.tokens, int64, grid),
        back_pointers=(search.back_pointers, int64, grid),
        scores=(search.scores, float32, grid),
        log_odds=(log_odds, float32, grid),
        probabilities=(probabilities, float32, (2, matches, depth)),
        temperatures=(temperatures, float32, (requests,)),
    )
    require(
        1 <= requests <= min(max_requests, most),
        f"search: {requests} requests, paths and out have room for {min(max_requests, most)}",
    )
    require(
        (levels, columns) == (max(length, depth), width + num_paths),
        f"out: expected a grid of {[max(length, depth), width + num_paths]}, got "
        f"{[levels, columns]}",
    )
    block = triton.next_power_of_2(columns)
    _join_matches[(requests,)](
        *(*search[:3], log_odds, paths.tokens, paths.classes, probabilities, temperatures),
        *(out.tokens, out.back_pointers, out.scores, out.log_odds, out.match_classes),
        LENGTH=length,
        WIDTH=width,
        PATHS=num_paths,
        DEPTH=depth,
        MATCHES=matches,
        LEVELS=levels,
        COLUMNS=columns,
        BLOCK=block,
        BLOCK_PATHS=triton.next_power_of_2(num_paths),
        HAS_LOG_ODDS=search.log_odds is not None,
        num_warps=1 if block <= 16 else 4,
    )
