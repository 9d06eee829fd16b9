"""When requests arrive: whatever the server has to do (an open loop), and many at once at times."""

from __future__ import annotations

import random

BURST = 64
BETWEEN = 192
"""Requests that arrive at the same moment, and those that come one by one after them."""


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds after the start at which each request arrives, in order.

    Between bursts the gaps are exponential: nobody knows of anybody. They are so long that bursts
    and the rest together have the rate.

    Args:
        count: how many requests.
        rate: requests per second.
        seed: of the gaps.
    """
    source = random.Random(seed)
    gaps_per_second = rate * BETWEEN / (BURST + BETWEEN)
    times = []
    now = 0.0
    for number in range(count):
        if number % (BURST + BETWEEN) >= BURST:
            now += source.expovariate(gaps_per_second)
        times.append(now)
    return times
