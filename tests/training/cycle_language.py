"""A language whose every continuation is known: one word, repeated for ever."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

WORD = [0, 1, 0, 2, 0, 3, 1, 4, 4, 2]
"""No token tells where in the word it stands: only the target's hidden state does."""

VOCAB_SIZE = 5
HIDDEN_SIZE = 16


class CycleTarget(nn.Module):
    """A target that knows the language perfectly; its hidden state encodes the place in WORD.

    Texts are told apart by their first token's place, which a test gives as `places`.
    """

    def __init__(self, confidence: float = 30.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.confidence = confidence
        self.embedding = nn.Embedding(VOCAB_SIZE, HIDDEN_SIZE)
        self.embedding.weight.data = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator)
        self.place_codes = torch.randn(len(WORD), HIDDEN_SIZE, generator=generator)
        self.requires_grad_(False)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def forward(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        places = (first_places(input_ids) + torch.arange(input_ids.shape[1])) % len(WORD)
        following = torch.tensor(WORD)[(places + 1) % len(WORD)]
        logits = nn.functional.one_hot(following, VOCAB_SIZE) * self.confidence
        return SimpleNamespace(hidden_states=(self.place_codes[places],), logits=logits)


def texts(num: int, length: int) -> Tensor:
    """[num, length] tokens; row r starts at place r of WORD."""
    places = (torch.arange(num).unsqueeze(1) + torch.arange(length)) % len(WORD)
    return torch.tensor(WORD)[places]


def first_places(tokens: Tensor) -> Tensor:
    """[B, 1]: the place in WORD that a text of at least len(WORD) tokens starts from."""
    starts = texts(len(WORD), len(WORD))
    matches = (tokens[:, None, : len(WORD)] == starts).all(dim=2)
    return matches.int().argmax(dim=1, keepdim=True)
