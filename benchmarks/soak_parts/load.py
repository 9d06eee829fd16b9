"""Requests sent when they arrive, and what was seen of the server meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from soak_parts.client import Client, Outcome, all_at_most
from soak_parts.requests import Request
from soak_parts.server import Server

MIB = 1 << 20
LOOKS = 5
"""At the server's memory: at the start, after each quarter of the requests, and so at the end."""

QUIET_SECONDS = 2.0
"""After the last request: aborted ones end in the server a little after their client left."""


@dataclass(frozen=True)
class Look:
    """The server at one moment.

    Attributes:
        finished: requests so far, aborted ones counted.
        resident_mib: memory of all its processes.
    """

    finished: int
    resident_mib: float


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


async def capacity(client: Client, requests: Sequence[Request], in_flight: int) -> float:
    """Requests per second where so many are in flight at any time; they warm the server up."""
    begin = perf_counter()
    for outcome in await all_at_most(client, [r.body for r in requests], in_flight):
        if outcome.error is not None:
            raise RuntimeError(f"a request of the warm-up failed: {outcome.error}")
    return len(requests) / (perf_counter() - begin)


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
    looks = [Look(0, server.resident_bytes() / MIB)]
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
            looks.append(Look(finished, server.resident_bytes() / MIB))

    await asyncio.gather(*(one(place) for place in range(len(requests))))
    seconds = perf_counter() - begin
    await asyncio.sleep(QUIET_SECONDS)
    looks.append(Look(finished, server.resident_bytes() / MIB))
    return Run(outcomes, seconds, looks)
