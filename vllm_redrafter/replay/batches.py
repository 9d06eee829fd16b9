# SPDX-License-Identifier: Apache-2.0
"""Rows of text as the target reads them: one after the other in blocks, which form batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from vllm_redrafter.data.rows import TextRow, TextRows


@dataclass(frozen=True)
class TextBatch:
    """B blocks of T tokens, each with one row or several, one after the other.

    Attributes:
        tokens: [B, T] int64; padding, at a block's end, is token 0.
        generated: [B, T] bool; False on padding.
        positions: [B, T] int64, from 0 in each row, which keep the rows of a block apart.
        hidden: [B, T, H] or None, as in TextRow.
    """

    tokens: Tensor
    generated: Tensor
    positions: Tensor
    hidden: Tensor | None = None

    @classmethod
    def of(cls, blocks: Sequence[Sequence[TextRow]], min_length: int = 0) -> Self:
        """Put each block's rows one after the other, and pad to the longest or `min_length`."""
        whole = [_joined(rows) for rows in blocks]
        length = max(min_length, *(len(block["tokens"]) for block in whole))
        padded = {
            name: torch.stack([_padded(block[name], length) for block in whole])
            for name in whole[0]
        }
        return cls(**padded)

    def to(self, device: torch.device | str) -> Self:
        there = {name: v.to(device) for name, v in vars(self).items() if v is not None}
        return replace(self, **there)


def _joined(rows: Sequence[TextRow]) -> dict[str, Tensor]:
    """A block's tensors by the names of TextBatch, not padded yet."""
    block = {
        "tokens": torch.cat([row.tokens for row in rows]),
        "generated": torch.cat([row.generated for row in rows]),
        "positions": torch.cat([torch.arange(len(row.tokens)) for row in rows]),
    }
    hidden = [row.hidden for row in rows if row.hidden is not None]
    return {**block, "hidden": torch.cat(hidden)} if len(hidden) == len(rows) else block


def _padded(block: Tensor, length: int) -> Tensor:
    padding = block.new_zeros(length - len(block), *block.shape[1:])
    return torch.cat([block, padding])


def batches_by_length(
    rows: TextRows, batch_size: int, device: torch.device | str, min_length: int = 0
) -> Iterator[TextBatch]:
    """All rows, those of about the same length together."""
    order = rows.lengths.argsort().tolist()
    for start in range(0, len(order), batch_size):
        chunk = [[rows[index]] for index in order[start : start + batch_size]]
        yield TextBatch.of(chunk, min_length).to(device)
