# SPDX-License-Identifier: Apache-2.0
"""A target that answers without a model: what it says depends on the request and nothing else."""

import random
from collections import deque
from collections.abc import Iterator
from typing import Any

from vllm_redrafter.data.settings import GenerationSettings
from vllm_redrafter.data.turns import OpenTurn, TurnAnswer

WORDS = ["value", "name", "list", "7", "49", "value 3"]

APPENDING = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
"""A chat template that leaves what was said as it was."""

REWRITING = APPENDING.replace("m['content']", "m['content'].split(' ')[-1]")
"""One that shortens messages to their last word, as others do with an answer's thoughts."""


class Killed(BaseException):
    """Nothing in the program catches it, as nothing can catch `kill -9`."""


class FakeEngine:
    """Answers of a few words, finished in random order; remembers what it was asked."""

    def __init__(
        self,
        tokenizer: Any,
        settings: GenerationSettings,
        max_model_len: int = 512,
        order: int = 0,
        answers_until_killed: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.settings, self.in_flight = settings, settings.in_flight
        self.max_model_len = max_model_len
        self.order = random.Random(order)
        self.left = answers_until_killed
        self.asked: list[tuple[OpenTurn, TurnAnswer]] = []
        self.most_in_flight = 0
        self.closed = False

    def answers(self, waiting: deque[OpenTurn]) -> Iterator[TurnAnswer]:
        running: list[OpenTurn] = []
        while waiting or running:
            running.extend(waiting)
            waiting.clear()
            self.most_in_flight = max(self.most_in_flight, len(running))
            request = running.pop(self.order.randrange(len(running)))
            if self.left is not None and len(self.asked) == self.left:
                raise Killed
            answer = self.answer(request)
            self.asked.append((request, answer))
            yield answer

    def answer(self, request: OpenTurn) -> TurnAnswer:
        assert len(request.prompt) + request.max_tokens <= self.max_model_len
        rng = random.Random(f"{request.prompt} {request.seed}")
        text = " ".join(rng.choices(WORDS, k=rng.randrange(1, 6)))
        whole = [*self.tokenizer(text)["input_ids"], self.tokenizer.eos_token_id]
        tokens = whole[: request.max_tokens]
        return TurnAnswer(request.conversation, tokens, ended=len(tokens) == len(whole))

    def close(self) -> None:
        self.closed = True
