"""How long a draft of so many requests takes, or a pass of so many rows."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

MOST_REPEATS = 10


def time_sizes(
    max_size: int, run: Callable[[int], None], before: Callable[[], None], seconds: float
) -> list[tuple[int, float]]:
    """Seconds of `run` at sizes up to `max_size`, as many as the time allows; at least two.

    The least of several: what disturbs a machine only adds. All sizes take turns, so that a slow
    moment does not fall on one of them alone.

    Args:
        max_size: the largest size.
        run: what is timed.
        before: run before each, as a step does: it leaves other weights in the processor's caches.
        seconds: the time allowed.
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
    return list(measured.items())


def _sizes(max_size: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, 24...: two to an octave."""
    sizes = sorted({1, *(2**k for k in range(13)), *(3 * 2**k for k in range(12))})
    return [*(size for size in sizes if size < max_size), max_size]
