# SPDX-License-Identifier: Apache-2.0
"""Continuations of texts' last tokens, found where these tokens stand before: in two launches.

With n tokens t of a request, the match at a place p < n - 1 is the longest suffix that ends there,

    length(p) = max { m <= 5 : t[p - i] = t[n - 1 - i] for all i < m },

and the M paths follow the places of the highest rank (length, p), each with another next token
t[p + 1]. The first path is compared with what follows the place of the next lower rank, whatever
its next token. The first launch ranks a tile of the text per program, and keeps its M best places
with different next tokens, and its second best: those of the whole text are among these. The second
launch takes the best of all tiles, and reads what follows them. The host's form is
`drafting/own_matches.py`.

Each token of a text is read from memory once: 4 bytes of each request's tokens, whatever M and D.
Tiles behind a text's end return at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_redrafter.config import LONGEST_PATH, MOST_MATCHES
from vllm_redrafter.tree import context_matches as matches
from vllm_redrafter.tree.context_matches import LONGEST_MATCH
from vllm_redrafter.triton_kernels.checks import require, require_layout

LONGEST, LENGTH_CLASSES = tl.constexpr(LONGEST_MATCH), tl.constexpr(matches.LENGTH_CLASSES)
AGREED, PARTED = tl.constexpr(matches.AGREED), tl.constexpr(matches.PARTED)
TILE = 1024
"""Places of a text that a program ranks."""
MOST_PLACES = 4096
"""Of all tiles of a text, which the second launch compares at once."""


@triton.jit
def classes_of(length, depth, agreeing):
    """Classes of tokens at these depths of a path, of which so many agree with the second best."""
    parted = tl.where(depth == agreeing, PARTED * LENGTH_CLASSES, 0)
    return length + tl.where(depth < agreeing, AGREED * LENGTH_CLASSES, parted)


@triton.jit
def _rank_places(
    text,  # [slots, TOKENS] int32
    num_tokens,  # [slots] int32
    entries,  # [R] int64
    ranks,  # [R, TILES, PATHS + 1] int32, written where the text has places
    followers,  # [R, TILES, PATHS + 1] int32, likewise, but for the last
    SLOTS,
    TOKENS,
    vocab_size,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    PATHS: tl.constexpr,
):
    """A tile of a request's text: its best places, and the tokens that follow them."""
    request, tile = tl.program_id(0), tl.program_id(1)
    entry = tl.load(entries + request)
    if entry >= SLOTS:
        return
    last = tl.load(num_tokens + entry) - 1
    if tile * TILE >= last:
        return
    own_text = text + entry * TOKENS
    place = tile * TILE + tl.arange(0, TILE)
    agrees = place < last
    length = tl.zeros([TILE], tl.int32)
    for back in tl.static_range(LONGEST):
        # Before the text's first token stands nothing.
        agrees = agrees & (tl.minimum(place, last) >= back)
        own = tl.load(own_text + tl.maximum(last - back, 0))
        token = tl.load(own_text + place - back, mask=agrees, other=0)
        agrees = agrees & (token == own)
        length += agrees.to(tl.int32)
    follower = tl.load(own_text + place + 1, mask=length > 0, other=0)
    is_match = (length > 0) & (follower < vocab_size)
    rank = tl.where(is_match, length * TOKENS + place, -1)
    to = (request * TILES + tile) * (PATHS + 1)
    second = tl.max(tl.where(rank == tl.max(rank, axis=0), -1, rank), axis=0)
    tl.store(ranks + to + PATHS, second)
    for path in range(PATHS):
        best = tl.max(rank, axis=0)
        # Ranks of matches differ; where there is none, any token will do.
        next_token = tl.max(tl.where(rank == best, follower, 0), axis=0)
        tl.store(ranks + to + path, best)
        tl.store(followers + to + path, next_token)
        rank = tl.where(follower == next_token, -1, rank)


@triton.jit
def _follow_places(
    text,  # [slots, TOKENS] int32
    num_tokens,  # [slots] int32
    entries,  # [R] int64
    ranks,  # [R, TILES, PATHS + 1] int32
    followers,  # [R, TILES, PATHS + 1] int32
    out_tokens,  # [R, PATHS, LENGTH] int64, written
    out_classes,  # [R, PATHS, LENGTH] int32, written
    SLOTS,
    TOKENS,
    vocab_size,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    PATHS: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_LENGTH: tl.constexpr,
):
    """One request: the best places of all tiles, and the paths that follow them."""
    request = tl.program_id(0)
    entry = tl.load(entries + request)
    slot = tl.minimum(entry, SLOTS - 1)
    last = tl.where(entry < SLOTS, tl.load(num_tokens + slot) - 1, 0)
    own_text = text + slot * TOKENS
    index = tl.arange(0, BLOCK)
    # Of tiles without places nothing was written.
    is_place = (index < TILES * (PATHS + 1)) & (index // (PATHS + 1) * TILE < last)
    at = request * TILES * (PATHS + 1) + index
    rank = tl.load(ranks + at, mask=is_place, other=-1)
    follower = tl.load(followers + at, mask=is_place, other=0)
    depth = tl.arange(0, BLOCK_LENGTH)
    first = tl.max(rank, axis=0)
    second = tl.max(tl.where(rank == first, -1, rank), axis=0)
    other = tl.maximum(second, 0) % TOKENS
    is_alike = (second >= 0) & (second // TOKENS == first // TOKENS)
    is_on = depth < tl.where(is_alike, LENGTH, 0)
    compared = other + 1 + depth % tl.maximum(last - other, 1)
    compared = tl.load(own_text + compared, mask=is_on, other=-1)
    # The second best place of a tile follows no path.
    rank = tl.where(index % (PATHS + 1) < PATHS, rank, -1)
    for path in range(PATHS):
        best = tl.max(rank, axis=0)
        next_token = tl.max(tl.where(rank == best, follower, 0), axis=0)
        rank = tl.where(follower == next_token, -1, rank)
        place = tl.maximum(best, 0) % TOKENS
        # Where a path reaches the text's end, it goes on with its own beginning.
        period = tl.maximum(last - place, 1)
        is_on = depth < tl.where(best >= 0, LENGTH, 0)
        token = tl.load(own_text + place + 1 + depth % period, mask=is_on, other=0)
        end = tl.min(tl.where(token >= vocab_size, depth, LENGTH), axis=0)
        agreeing = tl.min(tl.where(token == compared, LENGTH, depth), axis=0)
        agreeing = tl.where(path > 0, 0, tl.where(is_alike, agreeing, -1))
        of_token = classes_of(best // TOKENS, depth, agreeing)
        token = tl.where(is_on & (depth < end), token, -1)
        to = (request * PATHS + path) * LENGTH + depth
        tl.store(out_tokens + to, token.to(tl.int64), mask=depth < LENGTH)
        tl.store(out_classes + to, tl.where(token >= 0, of_token, 0), mask=depth < LENGTH)


class MatchBuffers:
    """What a search of texts writes, allocated once.

    Attributes:
        tokens: [R, M, D] int64, the paths; -1 where there is none, and from where one ends.
        classes: [R, M, D] int32, of their tokens (see `ContextMatches`); 0 where there is none.
        ranks, followers: [R, tiles, M + 1] int32, the best places of each tile of the texts, and
            the tokens that follow them; then its second best.
        tile: places of a tile.
    """

    def __init__(
        self,
        max_requests: int,
        num_paths: int,
        path_length: int,
        max_tokens: int,
        device: torch.device | str,
    ) -> None:
        """Room for R = max_requests texts of up to max_tokens, and M paths of D tokens of each."""
        require(
            1 <= num_paths <= MOST_MATCHES and 1 <= path_length <= LONGEST_PATH,
            f"paths: 1 to {MOST_MATCHES} of 1 to {LONGEST_PATH} tokens, got {num_paths} of "
            f"{path_length}",
        )
        require(
            max_tokens < 2**31 // (LONGEST_MATCH + 1),
            f"max_tokens: ranks of {max_tokens} places exceed 32 bits",
        )
        shape = (max_requests, num_paths, path_length)
        self.tokens = torch.full(shape, -1, dtype=torch.int64, device=device)
        self.classes = torch.zeros(shape, dtype=torch.int32, device=device)
        most_tiles = MOST_PLACES // (num_paths + 1)
        self.tile = max(TILE, triton.next_power_of_2(triton.cdiv(max_tokens, most_tiles)))
        tiles = triton.cdiv(max_tokens, self.tile)
        places = (max_requests, tiles, num_paths + 1)
        self.ranks = torch.zeros(places, dtype=torch.int32, device=device)
        self.followers = torch.zeros_like(self.ranks)


def find_matches(
    text: Tensor, num_tokens: Tensor, entries: Tensor, vocab_size: int, out: MatchBuffers
) -> None:
    """Find M paths of each request's own text: the longest matches, of these the newest.

    Args:
        text: [slots, T] int32, contiguous; what is behind a text's tokens is not read.
        num_tokens: [slots] int32, how many tokens each text has; at least 1.
        entries: [R] int64, the slots of the requests; one that is no slot has no paths.
        vocab_size: what is no token below that ends a path: a placeholder of an image, say.
        out: at least R requests, made for texts of T tokens; the first R are written.
    """
    requests, (slots, size) = entries.shape[0], text.shape
    most, num_paths, path_length = out.tokens.shape
    require_layout(
        out.tokens.device,
        text=(text, torch.int32, (slots, size)),
        num_tokens=(num_tokens, torch.int32, (slots,)),
        entries=(entries, torch.int64, (requests,)),
    )
    require(1 <= requests <= most, f"entries: {requests} requests, out has room for {most}")
    tiles = triton.cdiv(size, out.tile)
    require(tiles == out.ranks.shape[1], f"out: was made for texts of other than {size} tokens")
    places = text, num_tokens, entries, out.ranks, out.followers
    _rank_places[(requests, tiles)](
        *places,
        *(slots, size, vocab_size),
        TILES=tiles,
        TILE=out.tile,
        PATHS=num_paths,
        num_warps=4,
    )
    block = triton.next_power_of_2(tiles * (num_paths + 1))
    _follow_places[(requests,)](
        *places,
        *(out.tokens, out.classes, slots, size, vocab_size),
        TILES=tiles,
        TILE=out.tile,
        PATHS=num_paths,
        LENGTH=path_length,
        BLOCK=block,
        BLOCK_LENGTH=triton.next_power_of_2(path_length),
        num_warps=1 if block <= 128 else 4,
    )
