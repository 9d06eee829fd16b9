# SPDX-License-Identifier: Apache-2.0
"""How long a draft of so many requests takes, or a pass of so many rows."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import perf_counter

from vllm_redrafter.budget.costs import DraftCost
from vllm_redrafter.tree.policy import SearchShape

MOST_REPEATS = 10


def time_drafts(
    shapes: Sequence[SearchShape],
    max_requests: int,
    draft: Callable[[SearchShape, int], None],
    before: Callable[[], None],
    seconds: float,
) -> Iterator[DraftCost]:
    """Time drafts by the shortest and the longest of these searches, and by matches alone.

    Each level costs the same. `draft` drafts by a search, for so many requests.
    """
    lengths = {shape.beam_length for shape in shapes} - {0}
    ends = {0, min(lengths, default=0), max(lengths, default=0)}
    timed = [shape for shape in shapes if shape.beam_length in ends]
    for shape in timed:
        run = partial(draft, shape)
        for size, taken in time_sizes(max_requests, run, before, seconds / len(timed)):
            yield DraftCost(size, *shape, taken)


def time_sizes(
    max_size: int, run: Callable[[int], None], before: Callable[[], None], seconds: float
) -> list[tuple[int, float]]:
    """(size, seconds of `run`), of as many sizes as the time allows, at least two.

    The least of several: what disturbs a machine only adds. All sizes take turns, so that a slow
    moment does not fall on one of them alone. `before` leaves other weights in the processor's
    caches, as a step does.
    """

    def timed(size: int) -> float:
        before()
        started = perf_counter()
        run(size)
        return perf_counter() - started

    ends = perf_counter() + seconds / 2
    measured: dict[int, float] = {}
    for size in _sizes(max_size):
        if len(measured) > 1 and perf_counter() > ends:
            break
        run(size)  # the first of a size may compile, or allocate
        measured[size] = timed(size)
    ends = perf_counter() + seconds / 2
    for _ in range(MOST_REPEATS):
        if perf_counter() > ends:
            break
        for size in measured:
            measured[size] = min(measured[size], timed(size))
    return sorted(measured.items())


def _sizes(max_size: int) -> list[int]:
    """1, 16, 2, 3, 4, 6, 8, 12...: two to an octave. Of 1 and 2 alone no slope can be told."""
    sizes = sorted({1, *(2**k for k in range(13)), *(3 * 2**k for k in range(12))})
    ascending = [*(size for size in sizes if size < max_size), max_size]
    return [*dict.fromkeys([1, min(16, max_size), *ascending])]
