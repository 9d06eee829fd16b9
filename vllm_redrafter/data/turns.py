# SPDX-License-Identifier: Apache-2.0
"""From conversations to turns that the target answers, and from its answers to rows of data."""

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vllm_redrafter.data.chat_template import ChatTemplate
from vllm_redrafter.data.conversation_rows import Conversation, UnusableRow, shortened
from vllm_redrafter.data.rows import Row
from vllm_redrafter.data.settings import SamplingSettings
from vllm_redrafter.data.target import EmbeddedTokens
from vllm_redrafter.utils.errors import ConfigError


@dataclass(frozen=True)
class OpenTurn:
    """A conversation's turn, by number, that waits for the target's answer to `prompt`, token ids.

    `stop_token` ends the answer, as EOS does.
    """

    conversation: int
    turn: int
    prompt: list[int]
    max_tokens: int
    seed: int
    stop_token: int | None = None


@dataclass(frozen=True)
class TurnAnswer:
    """What the target wrote: token ids, with an EOS where it `ended`, else `max_tokens` of them."""

    conversation: int
    tokens: list[int]
    ended: bool


class TargetEngine(Protocol):
    """Lets the target write answers: with vLLM in this process (`offline/`), or with servers."""

    max_model_len: int
    """The most tokens of a prompt and its answer together."""

    in_flight: int
    """How many conversations it works on at once."""

    def answers(self, waiting: deque[OpenTurn]) -> Iterator[TurnAnswer]:
        """Yield answers as they are finished, until `waiting` is empty and no turn is in flight.

        The caller adds to `waiting` between two answers.
        """

    def close(self) -> None:
        """Stop the engine and its processes."""


class PromptRenderer:
    """Writes a conversation as the target expects it: by its chat template, or as plain text.

    `system_prompt` is for conversations without their own; ConfigError where no template can
    express it.
    """

    def __init__(
        self, tokenizer: Any, embedded: EmbeddedTokens, system_prompt: str | None = None
    ) -> None:
        self._tokenizer, self._embedded = tokenizer, embedded
        self._system_prompt = system_prompt
        self._template = ChatTemplate(tokenizer) if tokenizer.chat_template else None
        if system_prompt is not None and self._template is None:
            raise ConfigError(
                "--system-prompt: the target's tokenizer has no chat template that could express "
                "it; leave it out, or write it into the prompts"
            )

    def check(self, conversation: Conversation) -> None:
        """Raise an UnusableRow now for a conversation that could not be written later."""
        some_answers = ["answer"] * (len(conversation.turns) - 1)
        if self._template is None and (some_answers or conversation.system is not None):
            raise UnusableRow(
                conversation.source,
                "that only a chat template could express",
                f"a conversation of {len(conversation.turns)} user turns"
                f"{' and a system message' if conversation.system else ''}, but the target's "
                "tokenizer has no chat template: give prompts of one turn, or a tokenizer with "
                "a chat template",
            )
        if not self._embedded.are_all:
            self.prompt(conversation, some_answers)
        elif self._template and not self._rendered(conversation, some_answers, tokenize=False):
            # Other texts are not tokenized now: it takes long, and hardly any has no tokens.
            raise _without_tokens(conversation)

    def prompt(self, conversation: Conversation, answers: Sequence[str]) -> list[int]:
        """Token ids up to where the next answer begins, given those before it.

        UnusableRow: the chat template refuses the conversation, nothing comes of it, or the target
        has no embedding of one of the tokens.
        """
        tokens = list(self._rendered(conversation, answers, tokenize=True))
        if not tokens:
            raise _without_tokens(conversation)
        if trouble := self._embedded.trouble(tokens):
            raise UnusableRow(conversation.source, "with a token that has no embedding", trouble)
        return tokens

    def _rendered(self, conversation: Conversation, answers: Sequence[str], tokenize: bool) -> Any:
        if self._template is None:
            return self._tokenizer(conversation.turns[0])["input_ids"]
        try:
            return self._template.apply(self._messages(conversation, answers), tokenize)
        except ConfigError as error:
            kind = "that the target's chat template refuses"
            raise UnusableRow(conversation.source, kind, str(error)) from error

    def _messages(self, conversation: Conversation, answers: Sequence[str]) -> list[dict[str, str]]:
        """What has been said before the next answer, as chat templates take it."""
        messages = []
        if system := conversation.system or self._system_prompt:
            messages.append({"role": "system", "content": system})
        for turn, said in enumerate(conversation.turns[: len(answers) + 1]):
            messages.append({"role": "user", "content": said})
            messages += [{"role": "assistant", "content": a} for a in answers[turn : turn + 1]]
        return messages

    def text(self, answer: Sequence[int]) -> str:
        """An answer as a message's content."""
        return str(self._tokenizer.decode(answer, skip_special_tokens=True))


class Dialogue:
    """A conversation while it is being written, turn after turn.

    A row goes on as long as a turn's prompt begins with exactly the tokens so far, answers
    included. A new row begins where a chat template rewrites what was said before, or an answer's
    text has other tokens than those that were drawn.

    Attributes:
        truncated: turns or tokens are missing, because `max_model_len` was reached.
        trouble: why the next turn cannot be asked, which ends the conversation; or None.
        cut_answers: answers that reached `max_tokens`.
    """

    def __init__(
        self,
        index: int,
        conversation: Conversation,
        renderer: PromptRenderer,
        sampling: SamplingSettings,
        max_model_len: int,
    ) -> None:
        self.index = index
        self.truncated = False
        self.trouble: UnusableRow | None = None
        self.cut_answers = 0
        self._conversation, self._renderer = conversation, renderer
        self._sampling, self._max_model_len = sampling, max_model_len
        self._answers: list[str] = []
        self._rows: list[Row] = []
        self._row: Row | None = None

    def next_turn(self) -> OpenTurn | None:
        """The turn that the target has to answer next; None when the conversation is over."""
        turn = len(self._answers)
        if self.truncated or turn == len(self._conversation.turns):
            return None
        try:
            prompt = self._renderer.prompt(self._conversation, self._answers)
        except UnusableRow as error:
            self.trouble = error
            return None
        room = self._max_model_len - len(prompt)
        if room < 1:
            self.truncated = True
            return None
        self._append_prompt(prompt)
        max_tokens = min(self._sampling.max_tokens, room)
        seed = answer_seed(self._sampling.seed, self.index, turn)
        return OpenTurn(self.index, turn, prompt, max_tokens, seed)

    def take(self, answer: TurnAnswer) -> None:
        """Add the target's answer to the last turn."""
        row = self._row
        assert row is not None
        self._append(row, answer.tokens, True)
        self._answers.append(self._renderer.text(answer.tokens))
        if not answer.ended:
            self.truncated = len(row.input_ids) >= self._max_model_len
            self.cut_answers += not self.truncated

    def rows(self) -> list[Row]:
        """Empty where the first prompt was too long already."""
        return self._rows + ([self._row] if self._row is not None else [])

    def _append_prompt(self, prompt: list[int]) -> None:
        """Make the row end with the prompt: by appending to it where possible."""
        if self._row is not None:
            known = len(self._row.input_ids)
            if prompt[:known] == self._row.input_ids:
                self._append(self._row, prompt[known:], False)
                return
            self._rows.append(self._row)
        self._row = Row(self.index, [], [])
        self._append(self._row, prompt, False)

    @staticmethod
    def _append(row: Row, tokens: list[int], generated: bool) -> None:
        row.input_ids.extend(tokens)
        row.assistant_mask.extend([generated] * len(tokens))


def _without_tokens(conversation: Conversation) -> UnusableRow:
    # The first token of a sequence is never predicted, so an answer cannot begin there.
    said = shortened(conversation.turns[0])
    detail = f"the prompt {said} has no tokens, and the tokenizer adds none (such as BOS)"
    return UnusableRow(conversation.source, "without tokens", detail)


def answer_seed(seed: int, conversation: int, turn: int) -> int:
    """The seed of one answer, so that it does not depend on which others are written: 63 bits."""
    text = f"{seed} {conversation} {turn}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8]) >> 1
