"""The conversation: what is said, streamed, with the tokens tinted that were drafted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from openai import APIError, APIStatusError
from rich.console import Console
from rich.text import Text
from tokenizers.decoders import DecodeStream

from vllm_redrafter.cli.accepted import colours, num_matched
from vllm_redrafter.cli.chat.chat_settings import ChatSettings
from vllm_redrafter.data.text_checks import half_character
from vllm_redrafter.data.vocabulary import EmbeddedTokens
from vllm_redrafter.utils.errors import ConfigError

NEW = "/new"
"""Said instead of a message: forget what was said."""


@dataclass
class Answer:
    """What the target has said so far in answer to one message.

    Attributes:
        text: of it.
        steps: tokens of each of the target's steps, as they came.
        matched: accepted tokens that were found in the text.
        began: when the first came, by `time.perf_counter`.
        ended: when the last came.
        knows_steps: does the server tell them? If not, `steps` has two: the first token, and
            all others.
    """

    text: str = ""
    steps: list[int] = field(default_factory=list)
    matched: int = 0
    began: float = 0.0
    ended: float = 0.0
    knows_steps: bool = True

    def __str__(self) -> str:
        """Tokens per second and per step, and what was found in the text; the first step is the
        prompt's."""
        tokens, steps, seconds = sum(self.steps[1:]), len(self.steps) - 1, self.ended - self.began
        if not steps or seconds <= 0:
            return f"{sum(self.steps)} tokens"
        per_step = f", {tokens / steps:.2f} per step" if self.knows_steps else ""
        found = f", {self.matched} found in the text" if self.matched else ""
        return f"{sum(self.steps)} tokens, {tokens / seconds:.1f} per second{per_step}{found}"


class Conversation:
    """Messages, and how the next one is answered.

    Args:
        client: of the openai package, or what looks like it.
        model: its name at the server.
        tokenizer: the target's, of transformers; a fast one.
        embedded: the tokens that the target can be sent.
        settings: how answers are drawn.
        console: where they are shown.
        context_matches: the server's setting of that name.
    """

    def __init__(
        self,
        client: Any,
        model: str,
        tokenizer: Any,
        embedded: EmbeddedTokens,
        settings: ChatSettings,
        console: Console,
        context_matches: int,
    ) -> None:
        self._client, self._model, self._tokenizer = client, model, tokenizer
        self._context_matches = context_matches
        self._embedded, self._settings, self._console = embedded, settings, console
        self.messages: list[dict[str, str]] = []
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        system = self._settings.system_prompt
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def answer(self, said: str) -> Answer:
        """Show the answer to a message while it comes; Ctrl-C ends it, and it counts as given.

        Raises:
            ConfigError: the server is gone.
        """
        self.messages.append({"role": "user", "content": said})
        given = Answer()
        if trouble := self._trouble():
            self._refuse(trouble)
            return given
        try:
            with self._stream() as chunks:
                self._show(chunks, given)
        except KeyboardInterrupt:
            self._console.print(" …", style="dim", end="")
        except APIStatusError as error:
            self._refuse(error.message)
            return given
        except APIError as error:
            raise ConfigError(f"the server does not answer any more: {error}") from error
        self.messages.append({"role": "assistant", "content": given.text})
        self._console.print()
        self._console.print(Text(str(given), style="dim"))
        return given

    def _refuse(self, reason: str) -> None:
        self.messages.pop()
        self._console.print(Text(f"refused: {reason}", style="red"))

    def _trouble(self) -> str | None:
        """Why the server must not be sent the messages: it would not survive them."""
        text = "\n".join(message["content"] for message in self.messages)
        if half := half_character(text):
            return f"{half} is half of a character"
        if self._embedded.are_all:
            return None
        return self._embedded.trouble(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _stream(self) -> Any:
        settings = self._settings
        return self._client.chat.completions.create(
            model=self._model,
            messages=self.messages,
            temperature=settings.temperature,
            top_p=settings.top_p,
            max_tokens=settings.max_tokens,
            stream=True,
            extra_body={"return_token_ids": True},
        )

    def _show(self, chunks: Iterable[Any], given: Answer) -> None:
        decoder = StepDecoder(self._tokenizer)
        said: list[int] = []
        for chunk in chunks:
            said += _prompt_tokens(chunk)
            tokens = _tokens(chunk)
            if not tokens:
                continue
            given.ended = time.perf_counter()
            given.began = given.began or given.ended
            given.steps.append(len(tokens))
            matched = num_matched(said, tokens, self._context_matches)
            given.matched += matched
            said += tokens
            shown = Text()
            for text, colour in decoder.pieces(tokens, matched):
                given.text += text
                shown.append(text, style=colour)
            self._console.print(shown, end="", soft_wrap=True)


class StepDecoder:
    """Text of an answer's tokens, step by step; a character waits until all of it is there."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def pieces(self, tokens: Sequence[int], matched: int) -> Iterator[tuple[str, str]]:
        """A step's texts and their colours; so many of its tokens were found in the text."""
        for token, colour in zip(tokens, colours(len(tokens), matched), strict=True):
            text = self._stream.step(self._tokenizer, token)
            if text:
                yield text, colour


def _tokens(chunk: Any) -> list[int]:
    """What a step of the target brought; none in chunks of another kind."""
    extra = chunk.choices[0].model_extra if chunk.choices else None
    return list((extra or {}).get("token_ids") or [])


def _prompt_tokens(chunk: Any) -> list[int]:
    """What was asked, which comes with the first chunk."""
    return list((chunk.model_extra or {}).get("prompt_token_ids") or [])


def converse(conversation: Conversation, console: Console, read: Callable[[], str]) -> None:
    """Answer what is said until there is no more (Ctrl-D).

    Args:
        conversation: with the server.
        console: the same as its.
        read: asks for a message; raises EOFError at the end.
    """
    while True:
        try:
            said = read().strip()
            if said == NEW:
                conversation.forget()
                console.print("what was said is forgotten", style="dim")
            elif said:
                conversation.answer(said)
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print(f"\nCtrl-D ends the chat, {NEW} begins another one", style="dim")
