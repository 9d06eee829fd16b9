"""Running servers as one engine: the least busy one answers, and another where that one fails."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from rich.console import Console

from vllm_redrafter.data.endpoints.addresses import AddressBook
from vllm_redrafter.data.endpoints.client import (
    MOST_CONNECTIONS,
    EndpointClient,
    EndpointDown,
)
from vllm_redrafter.data.endpoints.endpoint import Endpoint
from vllm_redrafter.data.endpoints.served_target import ServedTarget
from vllm_redrafter.data.generation_settings import EndpointSettings, GenerationSettings
from vllm_redrafter.data.turns import OpenTurn, TurnAnswer
from vllm_redrafter.utils.errors import ConfigError

MOST_ATTEMPTS = 10
"""At one answer: then it is not the servers that fail, but this request that they fail at."""
READ_AGAIN_SECONDS = 5.0
SECONDS_TO_END = 10.0
TICK_SECONDS = 0.2
"""Between two looks at whether any server is left."""


class EndpointEngine:
    """Servers that let the target answer: a `TargetEngine`.

    Args:
        book: their addresses; files of them are read again while it answers.
        target: what they have to serve.
        settings: how to generate; `in_flight` is for each server.
        endpoints: how to ask them.
        console: where is said that one comes or goes.
        clock: seconds, which only grow.

    Raises:
        ConfigError: a server serves something else, or none answers in time; `in_flight` is more
            than one has connections for.
    """

    def __init__(
        self,
        book: AddressBook,
        target: ServedTarget,
        settings: GenerationSettings,
        endpoints: EndpointSettings,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if settings.in_flight >= MOST_CONNECTIONS:
            raise ConfigError(
                f"--in-flight {settings.in_flight}: fewer than {MOST_CONNECTIONS}, of each server, "
                "are possible: lower it, or run several parts"
            )
        self._book, self._target, self._settings = book, target, settings
        self._limits, self._console, self._clock = endpoints, console, clock
        self._endpoints: dict[str, Endpoint] = {}
        self._retired: list[Endpoint] = []
        self._trouble_with_book = ""
        self._last_up = clock()
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[TurnAnswer]] = set()
        try:
            self._loop.run_until_complete(self._start())
        except BaseException:
            self.close()
            raise

    @property
    def max_model_len(self) -> int:
        return self._target.max_model_len

    @property
    def in_flight(self) -> int:
        return self._settings.in_flight * max(1, sum(e.is_up for e in self._endpoints.values()))

    def answers(self, waiting: deque[OpenTurn]) -> Iterator[TurnAnswer]:
        """See `TargetEngine`.

        Raises:
            ConfigError: no server has answered for long, or they refuse or fail at a request.
        """
        self._last_up = self._clock()
        while waiting or self._tasks:
            while waiting:
                task = self._loop.create_task(self._answer(waiting.popleft()))
                self._tasks.add(task)
            tick = asyncio.wait(
                self._tasks, timeout=TICK_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            done, self._tasks = self._run(tick)
            self._check_that_any_is_up()
            for task in done:
                yield task.result()

    def tokens_per_step(self) -> float | None:
        """See `TargetEngine`; servers do not say it request by request."""
        return None

    def close(self) -> None:
        """Leave the servers; what they were answering is dropped there too."""
        if not self._loop.is_closed():
            self._run(self._end())
            self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(coroutine)

    async def _start(self) -> None:
        self._reader = self._loop.create_task(self._keep_reading())
        self._meet(self._book.read())
        until = self._clock() + self._limits.give_up_after
        while not self._any_is_up() or (not self._all_seen() and self._clock() < until):
            self._check_that_any_is_up()
            await asyncio.sleep(TICK_SECONDS)
            for endpoint in self._endpoints.values():
                if endpoint.refusal is not None:
                    raise endpoint.refusal

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=SECONDS_TO_END)
        for endpoint in (*self._endpoints.values(), *self._retired):
            await endpoint.close()

    async def _keep_reading(self) -> None:
        """Notice addresses that are added to a file, or removed from it."""
        while self._book.has_files:
            await asyncio.sleep(READ_AGAIN_SECONDS)
            try:
                self._meet(self._book.read())
            except ConfigError as error:
                if str(error) != self._trouble_with_book:
                    self._trouble_with_book = str(error)
                    self._say(f"{error}; the addresses of before are kept")
            else:
                self._trouble_with_book = ""

    def _meet(self, addresses: list[str]) -> None:
        for address in addresses:
            if address not in self._endpoints:
                client = EndpointClient(address, self._settings.sampling, self._limits)
                self._endpoints[address] = Endpoint(
                    client, self._target.check, self._say, self._wake
                )
        for address in self._endpoints.keys() - set(addresses):
            endpoint = self._endpoints.pop(address)
            endpoint.retire()
            self._retired.append(endpoint)
            self._say(f"endpoint {address} is asked nothing more: it is no longer in the file")

    async def _answer(self, turn: OpenTurn) -> TurnAnswer:
        failures: list[str] = []
        while len(failures) < MOST_ATTEMPTS:
            endpoint = await self._free_endpoint()
            try:
                return await endpoint.answer(turn)
            except EndpointDown as error:
                failures.append(f"{endpoint.address}: {error}")
        raise ConfigError(
            f"conversation {turn.conversation}: {MOST_ATTEMPTS} attempts at its answer failed, at "
            f"last at {failures[-1]}. Finished shards are kept: start the same command again to "
            "continue"
        )

    async def _free_endpoint(self) -> Endpoint:
        while True:
            free = [
                endpoint
                for endpoint in self._endpoints.values()
                if endpoint.is_up and endpoint.running < self._settings.in_flight
            ]
            if free:
                return min(free, key=lambda endpoint: endpoint.running)
            # Whether any will ever be up again is looked at in `answers`.
            await self._changed.wait()

    def _wake(self) -> None:
        """Let all look again that wait for a server with room."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _any_is_up(self) -> bool:
        return any(endpoint.is_up for endpoint in self._endpoints.values())

    def _all_seen(self) -> bool:
        return all(endpoint.is_seen for endpoint in self._endpoints.values())

    def _check_that_any_is_up(self) -> None:
        now = self._clock()
        for endpoint in self._endpoints.values():
            endpoint.raise_what_broke()
        if self._any_is_up():
            self._last_up = now
        elif now - self._last_up > self._limits.give_up_after:
            troubles = [
                f"{e.address} {e.trouble or 'has not answered yet'}"
                for e in self._endpoints.values()
            ]
            raise ConfigError(
                f"no endpoint has answered for {self._limits.give_up_after:g} s: "
                f"{'; '.join(troubles) or 'there is none left'}. Finished shards are kept: start "
                "the same command again to continue"
            )

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False)
