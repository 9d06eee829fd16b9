# SPDX-License-Identifier: Apache-2.0
"""Prompt-lookup (n-gram) matches in a request's own text, and the paths that follow them.

Text that repeats (quotes, edits, code, summaries) goes on as it went on before. A *match* is an
earlier occurrence of the longest suffix of the text, up to LONGEST_MATCH tokens; a *path* is what
follows it there. A path that reaches the text's end goes on with its own beginning (LZ77): what
repeats with a period is continued with it.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

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


def classes_of(lengths: Tensor, agreeing: Tensor, path_length: int) -> Tensor:
    """[..., D], the classes of paths' tokens.

    Args:
        lengths: [...] int64, the matches' classes by length alone; 0 where there is none.
        agreeing: [...] int64, how many tokens the second best place has as well; -1 without one.
    """
    depth = torch.arange(path_length, device=lengths.device)
    is_agreed, is_parted = depth < agreeing[..., None], depth == agreeing[..., None]
    says = AGREED * is_agreed.long() + PARTED * is_parted.long()
    return (lengths[..., None] + LENGTH_CLASSES * says) * (lengths > 0)[..., None]


def find_matches(
    text: Tensor, num_tokens: Tensor, num_paths: int, path_length: int, vocab_size: int
) -> ContextMatches:
    """Find M paths of D tokens, by comparing every place of the texts.

    Args:
        text: [R, T] integers; what is behind a request's tokens is ignored.
        num_tokens: [R] integers, how many tokens each request has; at least 1.
        num_paths, path_length: M and D.
        vocab_size: tokens from this on end a path: placeholders of an image, say.
    """
    text, last = text.long(), num_tokens.long() - 1
    place = torch.arange(text.shape[1], device=text.device)
    lengths = lengths_at(text, text, last, LONGEST_MATCH).masked_fill(place >= last[:, None], 0)
    # Longer matches first, of these newer ones.
    following = text.roll(-1, dims=1)
    is_none = (lengths == 0) | (following >= vocab_size)
    rank = (lengths * text.shape[1] + place).masked_fill(is_none, -1)
    path = partial(_path, text, last=last, path_length=path_length)
    return best_paths(rank, lengths, following, path, (num_paths, vocab_size))


def lengths_at(kept: Tensor, text: Tensor, last: Tensor, longest: int) -> Tensor:
    """[R, P]: how many tokens up to each place of `kept`, [P] or [R, P], are those up to `last`,
    [R], of the texts [R, T]; at most `longest`."""
    place = torch.arange(kept.shape[-1], device=text.device)
    agrees = torch.ones(len(text), len(place), dtype=torch.bool, device=text.device)
    total = torch.zeros(agrees.shape, dtype=torch.int64, device=text.device)
    for back in range(longest):
        own = text.gather(1, (last[:, None] - back).clamp(min=0))
        inside = (place >= back) & (last[:, None] >= back)
        agrees = agrees & inside & (kept.roll(back, dims=-1) == own)
        total += agrees
    return total


def best_paths(
    rank: Tensor,
    lengths: Tensor,
    following: Tensor,
    path_behind: Callable[[Tensor], Tensor],
    limits: tuple[int, int],
) -> ContextMatches:
    """The M paths behind the places of the highest `rank` [R, P], with different first tokens.

    A rank below 0 is of no path. `following`, [P] or [R, P], are the tokens behind the places, and
    `path_behind` gives what follows places [R, 1], [R, D]: a token below 0 ends a path. `lengths`
    [R, P] are classes; `limits` are M, and the tokens of the vocabulary. The first path is compared
    with what follows the second best place; the others part from it at once.
    """
    tokens, classes, parted = [], [], torch.zeros_like(rank[:, 0])
    for path_number in range(limits[0]):
        best = rank.argmax(dim=1, keepdim=True)
        found, length = rank.gather(1, best) >= 0, lengths.gather(1, best)
        path = path_behind(best).long()
        goes_on = found & ((path >= 0) & (path < limits[1])).cumprod(dim=1).bool()
        tokens.append(path.masked_fill(~goes_on, -1))
        agreeing = parted
        if not path_number:
            others = rank.scatter(1, best, -1)
            second = others.argmax(dim=1, keepdim=True)
            is_alike = (others.gather(1, second) >= 0) & (lengths.gather(1, second) == length)
            agreeing = (path_behind(second).long() == path).long().cumprod(dim=1).sum(dim=1)
            agreeing = agreeing.masked_fill(~is_alike.squeeze(1), -1)
        of_tokens = classes_of(length.squeeze(1).long(), agreeing, path.shape[1])
        classes.append(of_tokens.masked_fill(~goes_on, 0))
        rank = rank.masked_fill(following == path[:, :1], -1)
    return ContextMatches(torch.stack(tokens, dim=1), torch.stack(classes, dim=1))


def _path(text: Tensor, place: Tensor, last: Tensor, path_length: int) -> Tensor:
    """[R, D]: what follows the places [R, 1], over and over where it reaches the text's end."""
    period = (last[:, None] - place).clamp(min=1)
    ahead = torch.arange(path_length, device=text.device) % period
    return text.gather(1, (place + 1 + ahead).clamp(max=text.shape[1] - 1))


def joined(explored: ExploredNodes, matches: ContextMatches) -> tuple[ExploredNodes, Tensor]:
    """A search's nodes [R, L, W] and M paths of D tokens in one grid, no node twice.

    A path's nodes stand where the search has them, if it does; else below, in the path's column.

    Returns:
        [R, max(L, D), W + M], as of a search; the log-probability is -inf where it has no node.
        And match_classes [R, max(L, D), W + M] int64, of nodes on paths; 0 for others.
    """
    requests, length, width = explored.tokens.shape
    num_paths, depth = matches.tokens.shape[1:]
    below = (0, num_paths, 0, max(depth - length, 0))
    tokens, pointers = (pad(part, below) for part in (explored.tokens, explored.back_pointers))
    log_probs = pad(explored.log_probs, below, value=-torch.inf)
    match_classes = torch.zeros_like(tokens)
    row = torch.arange(requests, device=tokens.device)
    for path in range(num_paths):
        own = width + path
        beam, shared = torch.zeros_like(row), torch.ones_like(row, dtype=torch.bool)
        for level in range(depth):
            token = matches.tokens[:, path, level]
            on = matches.classes[:, path, level]
            same = (tokens[:, level] == token[:, None]) & (log_probs[:, level] > -torch.inf)
            if level:
                same &= pointers[:, level] == beam[:, None]
            shared = shared & (on > 0) & same.any(dim=1)
            at = torch.where(shared, same.long().argmax(dim=1), own)
            is_new = (on > 0) & ~shared
            tokens[:, level, own] = torch.where(is_new, token, 0)
            if level:
                pointers[:, level, own] = torch.where(is_new, beam, 0)
            match_classes[row, level, at] = torch.where(on > 0, on, match_classes[row, level, at])
            beam = at
    return ExploredNodes(tokens, pointers, log_probs), match_classes


def with_matches(
    explored: ExploredNodes, matches: ContextMatches, probabilities: Tensor
) -> ExploredNodes:
    """A search's nodes [R, L, W] and M paths of D tokens, as of one search [R, max(L, D), W + M].

    A node that both have is as probable as the more confident says. `probabilities`, see
    `joint_scores`, are of paths' nodes.
    """
    nodes, match_classes = joined(explored, matches)
    return replace(nodes, log_probs=joint_scores(nodes, match_classes, probabilities))


def joint_scores(nodes: ExploredNodes, classes: Tensor, probabilities: Tensor) -> Tensor:
    """The log-probabilities of joined nodes, [R, L', W'] float32; -inf where there is no node.

    Args:
        nodes, classes: [R, L', W'], of `joined`.
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
