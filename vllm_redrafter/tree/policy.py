# SPDX-License-Identifier: Apache-2.0
"""Which nodes to draft, and which of them to keep: the engines and `evaluate` ask here alike."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_redrafter.config import ReDrafterConfig, TreeKind
from vllm_redrafter.tree.beam_search import ExploredNodes


class SearchShape(NamedTuple):
    """How wide and how long to search: W beams of L tokens.

    Of a search of width 1 a chain is verified. Where L is 0 nothing is searched: paths found in the
    text (`context_matches.py`) are all that there is.
    """

    beam_width: int
    beam_length: int


MATCH_CHAIN, MATCH_TREE = SearchShape(1, 0), SearchShape(2, 0)
"""No search: the best path, or all of them."""


def search_shape(config: ReDrafterConfig, max_nodes: int) -> SearchShape:
    """The search for a step that verifies at most `max_nodes` nodes per request.

    A tree of fewer nodes than a beam is long accepts hardly more than a single path, whose
    verification is cheaper: it is a chain, which needs no tree attention on a CPU (8 requests,
    K = 2: 1.2 times plain decoding, against 0.9 with a tree).

    Args:
        config: the most that is searched.
        max_nodes: what the step can verify, the root not counted; at least 1.
    """
    if max_nodes < config.beam_length:
        return SearchShape(1, max_nodes)
    return SearchShape(config.beam_width, config.beam_length)


def allowed_nodes(explored: ExploredNodes, tree: TreeKind) -> Tensor | None:
    """The tree policies: which explored nodes may be in a tree, or on a chain.

    A policy masks; it does not rank. The best of the nodes that it allows are kept, by the draft's
    log-probability, or by what engines have learned of the acceptance of such nodes.

    Returns:
        [R, L, W] bool: where a node may be, so may its parent; None where all may.
    """
    return _on_finished_beams(explored) if tree == "beams" else None


def candidate_log_probs(explored: ExploredNodes, tree: TreeKind = "explored") -> Tensor:
    """The explored log-probabilities; -inf for nodes that may not be in the tree.

    Args:
        explored, tree: see `TokenTree.from_explored`.

    Returns:
        [R, L, W] float32.
    """
    allowed = allowed_nodes(explored, tree)
    log_probs = explored.log_probs
    return log_probs if allowed is None else log_probs.masked_fill(~allowed, -torch.inf)


def on_best_path(back_pointers: Tensor, log_probs: Tensor) -> Tensor:
    """Leave the nodes of the path of which the most tokens are expected: a chain.

    That is the greatest sum, over a path's nodes, of their probabilities.

    Args:
        back_pointers: [R, L, W] integers; of level 0 they say nothing.
        log_probs: [R, L, W] float32, cumulative; -inf where there is no node.

    Returns:
        [R, L, W] float32, the log-probabilities; -inf off the path.
    """
    requests, length, width = log_probs.shape
    probs = log_probs.exp().flatten(1)
    node = torch.arange(length * width, device=log_probs.device).expand(requests, -1)
    is_dead = log_probs.flatten(1) == -torch.inf
    # [R, L * W + 1]: the index of the parent; the last one stands for none.
    parents = (node // width - 1) * width + back_pointers.flatten(1)
    parents = parents.masked_fill((node < width) | is_dead, length * width)
    parents = torch.nn.functional.pad(parents, (0, 1), value=length * width)
    probs = torch.nn.functional.pad(probs, (0, 1))
    # Of the path that ends at each node.
    expected = probs[:, :-1].masked_fill(is_dead, -1.0)
    at = parents[:, :-1]
    for _ in range(length - 1):
        expected = expected + probs.gather(1, at)
        at = parents.gather(1, at)
    most, end = expected.max(dim=1, keepdim=True)
    end = end.masked_fill(most < 0, length * width)
    is_on = node == end
    for _ in range(length - 1):
        end = parents.gather(1, end)
        is_on |= node == end
    return log_probs.masked_fill(~is_on.view_as(log_probs), -torch.inf)


def _on_finished_beams(explored: ExploredNodes) -> Tensor:
    """[R, L, W] bool: nodes that a finished beam passes through."""
    back_pointers = explored.back_pointers
    kept = (explored.log_probs[:, -1] > -torch.inf).to(back_pointers.dtype)
    levels = [kept]
    for level in reversed(range(1, back_pointers.shape[1])):
        above = torch.zeros_like(kept)
        kept = above.scatter_reduce(1, back_pointers[:, level], kept, reduce="amax")
        levels.append(kept)
    return torch.stack(levels[::-1], dim=1).bool()
