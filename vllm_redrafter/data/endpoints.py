# SPDX-License-Identifier: Apache-2.0
"""A running server of vLLM as an engine, checked to serve the target before it answers."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import openai

from vllm_redrafter.data.settings import GenerationSettings
from vllm_redrafter.data.target import Target
from vllm_redrafter.data.turns import OpenTurn, TurnAnswer
from vllm_redrafter.utils.errors import ConfigError

T = TypeVar("T")

RETRIES = 5
"""Of the `openai` package: after 0.5, 1, 2, 4 and 8 seconds."""
CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 1800.0
"""For an answer."""
CHECK_SECONDS = 60.0
"""For a question that the server answers without the target, retries included."""
OF_THE_REQUEST = (400, 401, 403, 413, 422)
"""Statuses with which a server refuses a request."""

TEXT = (
    "In 1889 the tower stood 312 m high. def area(r): return 3.14159 * r ** 2  # Größe, 塔, été\n"
)
"""How a server tokenizes it must be how the target's files do."""


def parsed_address(text: str) -> str:
    """An address without a slash or /v1 at its end."""
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment:
        raise ConfigError(
            f"--endpoint {text}: not the address of a server; give one such as http://localhost:8000"
        )
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


class EndpointEngine:
    """A server, at an address without /v1, that lets the target answer: a `TargetEngine`.

    ConfigError: it serves something else or under another name than `served_name`, or does not
    answer.
    """

    def __init__(
        self, address: str, target: Target, settings: GenerationSettings, served_name: str | None
    ) -> None:
        length = settings.sampling.max_model_len
        length = length or getattr(target.text_config, "max_position_embeddings", None)
        if length is None:
            raise ConfigError(
                f"target {target.name!r}: its config.json does not say how long a text may be; "
                "give --max-model-len"
            )
        self.in_flight, self.max_model_len = settings.in_flight, int(length)
        self._address, self._sampling = address, settings.sampling
        self._openai = openai.AsyncOpenAI(
            base_url=f"{address}/v1",
            api_key=os.environ.get("OPENAI_API_KEY") or "EMPTY",
            max_retries=RETRIES,
            timeout=openai.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS),
        )
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[TurnAnswer]] = set()
        try:
            self.model = self._loop.run_until_complete(self._check(target, served_name))
        except BaseException:
            self.close()
            raise

    def answers(self, waiting: deque[OpenTurn]) -> Iterator[TurnAnswer]:
        """See `TargetEngine`; ConfigError where the server fails, or refuses a request."""
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
        """Leave the server; what it was answering is dropped there too."""
        if not self._loop.is_closed():
            self._loop.run_until_complete(self._end())
            self._loop.close()

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._openai.close()

    async def _check(self, target: Target, served_name: str | None) -> str:
        """The server's name for the target; ConfigError where its length or tokenizer differs."""
        models, wanted = await self._models(), served_name or Path(target.name).name
        fitting = [
            (name, length)
            for name, root, length in models
            if wanted == name or (not served_name and wanted in (Path(name).name, Path(root).name))
        ]
        if not fitting:
            served = ", ".join(f"{name!r} (from {root})" for name, root, _ in models) or "nothing"
            raise ConfigError(
                f"endpoint {self._address} serves {served}, not {served_name or target.name!r}; if "
                "that is the target by another name, give it as --served-name"
            )
        name, length = fitting[0]
        if length < self.max_model_len:
            raise ConfigError(
                f"endpoint {self._address} allows {length} tokens, and {self.max_model_len} may "
                f"be asked for: give --max-model-len, at most {length}"
            )
        url, body = f"{self._address}/tokenize", {"model": name, "prompt": TEXT}
        asked: Awaitable[Any] = self._openai.post(url, cast_to=object, body=body)
        found = await self._ask(asked, lambda page: list(map(int, page["tokens"])), CHECK_SECONDS)
        ours = list(map(int, target.tokenizer(TEXT)["input_ids"]))
        if found != ours:
            raise ConfigError(
                f"endpoint {self._address} has another tokenizer than {target.name!r}: the same "
                f"text begins with {found[:8]} there, and with {ours[:8]} here; serve the same "
                "files"
            )
        return name

    async def _models(self) -> list[tuple[str, str, int]]:
        """Of each model that it serves, adapters left out: (name, folder or hub id, max length)."""

        def read(page: Any) -> list[tuple[str, str, int]]:
            own = (each for each in page.data if each.model_extra.get("parent") is None)
            found = ((each.id, each.model_extra) for each in own)
            return [(name, str(of["root"]), int(of["max_model_len"])) for name, of in found]

        return await self._ask(self._openai.models.list(), read, CHECK_SECONDS)

    async def _answer(self, turn: OpenTurn) -> TurnAnswer:
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
            raise self._down(f"it ended an answer with {reason!r}")
        if reason == "length" and len(tokens) < turn.max_tokens:
            raise ConfigError(
                f"endpoint {self._address} ends answers at {len(tokens)} tokens where "
                f"{turn.max_tokens} are asked for: start vllm serve with --generation-config vllm"
            )
        return TurnAnswer(turn.conversation, tokens, ended=reason == "stop")

    async def _ask(self, asked: Awaitable[Any], read: Callable[[Any], T], seconds: float) -> T:
        """What is read of an answer; failures of the server and refusals are told apart."""
        try:
            async with asyncio.timeout(seconds):
                return read(await asked)
        except TimeoutError as error:
            raise self._down(f"no answer within {seconds:g} s") from error
        except openai.APIStatusError as error:
            if error.status_code not in OF_THE_REQUEST:
                raise self._down(f"status {error.status_code}: {error.message}") from error
            hint = "; its key goes into OPENAI_API_KEY" if error.status_code in (401, 403) else ""
            raise ConfigError(
                f"endpoint {self._address} refuses a request: {error.message}{hint}"
            ) from error
        except openai.APIError as error:
            reason = f" ({error.__cause__})" if error.__cause__ else ""
            raise self._down(f"{error}{reason}") from error
        except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
            raise self._down(f"its answer is not vLLM's: {error!r}") from error

    def _down(self, reason: str) -> ConfigError:
        return ConfigError(
            f"endpoint {self._address}: {reason}. Finished shards are kept: start the same command "
            "again to continue"
        )
