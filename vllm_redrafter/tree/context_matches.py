# SPDX-License-Identifier: Apache-2.0
"""Prompt-lookup (n-gram) matches in a request's own text, and the paths that follow them.

Text that repeats (quotes, edits, code, summaries) goes on as it went on before. A *match* is an
earlier occurrence of the longest suffix of the text, up to LONGEST_MATCH tokens; a *path* is what
follows it there. A path that reaches the text's end goes on with its own beginning (LZ77): what
repeats with a period is continued with it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_redrafter.tree.beam_search import ExploredNodes

LONGEST_MATCH = 5
"""Tokens of a suffix that are compared."""
SHORTEST_EARLIER, LONGEST_EARLIER = 3, 8
"""Tokens of a match in an earlier answer (`earlier_answers.py`), at least and at most."""
LENGTH_CLASSES = LONGEST_MATCH + 1 + LONGEST_EARLIER - SHORTEST_EARLIER
"""A match's tokens, in own text or in an earlier answer."""
ALONE, AGREED, PARTED = range(3)
"""What the second best place with a match of this length says: nothing, or the same token as the
best one; or the first other token."""
MATCH_CLASSES = 3 * LENGTH_CLASSES
"""What acceptance is learned by: both."""


class ContextMatches(NamedTuple):
    """The best M paths of R requests, of D tokens each: the longest matches, of these the newest.

    Paths of a request differ in their first tokens.

    Attributes:
        tokens: [R, M, D] int64; -1 where there is no path, and from where one ends.
        classes: [R, M, D] int64, of each token, 0 where there is none. By the length of its match:
            1 to LONGEST_MATCH tokens of own text; then SHORTEST_EARLIER to LONGEST_EARLIER tokens
            of an earlier answer. To it LENGTH_CLASSES are added once for AGREED, twice for PARTED.
    """

    tokens: Tensor
    classes: Tensor


def joint_scores(nodes: ExploredNodes, classes: Tensor, probabilities: Tensor) -> Tensor:
    """The log-probabilities of joined nodes, [R, L', W'] float32; -inf where there is no node.

    Args:
        nodes, classes: [R, L', W'], of `drafting/joining.py`.
        probabilities: [MATCH_CLASSES, D] float32, of a path's nodes given their parents, by class
            of the match and depth; or [R, MATCH_CLASSES, D], of each request's own.
    """
    drafted = nodes.log_probs
    by_request = probabilities.expand(len(drafted), -1, -1)
    levels: list[Tensor] = []
    for level in range(classes.shape[1]):
        pointers = nodes.back_pointers[:, level]
        above = torch.zeros_like(drafted[:, 0])
        given_parent = drafted[:, level]
        if level:
            above = levels[-1].gather(1, pointers)
            parents = drafted[:, level - 1].gather(1, pointers)
            given_parent = torch.where(
                given_parent > -torch.inf, given_parent - parents, -torch.inf
            )
        if level < probabilities.shape[-1]:
            of_match = (classes[:, level] - 1).clamp(min=0)
            matched = by_request[:, :, level].gather(1, of_match).log()
            matched = matched.masked_fill(classes[:, level] == 0, -torch.inf)
            given_parent = torch.maximum(given_parent, matched)
        levels.append(above + given_parent)
    return torch.stack(levels, dim=1)
