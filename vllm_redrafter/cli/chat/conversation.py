# SPDX-License-Identifier: Apache-2.0
"""Messages to an OpenAI-compatible server, and its answers with the drafted tokens marked."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from openai import APIError, APIStatusError, OpenAI
from rich.console import Console
from rich.live import Live
from rich.text import Text

from vllm_redrafter.cli.chat.chat_settings import ChatSettings
from vllm_redrafter.data.conversation_rows import unpaired_surrogate
from vllm_redrafter.utils.errors import ConfigError

DRAFTED, FOUND = "green underline", "cyan reverse"
"""Styles of tokens that were drafted and accepted; and of those that a match in the text had."""
NEW, HELP = "/new", "/help"
"""Typed instead of a message: forget the conversation, and say what can be typed."""
COMMANDS = f"Ctrl-C stops an answer, Ctrl-D ends the chat; {NEW} forgets it, {HELP} says this"


def marked(text: str, console: Console, style: str = DRAFTED) -> Text:
    """Text of a style; ‹DRAFTED› or «FOUND» where there are no styles."""
    begin, end = "‹›" if style == DRAFTED else "«»"
    return Text(text, style) if console.color_system or not text else Text(begin + text + end)


def chat(
    url: str, model: str | None, settings: ChatSettings, console: Console | None = None
) -> None:
    """Talk to a running server; `model` is its name there, None for the first one.

    ConfigError: no server answers at `url`.
    """
    console = console or Console()
    key = os.environ.get("OPENAI_API_KEY", "none")
    with OpenAI(base_url=f"{url.rstrip('/')}/v1", api_key=key, max_retries=0) as client:
        try:
            model = model or client.models.list().data[0].id
        except (APIError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"no server at {url!r} says what it serves ({error}): start `vllm serve` and name "
                "its address with --url"
            ) from error
        legend = marked("tokens like these", console)
        console.print(Text.assemble(f"{model} at {url}; ", legend, " were drafted and accepted"))
        console.print(COMMANDS, style="dim")
        with suppress(ImportError):
            import readline  # noqa: F401  # input() then edits lines
        Conversation(client, model, settings, console).converse(lambda: input("> "))


class Conversation:
    """Messages, and how the next is answered: by this model of a server, the openai `client`'s."""

    def __init__(self, client: Any, model: str, settings: ChatSettings, console: Console) -> None:
        self._client, self._model = client, model
        self._settings, self._console = settings, console
        self.messages: list[dict[str, str]] = []
        self._forget()

    def converse(self, read: Callable[[], str]) -> None:
        """Answer messages until there are no more (Ctrl-D); ConfigError: the server is gone.

        `read` asks for a message, and raises EOFError at the end.
        """
        while True:
            try:
                message = read().strip()
                if message == NEW:
                    self._forget()
                    self._console.print("the conversation is forgotten", style="dim")
                elif message == HELP:
                    self._console.print(COMMANDS, style="dim")
                elif message:
                    self._answer(message)
            except EOFError:
                self._console.print()
                return
            except KeyboardInterrupt:
                self._console.print(f"\n{COMMANDS}", style="dim")

    def _forget(self) -> None:
        system = self._settings.system_prompt
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def _answer(self, message: str) -> None:
        """Show the answer while it comes; Ctrl-C ends it, and what came of it counts."""
        if half := unpaired_surrogate(message):
            self._refuse(f"{half} is half of a character")
            return
        given, question = _Answer(), {"role": "user", "content": message}
        waiting = Live(get_renderable=given.waited, console=self._console, transient=True)
        try:
            with waiting, self._stream([*self.messages, question]) as chunks:
                for chunk in chunks:
                    waiting.stop()
                    for choice in chunk.choices:
                        drafted, own = given.add(choice)
                        text = Text.assemble(marked(drafted, self._console), own)
                        self._console.print(text, end="", soft_wrap=True)
        except KeyboardInterrupt:
            self._console.print(" …", style="dim", end="")
        except APIStatusError as error:
            self._refuse(error.message)
            return
        except APIError as error:
            raise ConfigError(f"the server does not answer any more: {error}") from error
        self.messages += [question, {"role": "assistant", "content": given.text}]
        self._console.print()
        self._console.print(Text(given.rates(), style="dim"))

    def _refuse(self, reason: str) -> None:
        self._console.print(Text(f"refused: {reason}", style="red"))

    def _stream(self, messages: list[dict[str, str]]) -> Any:
        return self._client.chat.completions.create(
            model=self._model,
            messages=messages,
            temperature=self._settings.temperature,
            max_tokens=self._settings.max_tokens,
            stream=True,
            logprobs=True,  # they come with the tokens' texts
        )


class _Answer:
    """An answer as far as it has come: its text, and the size and time of each chunk."""

    def __init__(self) -> None:
        self.text = ""
        self._asked = time.perf_counter()
        self._sizes: list[int] = []
        self._times: list[float] = []

    def waited(self) -> Text:
        """For how long."""
        return Text(f"{time.perf_counter() - self._asked:.0f} s", "dim")

    def add(self, choice: Any) -> tuple[str, str]:
        """A chunk's drafted text and the target's own; there is one per step if we keep up."""
        text = choice.delta.content or ""
        tokens = (choice.logprobs and choice.logprobs.content) or []
        if text or tokens:
            self._sizes.append(len(tokens) or 1)
            self._times.append(time.perf_counter())
        self.text += text
        # The last token is the target's own. It is no suffix where it ends within a character.
        drafted = text.removesuffix(tokens[-1].token) if len(tokens) > 1 else ""
        return drafted, text[len(drafted) :]

    def rates(self) -> str:
        """Tokens per second and step, without the first step, which is the prompt's."""
        tokens, steps = sum(self._sizes[1:]), len(self._sizes) - 1
        seconds = self._times[-1] - self._times[0] if self._times else 0.0
        took = f"{sum(self._sizes)} tokens in {time.perf_counter() - self._asked:.1f} s"
        rate = f", {tokens / seconds:.1f} per second" if seconds else ""
        return took + rate + (f", {tokens / steps:.2f} per step" if tokens > steps else "")
