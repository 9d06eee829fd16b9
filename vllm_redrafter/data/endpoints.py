# SPDX-License-Identifier: Apache-2.0
"""Running servers of vLLM as one engine, each checked to serve the target before it answers."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import openai
from rich.console import Console

from vllm_redrafter.data.settings import GenerationSettings, SamplingSettings
from vllm_redrafter.data.target import Target
from vllm_redrafter.data.turns import OpenTurn, TurnAnswer
from vllm_redrafter.utils.errors import ConfigError

T = TypeVar("T")

RETRIES = 5
"""Of the `openai` package: after 0.5, 1, 2, 4 and 8 seconds."""
CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 1800.0
"""After which a server is left out."""
CHECK_SECONDS = 60.0
"""For a question that the server answers without the target, retries included."""
OF_THE_REQUEST = (400, 401, 403, 413, 422)
"""Statuses that any other server would return too."""

TEXT = (
    "In 1889 the tower stood 312 m high. def area(r): return 3.14159 * r ** 2  # Größe, 塔, été\n"
)
"""How a server tokenizes it must be how the target's files do."""


def parsed_addresses(text: str) -> list[str]:
    """From `URL[,URL...]`: each address once and in order, without a slash or /v1 at its end."""
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


class EndpointEngine:
    """Servers that let the target answer: a `TargetEngine`; the least busy one is asked.

    The setting `in_flight` is for each server. A server that fails is left out, and `console` says
    so. ConfigError: a server serves something else, or none answers.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        target: Target,
        settings: GenerationSettings,
        served_name: str | None,
        console: Console,
    ) -> None:
        served = _ServedTarget(target, settings.sampling.max_model_len, served_name)
        self._settings, self._console, self.max_model_len = settings, console, served.max_model_len
        self._loop = asyncio.new_event_loop()
        self._clients = [_Client(address, settings.sampling) for address in addresses]
        self._servers: list[_Client] = []
        self._troubles: list[str] = []
        self._tasks: set[asyncio.Task[TurnAnswer]] = set()
        try:
            self._loop.run_until_complete(self._start(served))
        except BaseException:
            self.close()
            raise

    @property
    def in_flight(self) -> int:
        return max(1, len(self._servers)) * self._settings.in_flight

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

    def close(self) -> None:
        """Leave the servers; what they were answering is dropped there too."""
        if not self._loop.is_closed():
            self._loop.run_until_complete(self._end())
            self._loop.close()

    async def _start(self, target: _ServedTarget) -> None:
        async def check(client: _Client) -> None:
            try:
                await target.check(client)
                self._servers.append(client)
            except _Down as error:
                self._note(client, error)

        await asyncio.gather(*map(check, self._clients))
        if not self._servers:
            raise self._none_left()

    async def _answer(self, turn: OpenTurn) -> TurnAnswer:
        while self._servers:
            server = min(self._servers, key=lambda server: server.running)
            server.running += 1
            try:
                return await server.answer(turn)
            except _Down as error:
                if server in self._servers:
                    self._servers.remove(server)
                    self._note(server, error)
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

    def _note(self, client: _Client, error: _Down) -> None:
        self._troubles.append(f"{client.address}: {error}")
        line = f"warning: endpoint {client.address} is left out: {error}"
        self._console.print(line, markup=False, highlight=False)

    def _none_left(self) -> ConfigError:
        return ConfigError(
            f"no endpoint is left: {'; '.join(self._troubles)}. Finished shards are kept: start "
            "the same command again to continue"
        )


class _Down(Exception):
    """The server cannot be reached, or fails, after retries too: another one may answer."""


class _Client:
    """One server, at an address without /v1.

    `model` is its name for the target, when that is known. A question may raise a `_Down` (another
    server may answer) or a ConfigError (it is refused).
    """

    def __init__(self, address: str, sampling: SamplingSettings) -> None:
        self.address, self.model, self.running = address, "", 0
        self._sampling = sampling
        self._openai = openai.AsyncOpenAI(
            base_url=f"{address}/v1",
            api_key=os.environ.get("OPENAI_API_KEY") or "EMPTY",
            max_retries=RETRIES,
            timeout=openai.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS),
        )

    async def models(self) -> list[tuple[str, str, int]]:
        """Of each model that it serves, adapters left out: (name, folder or hub id, max length)."""

        def read(page: Any) -> list[tuple[str, str, int]]:
            models = [(model.id, model.model_extra) for model in page.data]
            return [
                (name, str(of["root"]), int(of["max_model_len"]))
                for name, of in models
                if of.get("parent") is None
            ]

        return await self._ask(self._openai.models.list(), read, CHECK_SECONDS)

    async def tokens(self, text: str) -> list[int]:
        """How it tokenizes a text."""
        url, body = f"{self.address}/tokenize", {"model": self.model, "prompt": text}
        asked: Awaitable[Any] = self._openai.post(url, cast_to=object, body=body)
        return await self._ask(asked, lambda found: list(map(int, found["tokens"])), CHECK_SECONDS)

    async def answer(self, turn: OpenTurn) -> TurnAnswer:
        sampling = self._sampling
        # All that the target's generation_config.json may set.
        body = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": turn.seed,
            "return_token_ids": True,
        }
        created = self._openai.completions.create(
            model=self.model, prompt=[*turn.prompt], max_tokens=turn.max_tokens, extra_body=body
        )

        def read(completion: Any) -> tuple[list[int], str]:
            (choice,) = completion.choices
            tokens = list(map(int, choice.model_extra["token_ids"]))
            if choice.model_extra["prompt_token_ids"] != list(turn.prompt):
                raise ValueError("another prompt than was asked")
            return tokens, choice.finish_reason

        tokens, reason = await self._ask(created, read, ANSWER_SECONDS)
        if reason not in ("stop", "length"):
            raise _Down(f"it ended an answer with {reason!r}")
        if reason == "length" and len(tokens) < turn.max_tokens:
            raise ConfigError(
                f"endpoint {self.address} ends answers at {len(tokens)} tokens where "
                f"{turn.max_tokens} are asked for: start vllm serve with --generation-config vllm"
            )
        return TurnAnswer(turn.conversation, tokens, ended=reason == "stop")

    async def close(self) -> None:
        await self._openai.close()

    async def _ask(self, asked: Awaitable[Any], read: Callable[[Any], T], seconds: float) -> T:
        """What is read of an answer; failures of the server and refusals are told apart."""
        try:
            async with asyncio.timeout(seconds):
                return read(await asked)
        except TimeoutError as error:
            raise _Down(f"no answer within {seconds:g} s") from error
        except openai.APIStatusError as error:
            if error.status_code not in OF_THE_REQUEST:
                raise _Down(f"status {error.status_code}: {error.message}") from error
            hint = "; its key goes into OPENAI_API_KEY" if error.status_code in (401, 403) else ""
            raise ConfigError(
                f"endpoint {self.address} refuses a request: {error.message}{hint}"
            ) from error
        except openai.APIError as error:
            reason = f" ({error.__cause__})" if error.__cause__ else ""
            raise _Down(f"{error}{reason}") from error
        except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
            raise _Down(f"its answer is not vLLM's: {error!r}") from error


class _ServedTarget:
    """What a server has to serve, compared with the target's files: name, length and tokenizer.

    `length` is in tokens; None for what the target allows.
    """

    def __init__(self, target: Target, length: int | None, served_name: str | None) -> None:
        self._target, self._served_name = target.name, served_name
        self._tokens = list(map(int, target.tokenizer(TEXT)["input_ids"]))
        length = length or getattr(target.text_config, "max_position_embeddings", None)
        if length is None:
            raise ConfigError(
                f"target {target.name!r}: its config.json does not say how long a text may be; "
                "give --max-model-len"
            )
        self.max_model_len = int(length)

    async def check(self, client: _Client) -> None:
        """Set the client's name for the target; ConfigError where it serves something else."""
        client.model, length = self._find(client.address, await client.models())
        if length < self.max_model_len:
            raise ConfigError(
                f"endpoint {client.address} allows {length} tokens, and {self.max_model_len} may "
                f"be asked for: give --max-model-len, at most {length}"
            )
        found = await client.tokens(TEXT)
        if found != self._tokens:
            raise ConfigError(
                f"endpoint {client.address} has another tokenizer than {self._target!r}: the same "
                f"text begins with {found[:8]} there, and with {self._tokens[:8]} here; serve the "
                "same files"
            )

    def _find(self, address: str, models: list[tuple[str, str, int]]) -> tuple[str, int]:
        for name, root, length in models:
            names = {name, _last_part(name), _last_part(root)}
            if self._served_name == name or (
                self._served_name is None and _last_part(self._target) in names
            ):
                return name, length
        served = ", ".join(f"{name!r} (from {root})" for name, root, _ in models) or "nothing"
        raise ConfigError(
            f"endpoint {address} serves {served}, not {self._served_name or self._target!r}; if "
            "that is the target by another name, give it as --served-name"
        )


def _last_part(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2]
