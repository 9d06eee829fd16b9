"""The conversation with a server that tells an answer's text, and not the tokens of its steps."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from rich.text import Text

from vllm_redrafter.cli.chat.conversation import Answer, Conversation

UNTINTED = (
    "mlx-lm's server does not tell which tokens were drafted: nothing is tinted, and there is no "
    "rate per step"
)


class UntintedConversation(Conversation):
    """As the other one; shows the text as it comes, without colours."""

    def _show(self, chunks: Iterable[Any], given: Answer) -> None:
        given.knows_steps = False
        try:
            for chunk in chunks:
                text = (chunk.choices[0].delta.content if chunk.choices else None) or ""
                if text:
                    given.ended = time.perf_counter()
                    given.began = given.began or given.ended
                    given.text += text
                    self._console.print(Text(text), end="", soft_wrap=True)
        finally:  # Ctrl-C too
            tokens = self._tokenizer(given.text, add_special_tokens=False)["input_ids"]
            given.steps = [1, len(tokens) - 1] if tokens else []
