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

    A tree of fewer nodes than a beam is long accepts hardly more than the best beam alone, whose
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
    """The tree policies: which explored nodes may be in a tree.

    A policy masks; it does not rank. The best of the nodes that it allows are kept, by the draft's
    log-probability, or by what engines have learned of the acceptance of such nodes.

    Returns:
        [R, L, W] bool: where a node may be, so may its parent; None where all may.
    """
    return _on_finished_beams(explored, explored.log_probs.shape[2]) if tree == "beams" else None


def candidate_log_probs(
    explored: ExploredNodes, tree: TreeKind = "explored", chain: Tensor | None = None
) -> Tensor:
    """The explored log-probabilities; -inf for nodes that may not be in the tree.

    Args:
        explored, tree, chain: see `TokenTree.from_explored`.

    Returns:
        [R, L, W] float32.
    """
    log_probs, allowed = explored.log_probs, allowed_nodes(explored, tree)
    if allowed is not None:
        log_probs = log_probs.masked_fill(~allowed, -torch.inf)
    if chain is not None:
        off_chain = ~_on_finished_beams(explored, num_beams=1) & chain[:, None, None]
        log_probs = log_probs.masked_fill(off_chain, -torch.inf)
    return log_probs


def _on_finished_beams(explored: ExploredNodes, num_beams: int) -> Tensor:
    """[R, L, W] bool: nodes that one of the best `num_beams` finished beams passes through."""
    back_pointers = explored.back_pointers
    width = back_pointers.shape[2]
    kept = torch.arange(width, device=back_pointers.device) < num_beams
    kept = (kept & (explored.log_probs[:, -1] > -torch.inf)).to(back_pointers.dtype)
    levels = [kept]
    for level in reversed(range(1, back_pointers.shape[1])):
        above = torch.zeros_like(kept)
        kept = above.scatter_reduce(1, back_pointers[:, level], kept, reduce="amax")
        levels.append(kept)
    return torch.stack(levels[::-1], dim=1).bool()
