"""Blocks of tokens: what the trainer and the estimator read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vllm_redrafter.config import ConfigError

SORTED_BATCHES = 16
"""So many batches are drawn at random, then sorted by length among themselves."""


@dataclass(frozen=True)
class TokenBlocks:
    """Sequences of one length, with the part that the target wrote marked.

    Attributes:
        tokens: [N, T] int64; what stands outside the sequence (padding) is any valid token.
        generated: [N, T] bool, True where the target wrote the token: prompts and padding are
            context, and nothing is learnt or measured from predicting them.

    Raises:
        ConfigError: the two shapes differ, or are not [N, T].
    """

    tokens: Tensor
    generated: Tensor

    def __post_init__(self) -> None:
        if self.tokens.ndim != 2 or self.tokens.shape != self.generated.shape:
            raise ConfigError(
                "token blocks: tokens and generated must both be [N, T], got "
                f"{list(self.tokens.shape)} and {list(self.generated.shape)}"
            )

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def __getitem__(self, rows: slice | Tensor) -> TokenBlocks:
        return TokenBlocks(self.tokens[rows], self.generated[rows])

    def batches(self, batch_size: int) -> Iterator[TokenBlocks]:
        """The blocks in order, `batch_size` at a time; the last batch may be smaller."""
        for start in range(0, len(self), batch_size):
            yield self[start : start + batch_size]

    def trimmed(self) -> TokenBlocks:
        """Without the columns after the last generated token of all blocks."""
        length = int(self.lengths.amax()) if len(self) else 0
        return TokenBlocks(self.tokens[:, :length], self.generated[:, :length])

    @property
    def lengths(self) -> Tensor:
        """[N]: tokens up to a block's last generated one, which is all that matters of it."""
        index = torch.arange(1, self.tokens.shape[1] + 1, device=self.tokens.device)
        return (index * self.generated).amax(dim=1)

    def shuffled_batches(
        self, batch_size: int, generator: torch.Generator
    ) -> Iterator[TokenBlocks]:
        """Batches without end, each pass over the blocks in a new order.

        Blocks of about the same length share a batch, which is trimmed to the longest of them.

        Raises:
            ConfigError: there are no blocks.
        """
        if not len(self):
            raise ConfigError("token blocks: there are none to draw batches from")
        lengths = self.lengths
        whole = max(len(self) // batch_size, 1) * batch_size
        while True:
            order = torch.randperm(len(self), generator=generator)[:whole]
            windows = torch.split(order, SORTED_BATCHES * batch_size)
            batches = [
                rows
                for window in windows
                for rows in torch.split(window[lengths[window].argsort()], batch_size)
            ]
            for index in torch.randperm(len(batches), generator=generator).tolist():
                yield self[batches[index]].trimmed()

    @classmethod
    def from_answers(
        cls, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
    ) -> TokenBlocks:
        """Prompts with the target's answers, padded at the end to the longest of them."""
        lengths = [len(p) + len(a) for p, a in zip(prompts, answers, strict=True)]
        tokens = torch.zeros(len(lengths), max(lengths, default=0), dtype=torch.int64)
        generated = torch.zeros_like(tokens, dtype=torch.bool)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            tokens[row, : lengths[row]] = torch.tensor([*prompt, *answer], dtype=torch.int64)
            generated[row, len(prompt) : lengths[row]] = True
        return cls(tokens, generated)

    def save(self, path: Path) -> None:
        """Write a safetensors file."""
        save_file({"tokens": self.tokens.int(), "generated": self.generated}, path)

    @classmethod
    def load(cls, path: Path) -> TokenBlocks:
        """Read what `save` wrote.

        Raises:
            ConfigError: the file is missing, or holds something else.
        """
        try:
            tensors = load_file(path)
            return cls(tensors["tokens"].long(), tensors["generated"].bool())
        except (OSError, SafetensorError, KeyError) as error:
            raise ConfigError(f"{path}: not a file of token blocks: {error}") from error
