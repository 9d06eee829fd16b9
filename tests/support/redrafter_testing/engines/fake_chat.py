# SPDX-License-Identifier: Apache-2.0
"""A server's client, made up: it answers in steps of given tokens, as the openai package would."""

import io
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from rich.console import Console


def chunk(text: str | None, tokens: Sequence[str] = ()) -> Any:
    """What a server streams: a step's text and its tokens, or text alone, or a role without any."""
    content = [SimpleNamespace(token=token) for token in tokens]
    choice = SimpleNamespace(
        delta=SimpleNamespace(content=text),
        logprobs=SimpleNamespace(content=content) if tokens else None,
    )
    return SimpleNamespace(choices=[choice])


class FakeClient:
    """Answers each message with the next steps (a token's texts, or a chunk), or raises them."""

    def __init__(self, answers: Sequence[Any]) -> None:
        self.answers = iter(answers)
        self.asked: list[dict[str, Any]] = []
        self.closed = 0
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self.create))

    @contextmanager
    def create(self, **request: Any) -> Iterator[Iterator[Any]]:
        self.asked.append(request)
        answer = next(self.answers)
        if isinstance(answer, BaseException):
            raise answer
        try:
            yield self.chunks(answer)
        finally:
            self.closed += 1

    def chunks(self, steps: Sequence[Any]) -> Iterator[Any]:
        yield SimpleNamespace(choices=[])  # as usage statistics come
        yield chunk(None)
        for step in steps:
            if isinstance(step, BaseException):
                raise step
            time.sleep(0.001)
            yield chunk("".join(step), step) if isinstance(step, list) else step


class Typed(Console):
    """A terminal whose user types these lines, and then Ctrl-D."""

    def __init__(self, lines: Sequence[str]) -> None:
        shown: dict[str, Any] = {"force_terminal": True, "color_system": "standard"}
        super().__init__(file=io.StringIO(), width=1000, highlight=False, **shown)
        self._lines = iter(lines)

    def input(self, *_: Any, **__: Any) -> str:
        try:
            return next(self._lines)
        except StopIteration:
            raise EOFError from None

    def shown(self) -> str:
        assert isinstance(self.file, io.StringIO)
        return self.file.getvalue()
