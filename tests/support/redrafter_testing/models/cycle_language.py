# SPDX-License-Identifier: Apache-2.0
"""A language whose every continuation is known: one word, repeated for ever."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from vllm_redrafter.data.rows import ListRows, TextRow

WORD = [0, 1, 0, 2, 0, 3, 1, 4, 4, 2]
"""No token tells where in the word it stands: only the target's hidden state does."""

VOCAB_SIZE = 8
HIDDEN_SIZE = 16


class CycleTarget(nn.Module):
    """Knows the language: a hidden state encodes the place in WORD, which a row's start tells."""

    def __init__(self, confidence: float = 30.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.embedding = nn.Embedding(VOCAB_SIZE, HIDDEN_SIZE)
        self.embedding.weight.data = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator)
        self.place_codes = torch.linalg.qr(
            torch.randn(HIDDEN_SIZE, HIDDEN_SIZE, generator=generator)
        ).Q[: len(WORD)]
        self.lm_head = nn.Linear(HIDDEN_SIZE, VOCAB_SIZE, bias=False)
        following = torch.tensor(WORD).roll(-1)
        one_hot = nn.functional.one_hot(following, VOCAB_SIZE).float()
        self.lm_head.weight.data = confidence * one_hot.T @ self.place_codes
        sizes = SimpleNamespace(vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE)
        self.config = SimpleNamespace(get_text_config=lambda: sizes, name_or_path="cycle")
        self.dtype = torch.float32
        self.requires_grad_(False)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def base_model(self, input_ids: Tensor, position_ids: Tensor | None = None, **_: Any) -> Any:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        starts = (torch.arange(input_ids.shape[1]) - position_ids).clamp(min=0)
        first = _first_places(input_ids)
        places = (first.gather(1, starts) + position_ids) % len(WORD)
        return SimpleNamespace(last_hidden_state=self.place_codes[places])

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        return SimpleNamespace(logits=self.lm_head(self.base_model(input_ids).last_hidden_state))


def texts(num: int, length: int) -> Tensor:
    """[num, length] tokens; row r starts at place r of WORD."""
    places = (torch.arange(num).unsqueeze(1) + torch.arange(length)) % len(WORD)
    return torch.tensor(WORD)[places]


def rows(num: int = 20, length: int = 36, prompt: int = 5) -> ListRows:
    """Answers after prompts; the default length is a whole number of steps of five tokens."""
    return ListRows(
        TextRow(tokens, torch.arange(length) >= prompt) for tokens in texts(num, length)
    )


def _first_places(tokens: Tensor) -> Tensor:
    """[B, T]: the place in WORD that a row starts from, if it starts here; 0 for no such row."""
    padded = nn.functional.pad(tokens, (0, len(WORD)), value=-1)
    windows = padded.unfold(1, len(WORD), 1)[:, : tokens.shape[1]]
    starts = texts(len(WORD), len(WORD))
    return (windows.unsqueeze(2) == starts).all(dim=3).int().argmax(dim=2)
