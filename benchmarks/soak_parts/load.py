# SPDX-License-Identifier: Apache-2.0
"""An open loop: requests sent when they arrive, whatever became of those before them."""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

from soak_parts.client import Client, Outcome, all_at_most
from soak_parts.requests import Request

BURST = 64
BETWEEN = 192
"""Requests that arrive at the same moment, and those that come one by one after them."""

QUIET_SECONDS = 2.0
"""After the last request: aborted ones end in the server a little after their client left."""


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds after the start at which each request arrives, in order.

    Between bursts the gaps are exponential: nobody knows of anybody. They are so long that bursts
    and the rest together have the rate, in requests per second.
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


async def capacity(client: Client, bodies: Sequence[Mapping[str, Any]], in_flight: int) -> float:
    """Requests per second where so many are in flight at any time; they warm the server up."""
    begin = perf_counter()
    for outcome in await all_at_most(client, bodies, in_flight):
        if outcome.error is not None:
            raise RuntimeError(f"a request of the warm-up failed: {outcome.error}")
    return len(bodies) / (perf_counter() - begin)


async def apply(
    client: Client, requests: Sequence[Request], times: Sequence[float]
) -> tuple[list[Outcome], float]:
    """Send each request at its time, in seconds from the start.

    Returned are what came of each, and the seconds from the first arrival to the last end.
    """
    begin = perf_counter()

    async def one(request: Request, time: float) -> Outcome:
        await asyncio.sleep(begin + time - perf_counter())
        return await client.ask(request.body, request.abort_after)

    outcomes = await asyncio.gather(*map(one, requests, times))
    seconds = perf_counter() - begin
    await asyncio.sleep(QUIET_SECONDS)
    return outcomes, seconds


async def later(seconds: float, measure: Callable[[], float]) -> float:
    """What is measured after so many seconds."""
    await asyncio.sleep(seconds)
    return measure()
