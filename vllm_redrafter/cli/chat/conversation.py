# SPDX-License-Identifier: Apache-2.0
"""Messages to an OpenAI-compatible server, and its answers with the drafted tokens tinted."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from openai import APIError, APIStatusError
from rich.console import Console
from rich.text import Text

from vllm_redrafter.cli.accepted import DRAFTED
from vllm_redrafter.cli.chat.chat_settings import ChatSettings
from vllm_redrafter.data.text_checks import half_character
from vllm_redrafter.utils.errors import ConfigError

NEW = "/new"
"""Said instead of a message: forget the conversation."""


@dataclass
class Answer:
    """An answer as far as it has come.

    Attributes:
        text: without special tokens.
        steps: tokens of each of the target's steps; the first step is the prompt's.
        times: when each came, by `time.perf_counter`.
    """

    text: str = ""
    steps: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def add(self, choice: Any) -> Text:
        """A streamed chunk's text: vLLM sends a chunk per step, with all of the step's tokens."""
        text = choice.delta.content or ""
        tokens = (choice.logprobs and choice.logprobs.content) or []
        if text or tokens:
            self.steps.append(len(tokens) or 1)
            self.times.append(time.perf_counter())
        self.text += text
        # The last token is the target's own. It is no suffix where it ends within a character.
        drafted = text.removesuffix(tokens[-1].token) if len(tokens) > 1 else ""
        return Text.assemble((drafted, DRAFTED), text[len(drafted) :])

    def __str__(self) -> str:
        """Tokens, their rate behind the first step, and tokens per step where they are drafted."""
        tokens, steps = sum(self.steps[1:]), len(self.steps) - 1
        seconds = self.times[-1] - self.times[0] if self.times else 0.0
        if seconds <= 0:
            return f"{sum(self.steps)} tokens"
        per_step = f", {tokens / steps:.2f} per step" if tokens > steps else ""
        return f"{sum(self.steps)} tokens, {tokens / seconds:.1f} per second{per_step}"


class Conversation:
    """Messages, and how the next one is answered.

    Args:
        client: of the openai package.
        model: its name at the server.
        settings: how answers are drawn.
        console: where they are shown.
    """

    def __init__(self, client: Any, model: str, settings: ChatSettings, console: Console) -> None:
        self._client, self._model = client, model
        self._settings, self._console = settings, console
        self.messages: list[dict[str, str]] = []
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        system = self._settings.system_prompt
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def answer(self, message: str) -> None:
        """Show the answer while it comes; Ctrl-C ends it, and it counts as given.

        Raises:
            ConfigError: the server is gone.
        """
        if half := half_character(message):
            self._refuse(f"{half} is half of a character")
            return
        given, question = Answer(), {"role": "user", "content": message}
        try:
            with self._stream([*self.messages, question]) as chunks:
                for chunk in chunks:
                    for choice in chunk.choices:
                        self._console.print(given.add(choice), end="", soft_wrap=True)
        except KeyboardInterrupt:
            self._console.print(" …", style="dim", end="")
        except APIStatusError as error:
            self._refuse(error.message)
            return
        except APIError as error:
            raise ConfigError(f"the server does not answer any more: {error}") from error
        self.messages += [question, {"role": "assistant", "content": given.text}]
        self._console.print()
        self._console.print(Text(str(given), style="dim"))

    def _refuse(self, reason: str) -> None:
        self._console.print(Text(f"refused: {reason}", style="red"))

    def _stream(self, messages: list[dict[str, str]]) -> Any:
        settings = self._settings
        return self._client.chat.completions.create(
            model=self._model,
            messages=messages,
            temperature=settings.temperature,
            top_p=settings.top_p,
            max_tokens=settings.max_tokens,
            stream=True,
            logprobs=True,  # they come with the tokens' texts
        )


def converse(conversation: Conversation, console: Console, read: Callable[[], str]) -> None:
    """Answer messages until there are no more (Ctrl-D).

    Args:
        conversation: with the server.
        console: the same as its.
        read: asks for a message; raises EOFError at the end.
    """
    while True:
        try:
            message = read().strip()
            if message == NEW:
                conversation.forget()
                console.print("the conversation is forgotten", style="dim")
            elif message:
                conversation.answer(message)
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print(f"\nCtrl-D ends the chat, {NEW} begins another one", style="dim")
