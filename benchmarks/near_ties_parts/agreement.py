"""Which answers are the reference's, and how probable the target finds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Tokens = list[int]


@dataclass(frozen=True)
class Agreement:
    """One way to decode the prompts, in one dtype, beside the reference.

    Attributes:
        dtype: of the engine.
        method: how it decodes.
        in_flight: requests at once.
        equal: answers that are the reference's, token by token.
        answers: how many there are.
        log_probability: of a token under the target, the mean over all answers' tokens.
    """

    dtype: str
    method: str
    in_flight: int
    equal: int
    answers: int
    log_probability: float


class Judge:
    """Says how probable the target finds an answer, in float32; each one is read once.

    Args:
        model: the target, a causal language model of transformers.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._known: dict[tuple[int, ...], float] = {}

    def mean(self, prompts: Sequence[Tokens], answers: Sequence[Tokens]) -> float:
        """The mean log-probability of a token of the answers, given what comes before it."""
        total = sum(self._sum(*pair) for pair in zip(prompts, answers, strict=True))
        return total / sum(map(len, answers))

    def _sum(self, prompt: Tokens, answer: Tokens) -> float:
        key = (len(prompt), *prompt, *answer)
        if key not in self._known:
            self._known[key] = float(_log_probabilities(self._model, prompt, answer).sum())
        return self._known[key]


@torch.inference_mode()
def _log_probabilities(model: Any, prompt: Tokens, answer: Tokens) -> Tensor:
    """[answer], each token's."""
    tokens = torch.tensor([[*prompt, *answer]])
    logits = model(input_ids=tokens).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(dim=-1).gather(1, tokens[0, len(prompt) :, None])[:, 0]
