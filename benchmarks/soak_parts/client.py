# SPDX-License-Identifier: Apache-2.0
"""Requests over HTTP, and what came of each."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

SECONDS_FOR_AN_ANSWER = 120.0
"""After so long a request counts as failed: nothing that is asked for takes nearly as long."""


@dataclass
class Choice:
    """One answer of a request (n = 2 has two)."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    log_probs: list[float] = field(default_factory=list)
    finish: str | None = None

    def add(self, part: Mapping[str, Any]) -> None:
        """Append a choice of a response, or of a chunk of a stream."""
        self.tokens += part.get("token_ids") or []
        self.text += part["text"]
        self.log_probs += (part.get("logprobs") or {}).get("token_logprobs") or []
        self.finish = part.get("finish_reason") or self.finish


@dataclass
class Outcome:
    """What came of a request.

    Attributes:
        choices: its answers.
        aborted: its client went away.
        error: what the server said instead of an answer; None where it answered.
    """

    choices: list[Choice]
    aborted: bool = False
    error: str | None = None

    @property
    def answered(self) -> bool:
        """It ended by itself."""
        return not self.aborted and self.error is None

    def add(self, values: Mapping[str, Any]) -> None:
        """What a response, or a chunk of a stream, has of each answer."""
        for part in values["choices"]:
            self.choices[part["index"]].add(part)


class Client:
    """Sends completions to one server."""

    def __init__(self, session: aiohttp.ClientSession, address: str, model: str) -> None:
        self._session = session
        self._url = f"{address}/v1/completions"
        self._model = model

    async def ask(self, body: Mapping[str, Any], abort_after: int | None = None) -> Outcome:
        """Send one request, its body without the model, and wait for its end, or go away before.

        For `abort_after` see `Request`.
        """
        outcome = Outcome([Choice() for _ in range(body.get("n", 1))])
        limit = SECONDS_FOR_AN_ANSWER
        if abort_after is not None and not body["stream"]:
            limit = abort_after / 10
        try:
            async with (
                asyncio.timeout(limit),
                self._session.post(self._url, json={**body, "model": self._model}) as response,
            ):
                if response.status != 200:
                    outcome.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                elif body["stream"]:
                    await _read_stream(response, outcome, abort_after)
                else:
                    outcome.add(await response.json())
        except TimeoutError:
            outcome.aborted = abort_after is not None
            outcome.error = None if outcome.aborted else f"no end after {limit:g} seconds"
        except (aiohttp.ClientError, OSError) as error:
            outcome.error = repr(error)
        return outcome


async def _read_stream(
    response: aiohttp.ClientResponse, outcome: Outcome, abort_after: int | None
) -> None:
    async for line in response.content:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        values = json.loads(line[6:])
        if "error" in values:
            outcome.error = json.dumps(values["error"])[:300]
            return
        outcome.add(values)
        length = sum(len(choice.tokens) for choice in outcome.choices)
        if abort_after is not None and length > abort_after:
            outcome.aborted = True
            return


async def all_at_most(
    client: Client, bodies: Sequence[Mapping[str, Any]], in_flight: int
) -> list[Outcome]:
    """Send all, with a number of them in flight at any time, and none that goes away."""
    gate = asyncio.Semaphore(in_flight)

    async def one(body: Mapping[str, Any]) -> Outcome:
        async with gate:
            return await client.ask(body)

    return list(await asyncio.gather(*(one(body) for body in bodies)))
