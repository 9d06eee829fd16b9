"""A server's client, made up: it answers in steps of given tokens, as the openai package would."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import openai


def chunk(tokens: Sequence[int], prompt: Sequence[int] | None = None) -> Any:
    """A step's; the prompt comes with the first one, as a field that openai does not know."""
    choice = SimpleNamespace(model_extra={"token_ids": list(tokens)})
    return SimpleNamespace(choices=[choice], model_extra={"prompt_token_ids": prompt})


def text_chunk(text: str | None) -> Any:
    """What mlx-lm's server sends: text alone, or a role without any."""
    return SimpleNamespace(choices=[SimpleNamespace(delta=SimpleNamespace(content=text))])


class FakeClient:
    """Answers each message with the next of some answers.

    Args:
        answers: per message the steps, each its tokens, or its text; or an exception to raise. The
            first may be a tuple of the prompt's tokens and the step's.
        seconds: between two steps.
    """

    def __init__(self, answers: Sequence[Any], seconds: float = 0.0) -> None:
        self.answers = iter(answers)
        self.seconds = seconds
        self.asked: list[dict[str, Any]] = []
        self.closed = 0
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self.create))

    @contextmanager
    def create(self, **request: Any) -> Iterator[Iterator[Any]]:
        self.asked.append({**request, "messages": [dict(m) for m in request["messages"]]})
        answer = next(self.answers)
        if isinstance(answer, BaseException):
            raise answer
        try:
            yield self.chunks(answer)
        finally:
            self.closed += 1

    def chunks(self, steps: Sequence[Any]) -> Iterator[Any]:
        yield SimpleNamespace(choices=[], model_extra=None)  # as usage statistics come
        empty = SimpleNamespace(model_extra=None, delta=SimpleNamespace(content=None))
        yield SimpleNamespace(choices=[empty], model_extra={})
        for step in steps:
            if isinstance(step, BaseException):
                raise step
            time.sleep(self.seconds)
            if isinstance(step, str):
                yield text_chunk(step)
                continue
            prompt, tokens = step if isinstance(step, tuple) else (None, step)
            yield chunk(tokens, prompt)


def refused(message: str) -> openai.BadRequestError:
    response = httpx.Response(400, request=httpx.Request("POST", "http://server"))
    return openai.BadRequestError(message, response=response, body=None)


def gone() -> openai.APIConnectionError:
    return openai.APIConnectionError(request=httpx.Request("POST", "http://server"))
