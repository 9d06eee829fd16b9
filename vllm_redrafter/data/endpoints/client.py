"""One server of vLLM's, asked through the `openai` package: what is sent, what comes back."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import openai

from vllm_redrafter.data.generation_settings import EndpointSettings, SamplingSettings
from vllm_redrafter.data.turns import OpenTurn, TurnAnswer
from vllm_redrafter.utils.errors import ConfigError

T = TypeVar("T")

CONNECT_SECONDS = 10.0
LOOK_SECONDS = 10.0
"""That a question may take which the server answers without the target."""
MOST_CONNECTIONS = openai.DEFAULT_CONNECTION_LIMITS.max_connections or 1000
RETRIES = 1
"""Of the package itself, half a second later: a connection may just have been closed as unused."""
PASSING = (404, 408, 409, 429)
"""Statuses, besides those of 500 and more, of a server that may be right later (404: loading, or
another server of the same address; it is checked again)."""


class EndpointDown(Exception):
    """The server cannot be reached, or fails; another one may answer, or this one later."""


class RequestRefused(ConfigError):
    """The server finds something wrong with the request itself."""


@dataclass(frozen=True)
class ServedModel:
    """A model as a server lists it.

    Attributes:
        name: to ask for it by.
        root: the folder or hub id that the server was started with.
        max_model_len: the most tokens of a prompt and its answer.
    """

    name: str
    root: str
    max_model_len: int


class EndpointClient:
    """Asks one server.

    Args:
        address: without /v1.
        sampling: how tokens are drawn.
        settings: how long to wait.
    """

    def __init__(
        self, address: str, sampling: SamplingSettings, settings: EndpointSettings
    ) -> None:
        self.address = address
        self._sampling, self._settings = sampling, settings
        self._answering = openai.AsyncOpenAI(
            base_url=f"{address}/v1",
            api_key=os.environ.get("OPENAI_API_KEY") or "EMPTY",
            max_retries=RETRIES,
            timeout=openai.Timeout(settings.request_timeout, connect=CONNECT_SECONDS),
        )
        self._asking = self._answering.with_options(timeout=LOOK_SECONDS)

    async def models(self) -> list[ServedModel]:
        """The models that it serves; adapters are left out, being other models."""
        page = await self._get(self._asking.models.list(), LOOK_SECONDS)
        with _vllm_answers():
            listed = [(model.id, model.model_extra or {}) for model in page.data]
            return [
                ServedModel(name, str(extra["root"]), int(extra["max_model_len"]))
                for name, extra in listed
                if extra.get("parent") is None
            ]

    async def tokens(self, model: str, question: dict[str, Any]) -> list[int]:
        """How it tokenizes `prompt` or `messages`.

        Raises:
            ConfigError: it refuses to.
        """
        body = {"model": model, **question}
        posted = self._asking.post(f"{self.address}/tokenize", cast_to=object, body=body)
        answer: Any = await self._get(posted, LOOK_SECONDS)
        with _vllm_answers():
            return [int(token) for token in answer["tokens"]]

    async def refusal_of_token(self, model: str, prompt: Sequence[int], token: int) -> str | None:
        """What it says to a token that is not in its vocabulary; None to one that is.

        As a stop token: every engine takes these, and they change no logits.
        """
        try:
            await self._complete(model, prompt, 1, {"stop_token_ids": [token]})
        except RequestRefused as error:
            return str(error)
        return None

    async def prompt_log_probs(self, model: str, prompt: Sequence[int]) -> list[float]:
        """The log-probability of each token of a prompt but the first.

        Raises:
            ConfigError: it gives none.
        """
        asked = {"prompt_logprobs": 1}
        choice = await self._complete(model, prompt, 1, asked)
        with _vllm_answers():
            given = choice.model_extra["prompt_logprobs"][1:]
            return [
                float(places[str(token)]["logprob"])
                for token, places in zip(prompt[1:], given, strict=True)
            ]

    async def answer(self, model: str, turn: OpenTurn) -> TurnAnswer:
        """Have a turn answered.

        Raises:
            EndpointDown: try again, here or elsewhere.
            ConfigError: the server refuses the request.
        """
        sampling = self._sampling
        asked = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or 0,
            "seed": turn.seed,
        }
        choice = await self._complete(model, turn.prompt, turn.max_tokens, asked)
        with _vllm_answers():
            extra = choice.model_extra
            if extra.get("token_ids") is None or extra["prompt_token_ids"] != turn.prompt:
                raise ConfigError(
                    f"endpoint {self.address} returns no token ids, or those of another prompt "
                    "(return_token_ids): serve the target with vLLM itself"
                )
            tokens = [int(token) for token in extra["token_ids"]]
        ended = choice.finish_reason == "stop"
        if not ended and choice.finish_reason != "length":
            raise EndpointDown(f"it ended an answer with {choice.finish_reason!r}")
        if not ended and len(tokens) < turn.max_tokens:
            raise ConfigError(
                f"endpoint {self.address} ends answers at {len(tokens)} tokens where "
                f"{turn.max_tokens} are asked for: start vllm serve with --generation-config vllm"
            )
        return TurnAnswer(turn.conversation, tokens, ended)

    async def close(self) -> None:
        """Close its connections."""
        await self._answering.close()

    async def _complete(
        self, model: str, prompt: Sequence[int], max_tokens: int, asked: dict[str, Any]
    ) -> Any:
        """The one choice of a completion; what is not asked for is as in an engine without server,
        whatever the target's generation_config.json has the server assume."""
        body = {
            "temperature": 0.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **asked,
        }
        created = self._answering.completions.create(
            model=model, prompt=list(prompt), max_tokens=max_tokens, extra_body=body
        )
        completion = await self._get(created, self._settings.request_timeout)
        with _vllm_answers():
            return completion.choices[0]

    async def _get(self, asked: Awaitable[T], seconds: float) -> T:
        """The answer, with errors told apart: later, or never."""
        try:
            async with asyncio.timeout(seconds):
                return await asked
        except TimeoutError as error:
            raise EndpointDown(f"no answer within {seconds:g} s") from error
        except openai.APIStatusError as error:
            if error.status_code in PASSING or error.status_code >= 500:
                raise EndpointDown(f"status {error.status_code}: {error.message}") from error
            refused = f"endpoint {self.address} refuses a request: {error.message}"
            if error.status_code in (401, 403):
                raise ConfigError(f"{refused}; its key goes into OPENAI_API_KEY") from error
            raise RequestRefused(refused) from error
        except (openai.APIError, ValueError) as error:
            reason = f" ({error.__cause__})" if error.__cause__ else ""
            raise EndpointDown(f"{error}{reason}") from error


@contextmanager
def _vllm_answers() -> Iterator[None]:
    """What an answer lacks in this block, no server of vLLM's sent it: something in between."""
    try:
        yield
    except ConfigError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
        raise EndpointDown(f"its answer is not vLLM's: {error!r}") from error
