# SPDX-License-Identifier: Apache-2.0
"""Earlier answers: what finished requests were answered, kept on the device, and paths from there.

The store is a ring of C places; place p is at index p mod C. Before each answer stands a separator,
-1. A place with two tokens of its answer before it and one behind it is linked to the last one
whose partition and three tokens have the same hash. A search follows the links from the newest
place of a text's last three tokens, at most PLACES of them and the few of other tokens, whatever N
and C: it reads them one after the other, and compares all tokens of a match at once. The best paths
of own text and earlier answers are kept. The host's form is `drafting/earlier_answers.py`.

One program enters all answers, a tile at a time, so that links are always in the places' order.
"""

from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_redrafter.config import LONGEST_PATH, MOST_MATCHES
from vllm_redrafter.tree.context_matches import LONGEST_EARLIER, MATCH_CLASSES, SHORTEST_EARLIER
from vllm_redrafter.tree.earlier_answers import EARLIER_PLACES
from vllm_redrafter.triton_kernels.checks import require, require_layout
from vllm_redrafter.triton_kernels.find_matches import LENGTH_CLASSES, MatchBuffers, classes_of

SHORTEST, LONGEST = tl.constexpr(SHORTEST_EARLIER), tl.constexpr(LONGEST_EARLIER)
PLACES, CLASSES = tl.constexpr(EARLIER_PLACES), tl.constexpr(MATCH_CLASSES)
TILE = tl.constexpr(64)
BLOCK, BLOCK_LENGTH = tl.constexpr(MOST_MATCHES), tl.constexpr(LONGEST_PATH)


@triton.jit
def _mixed(mixed, value):
    """A hash of 32 bits with a further value."""
    mixed = (mixed ^ value.to(tl.uint32)) * 0x9E3779B1
    return mixed ^ (mixed >> 15)


@triton.jit(do_not_specialize=["ANSWERS"])
def _enter_answers(
    slots,  # [ANSWERS] int32
    text,  # [slots, TOKENS] int32
    num_tokens,  # [slots] int32
    origins,  # [2, SLOTS + 1] int32
    ring,  # [2, CAPACITY] int32, written
    links,  # [3, CAPACITY] int64, changed
    state,  # [3 + NEWEST] int64, changed
    ANSWERS,
    SLOTS,
    TOKENS,
    NEWEST,
    CAPACITY: tl.constexpr,
):
    """All answers, one after the other."""
    lane = tl.arange(0, TILE)
    end, count, seed = tl.load(state), tl.load(state + 1), tl.load(state + 2).to(tl.uint32)
    for answer in range(ANSWERS):
        slot = tl.load(slots + answer).to(tl.int64)
        partition = tl.load(origins + slot)
        last = tl.load(num_tokens + slot)
        first = tl.maximum(tl.load(origins + SLOTS + 1 + slot), last - (CAPACITY - 1))
        size = last - first
        if (partition >= 0) & (size > SHORTEST):
            tl.store(state + 3 + count % NEWEST, end)
            for tile in range(0, size + 1, TILE):
                # The separator is at 0, the first token at 1.
                index = tile + lane
                is_on, is_linked = index <= size, (index >= SHORTEST) & (index < size)
                own = text + slot * TOKENS + first - 1 + index
                token = tl.load(own, mask=is_on & (index > 0), other=-1)
                at = (end + index) & (CAPACITY - 1)
                tl.store(ring + at, token, mask=is_on)
                tl.store(ring + CAPACITY + at, partition, mask=is_on)
                mixed = _mixed(seed, partition)
                mixed = _mixed(mixed, tl.load(own - 2, mask=is_linked, other=0))
                mixed = _mixed(mixed, tl.load(own - 1, mask=is_linked, other=0))
                bucket = (_mixed(mixed, token) & (2 * CAPACITY - 1)).to(tl.int32) + CAPACITY
                # One that is not linked has no other's.
                key = tl.where(is_linked, bucket, -1 - lane)
                is_older = (key[None, :] == key[:, None]) & (lane[None, :] < lane[:, None])
                older = tl.max(tl.where(is_older, lane[None, :], -1), axis=1)
                is_newest = tl.max(is_older.to(tl.int32), axis=0) == 0
                head = tl.load(links + bucket, mask=is_linked & (older < 0), other=-1)
                tl.store(links + at, tl.where(older < 0, head, end + tile + older), is_linked)
                # Threads read the heads before others write them, for the next tile's to read.
                tl.debug_barrier()
                tl.store(links + bucket, end + index, mask=is_linked & is_newest)
                tl.debug_barrier()
            end += size + 1
            count += 1
    tl.store(state, end)
    tl.store(state + 1, count)


@triton.jit
def _find_earlier(
    entries,  # [R] int64
    temperatures,  # [R] fp32
    probabilities,  # [2, CLASSES, LENGTH] fp32
    text,  # [slots, TOKENS] int32
    num_tokens,  # [slots] int32
    origins,  # [2, SLOTS + 1] int32
    ring,  # [2, CAPACITY] int32
    links,  # [3, CAPACITY] int64
    state,  # [3 + NEWEST] int64
    paths,  # [R, PATHS, LENGTH] int64, replaced
    path_classes,  # [R, PATHS, LENGTH] int32, replaced
    SLOTS,
    TOKENS,
    NEWEST,
    vocab_size,
    CAPACITY: tl.constexpr,
    PATHS: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """One request."""
    request = tl.program_id(0)
    entry = tl.load(entries + request)
    slot = tl.minimum(entry, SLOTS - 1)
    partition = tl.where(entry < SLOTS, tl.load(origins + slot), -1)
    last = tl.load(num_tokens + slot) - 1
    own = text + slot * TOKENS + last
    end, count, bucket = tl.load(state), tl.load(state + 1), tl.load(state + 2).to(tl.uint32)
    oldest = tl.load(state + 3 + count % NEWEST, mask=count >= NEWEST, other=0)
    oldest = tl.maximum(oldest, end - CAPACITY)

    searches = (partition >= 0) & (last >= SHORTEST - 1)
    bucket = _mixed(bucket, partition)
    for ahead in tl.static_range(SHORTEST):
        bucket = _mixed(bucket, tl.load(own + ahead - (SHORTEST - 1), mask=searches, other=0))
    bucket = (bucket & (2 * CAPACITY - 1)).to(tl.int32) + CAPACITY
    place, found = tl.load(links + bucket, mask=searches, other=-1), 0
    order, places = tl.arange(0, PLACES), tl.full([PLACES], -1, tl.int64)
    while (place >= oldest) & (found < PLACES):
        same = tl.load(ring + CAPACITY + (place & (CAPACITY - 1))) == partition
        for back in tl.static_range(SHORTEST):
            token = tl.load(ring + ((place - back) & (CAPACITY - 1)))
            same = same & (place - back >= oldest) & (token == tl.load(own - back))
        places = tl.where((order == found) & same, place, places)
        found += same.to(tl.int32)
        place = tl.load(links + (place & (CAPACITY - 1)))

    agrees, length = places >= 0, tl.zeros([PLACES], tl.int32)
    for back in tl.static_range(LONGEST):
        agrees = agrees & (places - back >= oldest)
        token = tl.load(ring + ((places - back) & (CAPACITY - 1)), mask=agrees, other=-1)
        agrees = agrees & (token == tl.load(own - back, mask=last >= back, other=-2))
        length += agrees.to(tl.int32)
    follower = tl.load(ring + ((places + 1) & (CAPACITY - 1)), mask=places >= 0, other=-1)
    is_match = (follower >= 0) & (follower < vocab_size)
    rank = tl.where(is_match, length * PLACES + PLACES - 1 - order, -1)

    # A path per row: the request's own, then earlier answers'.
    row, depth = tl.arange(0, 2 * BLOCK), tl.arange(0, BLOCK_LENGTH)[None, :]
    to = (request * PATHS + row[:, None]) * LENGTH + depth
    is_own = (row < PATHS)[:, None] & (depth < LENGTH)
    path = tl.load(paths + to, mask=is_own, other=-1)
    of_token = tl.load(path_classes + to, mask=is_own, other=0)
    # What the first of earlier answers is compared with.
    best = tl.max(rank, axis=0)
    second = tl.max(tl.where(rank == best, -1, rank), axis=0)
    is_alike = (second >= 0) & (second // PLACES == best // PLACES)
    compared_at = tl.max(tl.where(rank == second, places, -1), axis=0) + 1 + depth
    is_compared = (depth < tl.where(is_alike, LENGTH, 0)) & (compared_at < end)
    compared = tl.load(ring + (compared_at & (CAPACITY - 1)), mask=is_compared, other=-1)
    at, length = tl.full([2 * BLOCK], -1, tl.int64), tl.zeros([2 * BLOCK], tl.int32)
    for chosen in range(PATHS):
        best = tl.max(rank, axis=0)
        is_row = (row == BLOCK + chosen) & (best >= 0)
        at = tl.where(is_row, tl.max(tl.where(rank == best, places, -1), axis=0) + 1, at)
        # Classes of earlier answers' matches are the last.
        length = tl.where(is_row, best // PLACES + (LENGTH_CLASSES - LONGEST), length)
        next_token = tl.max(tl.where(rank == best, follower, 0), axis=0)
        rank = tl.where(follower == next_token, -1, rank)
    is_earlier = (at >= 0)[:, None]
    is_on = is_earlier & (depth < LENGTH) & (at[:, None] + depth < end)
    token = tl.load(ring + ((at[:, None] + depth) & (CAPACITY - 1)), mask=is_on, other=-1)
    agreeing = tl.min(tl.where(token == compared, LENGTH, depth), axis=1)
    agreeing = tl.where(row > BLOCK, 0, tl.where(is_alike, agreeing, -1))
    is_end = (token < 0) | (token >= vocab_size)
    is_token = depth < tl.min(tl.where(is_end, depth, BLOCK_LENGTH), axis=1)[:, None]
    path = tl.where(is_earlier, tl.where(is_token, token, -1).to(tl.int64), path)
    of_earlier = classes_of(length[:, None], depth, agreeing[:, None])
    of_token = tl.where(is_earlier, tl.where(is_token, of_earlier, 0), of_token)

    kind = (tl.load(temperatures + request) > 0.0).to(tl.int32)
    match = tl.sum(tl.where(depth == 0, of_token, 0), axis=1)
    to_probability = (kind * CLASSES + match - 1) * LENGTH
    worth = tl.load(probabilities + to_probability, mask=match > 0, other=-1.0)
    first = tl.sum(tl.where(depth == 0, path, 0), axis=1)
    for kept in range(PATHS):
        most = tl.max(worth, axis=0)
        is_kept = row == tl.min(tl.where(worth == most, row, 2 * BLOCK), axis=0)
        kept_at = (request * PATHS + kept) * LENGTH + depth
        # All of them were read above: what is kept is a sum over them.
        kept_path = tl.sum(tl.where(is_kept[:, None], path, 0), axis=0)[None, :]
        tl.store(paths + kept_at, tl.where(most >= 0.0, kept_path, -1), depth < LENGTH)
        kept_classes = tl.sum(tl.where(is_kept[:, None], of_token, 0), axis=0)[None, :]
        tl.store(
            path_classes + kept_at, tl.where(most >= 0.0, kept_classes, 0), mask=depth < LENGTH
        )
        worth = tl.where(first == tl.sum(tl.where(is_kept, first, 0), axis=0), -1.0, worth)


class AnswerStore(NamedTuple):
    """The requests' texts by slot, and the newest N answers in a ring of C places.

    Attributes:
        text, num_tokens: [slots, T] and [slots] int32.
        origins: [2, slots + 1] int32, each text's partition, and where its answer begins; of a
            partition below 0 nothing is entered, and nothing found.
        ring: [2, C] int32, tokens and partitions.
        links: [3, C] int64, the last place of the same hash before each place, then the newest of
            each of 2 C hashes; -1 for none.
        state: [3 + N] int64: places written, answers entered, the hash's seed, and where the newest
            N answers begin, by their number modulo N.
    """

    text: Tensor
    num_tokens: Tensor
    origins: Tensor
    ring: Tensor
    links: Tensor
    state: Tensor

    @classmethod
    def empty(cls, texts: tuple[Tensor, Tensor, Tensor], sizes: tuple[int, int], seed: int) -> Self:
        """Of `texts`, and (N, C) = `sizes`, C a power of two."""
        text, (answers, places) = texts[0], sizes
        links = torch.full((3, places), -1, device=text.device)
        state = links.new_zeros(3 + answers)
        state[2] = seed
        return cls(*texts, links[:2].int(), links, state)

    def clear(self) -> None:
        """Forget all answers."""
        self.links.fill_(-1)
        self.state[:2].zero_()

    def layout(self) -> dict[str, tuple[Tensor, torch.dtype, tuple[int, ...]]]:
        """What `require_layout` is to hold each to."""
        (slots, size), places, int32 = self.text.shape, self.ring.shape[1], torch.int32
        return {
            "text": (self.text, int32, (slots, size)),
            "num_tokens": (self.num_tokens, int32, (slots,)),
            "origins": (self.origins, int32, (2, slots + 1)),
            "ring": (self.ring, int32, (2, places)),
            "links": (self.links, torch.int64, (3, places)),
            "state": (self.state, torch.int64, (4,)),
        }


def enter_answers(slots: Tensor, store: AnswerStore) -> None:
    """Enter the answers of finished requests in `slots` [A] int32, in this order; A may be 0."""
    require_layout(store.ring.device, slots=(slots, torch.int32, (0,)), **store.layout())
    _enter_answers[(1,)](
        *(slots, *store, slots.shape[0], *store.text.shape, store.state.shape[0] - 3),
        CAPACITY=store.ring.shape[1],
        num_warps=8,
    )


def find_earlier(
    entries: Tensor,
    temperatures: Tensor,
    probabilities: Tensor,
    vocab_size: int,
    store: AnswerStore,
    out: MatchBuffers,
) -> None:
    """Find M paths of each request in earlier answers; keep the best M of these and own text's.

    Args:
        entries, vocab_size: as `find_matches` had them.
        temperatures, probabilities: as `join_matches` has them.
        out: what `find_matches` found; replaced.
    """
    requests, float32 = entries.shape[0], torch.float32
    most, num_paths, path_length = out.tokens.shape
    require_layout(
        out.tokens.device,
        entries=(entries, torch.int64, (requests,)),
        temperatures=(temperatures, float32, (requests,)),
        probabilities=(probabilities, float32, (2, MATCH_CLASSES, path_length)),
        **store.layout(),
    )
    require(1 <= requests <= most, f"entries: {requests} requests, out has room for {most}")
    _find_earlier[(requests,)](
        *(entries, temperatures, probabilities, *store, out.tokens, out.classes),
        *(*store.text.shape, store.state.shape[0] - 3, vocab_size),
        CAPACITY=store.ring.shape[1],
        PATHS=num_paths,
        LENGTH=path_length,
        num_warps=1,
    )
