# SPDX-License-Identifier: Apache-2.0
"""One server of vLLM's, asked through the `openai` package: what is sent, what comes back."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import openai

from vllm_redrafter.data.settings import SamplingSettings
from vllm_redrafter.data.turns import OpenTurn, TurnAnswer
from vllm_redrafter.utils.errors import ConfigError

T = TypeVar("T")

RETRIES = 5
"""By the package, of what fails: after 0.5, 1, 2, 4 and 8 seconds."""
CONNECT_SECONDS = 10.0
CHECK_SECONDS = 60.0
"""For a question that the server answers without the target, retries included."""
OF_THE_REQUEST = (400, 401, 403, 413, 422)
"""Statuses at which no other server would do better."""
NEUTRAL = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "return_token_ids": True,
}
"""Said to every server, whatever the target's generation_config.json has it assume."""


class EndpointDown(Exception):
    """The server cannot be reached, or fails, after retries too."""


class EndpointClient:
    """Asks one server, whose address is without /v1; an answer may take `seconds` with retries.

    All that it is asked may raise an EndpointDown (another server may answer) or a ConfigError (the
    server refuses the request).
    """

    def __init__(self, address: str, sampling: SamplingSettings, seconds: float) -> None:
        self.address = address
        self._sampling, self._seconds = sampling, seconds
        self._openai = openai.AsyncOpenAI(
            base_url=f"{address}/v1",
            api_key=os.environ.get("OPENAI_API_KEY") or "EMPTY",
            max_retries=RETRIES,
            timeout=openai.Timeout(seconds, connect=CONNECT_SECONDS),
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

    async def tokens(self, model: str, text: str) -> list[int]:
        """How it tokenizes a text."""
        url, body = f"{self.address}/tokenize", {"model": model, "prompt": text}
        asked: Awaitable[Any] = self._openai.post(url, cast_to=object, body=body)
        return await self._ask(asked, lambda found: list(map(int, found["tokens"])), CHECK_SECONDS)

    async def prompt_log_probs(self, model: str, prompt: Sequence[int]) -> list[float]:
        """The log-probability of each token of a prompt but the first."""

        def read(completion: Any) -> list[float]:
            given = completion.choices[0].model_extra["prompt_logprobs"][1:]
            pairs = zip(prompt[1:], given, strict=True)
            return [float(places[str(token)]["logprob"]) for token, places in pairs]

        return await self._complete(model, prompt, 1, {"prompt_logprobs": 1}, read)

    async def answer(self, model: str, turn: OpenTurn) -> TurnAnswer:
        sampling = self._sampling
        asked = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or 0,
            "seed": turn.seed,
        }

        def read(completion: Any) -> tuple[list[int], str]:
            (choice,) = completion.choices
            tokens = list(map(int, choice.model_extra["token_ids"]))
            if choice.model_extra["prompt_token_ids"] != list(turn.prompt):
                raise ValueError("another prompt than was asked")
            return tokens, choice.finish_reason

        tokens, reason = await self._complete(model, turn.prompt, turn.max_tokens, asked, read)
        if reason not in ("stop", "length"):
            raise EndpointDown(f"it ended an answer with {reason!r}")
        if reason == "length" and len(tokens) < turn.max_tokens:
            raise ConfigError(
                f"endpoint {self.address} ends answers at {len(tokens)} tokens where "
                f"{turn.max_tokens} are asked for: start vllm serve with --generation-config vllm"
            )
        return TurnAnswer(turn.conversation, tokens, ended=reason == "stop")

    async def close(self) -> None:
        await self._openai.close()

    async def _complete(
        self,
        model: str,
        prompt: Sequence[int],
        max_tokens: int,
        asked: dict[str, Any],
        read: Callable[[Any], T],
    ) -> T:
        created = self._openai.completions.create(
            model=model, prompt=list(prompt), max_tokens=max_tokens, extra_body=NEUTRAL | asked
        )
        return await self._ask(created, read, self._seconds)

    async def _ask(self, asked: Awaitable[Any], read: Callable[[Any], T], seconds: float) -> T:
        """What is read of an answer, with errors told apart."""
        try:
            async with asyncio.timeout(seconds):
                return read(await asked)
        except TimeoutError as error:
            raise EndpointDown(f"no answer within {seconds:g} s") from error
        except openai.APIStatusError as error:
            if error.status_code not in OF_THE_REQUEST:
                raise EndpointDown(f"status {error.status_code}: {error.message}") from error
            hint = "; its key goes into OPENAI_API_KEY" if error.status_code in (401, 403) else ""
            raise ConfigError(
                f"endpoint {self.address} refuses a request: {error.message}{hint}"
            ) from error
        except openai.APIError as error:
            reason = f" ({error.__cause__})" if error.__cause__ else ""
            raise EndpointDown(f"{error}{reason}") from error
        except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
            raise EndpointDown(f"its answer is not vLLM's: {error!r}") from error
