# SPDX-License-Identifier: Apache-2.0
"""Which nodes to draft, and which of them to keep: the engines and `evaluate` ask here alike."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_redrafter.config import ReDrafterConfig, TreeKind
from vllm_redrafter.tree.beam_search import ExploredNodes


class SearchShape(NamedTuple):
    """W beams of L tokens; width 1 verifies a chain, length 0 drafts n-gram matches alone."""

    beam_width: int
    beam_length: int


MATCHES = SearchShape(2, 0)
"""No search: matches alone."""


def search_shape(config: ReDrafterConfig, max_nodes: int) -> SearchShape:
    """The search for a step that can verify `max_nodes` nodes per request, at least 1.

    A tree of fewer nodes than a beam is long accepts hardly more than a chain, which is cheaper
    (on a CPU, 8 requests, K = 2: 1.2 times plain decoding, against 0.9 with a tree).
    """
    if max_nodes < config.beam_length:
        return SearchShape(1, max_nodes)
    return SearchShape(config.beam_width, config.beam_length)


def allowed_nodes(explored: ExploredNodes, tree: TreeKind) -> Tensor | None:
    """The tree policies: which explored nodes may be in a tree, or on a chain.

    A policy masks; it does not rank. The best of the nodes that it allows are kept, by the draft's
    log-probability, or by what engines have learned of the acceptance of such nodes. [R, L, W]
    bool: where a node may be, so may its parent; None where all may.
    """
    if tree != "beams":
        return None
    back_pointers = explored.back_pointers
    kept = (explored.log_probs[:, -1] > -torch.inf).to(back_pointers.dtype)
    levels = [kept]
    for level in reversed(range(1, back_pointers.shape[1])):
        above = torch.zeros_like(kept)
        kept = above.scatter_reduce(1, back_pointers[:, level], kept, reduce="amax")
        levels.append(kept)
    return torch.stack(levels[::-1], dim=1).bool()


def candidate_log_probs(explored: ExploredNodes, tree: TreeKind = "explored") -> Tensor:
    """[R, L, W] float32, the explored log-probabilities; -inf for nodes that are not allowed."""
    allowed = allowed_nodes(explored, tree)
    log_probs = explored.log_probs
    return log_probs if allowed is None else log_probs.masked_fill(~allowed, -torch.inf)


def on_best_path(back_pointers: Tensor, log_probs: Tensor) -> Tensor:
    """Mask all nodes off the path whose nodes' probabilities have the greatest sum: a chain.

    Args:
        back_pointers: [R, L, W] integers; those of level 0 are not read.
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
    parents, probs = pad(parents, (0, 1), value=length * width), pad(probs, (0, 1))
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
