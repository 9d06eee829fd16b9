# SPDX-License-Identifier: Apache-2.0
"""Running servers as one engine: the least busy one answers, and another where that one fails."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from rich.console import Console

from vllm_redrafter.data.endpoints.client import EndpointClient, EndpointDown
from vllm_redrafter.data.endpoints.served_target import ServedTarget
from vllm_redrafter.data.settings import EndpointSettings, GenerationSettings
from vllm_redrafter.data.turns import OpenTurn, TurnAnswer
from vllm_redrafter.utils.errors import ConfigError


def parsed_addresses(text: str) -> list[str]:
    """From `URL[,URL...]`: each address once and in order, without a slash or /v1 at its end.

    Raises:
        ConfigError: something is no address.
    """
    return list(dict.fromkeys(_address(each.strip()) for each in text.split(",")))


def _address(text: str) -> str:
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment:
        raise ConfigError(
            f"--endpoint {text}: not the address of a server; give one such as "
            "http://localhost:8000, or several with commas between them"
        )
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


@dataclass(eq=False)
class _Server:
    client: EndpointClient
    model: str
    running: int = 0


class EndpointEngine:
    """Servers that let the target answer: a `TargetEngine`.

    The setting `in_flight` is for each server; `console` names those that are left out.

    Raises:
        ConfigError: a server serves something else, or none answers.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        target: ServedTarget,
        settings: GenerationSettings,
        endpoints: EndpointSettings,
        console: Console,
    ) -> None:
        self._settings, self._console, self.max_model_len = settings, console, target.max_model_len
        self._loop = asyncio.new_event_loop()
        self._clients = [
            EndpointClient(address, settings.sampling, endpoints.request_timeout)
            for address in addresses
        ]
        self._servers: list[_Server] = []
        self._troubles: list[str] = []
        self._tasks: set[asyncio.Task[TurnAnswer]] = set()
        try:
            self._loop.run_until_complete(self._start(target))
        except BaseException:
            self.close()
            raise

    @property
    def in_flight(self) -> int:
        return self._settings.in_flight * max(1, len(self._servers))

    def answers(self, waiting: deque[OpenTurn]) -> Iterator[TurnAnswer]:
        """See `TargetEngine`; ConfigError where no server is left, or one refuses a request."""
        while waiting or self._tasks:
            while waiting:
                self._tasks.add(self._loop.create_task(self._answer(waiting.popleft())))
            first = asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            done, self._tasks = self._loop.run_until_complete(first)
            failed = [error for task in done if (error := task.exception()) is not None]
            yield from (task.result() for task in done if task.exception() is None)
            if failed:
                raise failed[0]

    def tokens_per_step(self) -> float | None:
        """Servers do not say it request by request."""
        return None

    def close(self) -> None:
        """Leave the servers; what they were answering is dropped there too."""
        if not self._loop.is_closed():
            self._loop.run_until_complete(self._end())
            self._loop.close()

    async def _start(self, target: ServedTarget) -> None:
        async def check(client: EndpointClient) -> None:
            try:
                self._servers.append(_Server(client, await target.check(client)))
            except EndpointDown as error:
                self._note(client, error)

        await asyncio.gather(*map(check, self._clients))
        if not self._servers:
            raise self._none_left()

    async def _answer(self, turn: OpenTurn) -> TurnAnswer:
        while self._servers:
            server = min(self._servers, key=lambda server: server.running)
            server.running += 1
            try:
                return await server.client.answer(server.model, turn)
            except EndpointDown as error:
                if server in self._servers:
                    self._servers.remove(server)
                    self._note(server.client, error)
            finally:
                server.running -= 1
        raise self._none_left()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in self._clients:
            await client.close()

    def _note(self, client: EndpointClient, error: EndpointDown) -> None:
        self._troubles.append(f"{client.address}: {error}")
        line = f"warning: endpoint {client.address} is left out: {error}"
        self._console.print(line, markup=False, highlight=False)

    def _none_left(self) -> ConfigError:
        return ConfigError(
            f"no endpoint is left: {'; '.join(self._troubles)}. Finished shards are kept: start "
            "the same command again to continue"
        )
