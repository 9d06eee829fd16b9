"""Requests sent when they arrive, and what was seen of the server meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from soak_parts.client import Client, Outcome, all_at_most
from soak_parts.requests import Request
from soak_parts.server import Server

LOOKS = 5
"""At the server's memory: at the start, after each quarter of the requests, and so at the end."""

QUIET_SECONDS = 2.0
"""After the last request: aborted ones end in the server a little after their client left."""


@dataclass(frozen=True)
class Look:
    """The server at one moment.

    Attributes:
        finished: requests so far, aborted ones counted.
        resident_mib: memory of its processes, by what they are.
    """

    finished: int
    resident_mib: dict[str, float]

    @property
    def total_mib(self) -> float:
        """Memory of all of them."""
        return sum(self.resident_mib.values())


@dataclass(frozen=True)
class Run:
    """What came of all requests.

    Attributes:
        outcomes: by the requests' order; None for those that were not sent for lack of time.
        seconds: from the first arrival to the last end.
        looks: at the server's memory.
    """

    outcomes: list[Outcome | None]
    seconds: float
    looks: list[Look]


async def capacity(client: Client, bodies: Sequence[Mapping[str, Any]], in_flight: int) -> float:
    """Requests per second where so many are in flight at any time; they warm the server up."""
    begin = perf_counter()
    for outcome in await all_at_most(client, bodies, in_flight):
        if outcome.error is not None:
            raise RuntimeError(f"a request of the warm-up failed: {outcome.error}")
    return len(bodies) / (perf_counter() - begin)


async def all_again(
    server: Server, client: Client, bodies: Sequence[Mapping[str, Any]], in_flight: int
) -> tuple[list[Outcome], list[Look]]:
    """Send all, so many in flight at any time, and look at the server's memory as `apply` does."""
    outcomes: list[Outcome] = []
    looks = [Look(0, server.resident_mib())]
    for number in range(1, LOOKS):
        upto = len(bodies) * number // (LOOKS - 1)
        outcomes += await all_at_most(client, bodies[len(outcomes) : upto], in_flight)
        looks.append(Look(upto, server.resident_mib()))
    return outcomes, looks


async def apply(
    server: Server,
    client: Client,
    requests: Sequence[Request],
    times: Sequence[float],
    limit: float,
) -> Run:
    """Send each request at its time, whatever became of those before it.

    Args:
        server: for its memory.
        client: sends to it.
        requests: in the order of their arrival.
        times: seconds from the start.
        limit: seconds after which no further request is sent.
    """
    begin = perf_counter()
    outcomes: list[Outcome | None] = [None] * len(requests)
    looks = [Look(0, server.resident_mib())]
    finished = 0

    async def one(place: int) -> None:
        nonlocal finished
        request = requests[place]
        await asyncio.sleep(begin + times[place] - perf_counter())
        if perf_counter() - begin > limit:
            return
        outcomes[place] = await client.ask(request.body, request.abort_after)
        finished += 1
        if finished % max(len(requests) // (LOOKS - 1), 1) == 0 and len(looks) < LOOKS - 1:
            looks.append(Look(finished, server.resident_mib()))

    await asyncio.gather(*(one(place) for place in range(len(requests))))
    seconds = perf_counter() - begin
    await asyncio.sleep(QUIET_SECONDS)
    looks.append(Look(finished, server.resident_mib()))
    return Run(outcomes, seconds, looks)
