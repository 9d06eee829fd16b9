# SPDX-License-Identifier: Apache-2.0
"""Rows of text as the target reads them: one after the other in blocks, which form batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vllm_redrafter.data.rows import TextRow, TextRows


@dataclass(frozen=True)
class TextBatch:
    """B blocks of T tokens, each with one row or several, one after the other.

    Attributes:
        tokens: [B, T] int64; padding, at a block's end, is token 0.
        generated: [B, T] bool; False on padding.
        positions: [B, T] int64, from 0 in each row; a target that is given them keeps the rows
            of a block apart (transformers' packed sequences).
        hidden: [B, T, H] or None, as in TextRow.
    """

    tokens: Tensor
    generated: Tensor
    positions: Tensor
    hidden: Tensor | None = None

    @classmethod
    def of(cls, blocks: Sequence[Sequence[TextRow]], min_length: int = 0) -> TextBatch:
        """Put each block's rows one after the other; blocks are padded to the longest.

        Args:
            blocks: per block, its rows.
            min_length: T is at least this.
        """
        lengths = [sum(len(row.tokens) for row in rows) for rows in blocks]
        if max(lengths) < min_length:
            missing = min_length - lengths[0]
            padding = TextRow(torch.zeros(missing).long(), torch.zeros(missing).bool())
            blocks = [[*blocks[0], _like(padding, blocks[0][0])], *blocks[1:]]
        positions = [[torch.arange(len(row.tokens)) for row in rows] for rows in blocks]
        batch = cls(
            _padded([[row.tokens for row in rows] for rows in blocks], 0),
            _padded([[row.generated for row in rows] for rows in blocks], False),
            _padded(positions, 0),
        )
        if all(row.hidden is not None for rows in blocks for row in rows):
            batch = replace(batch, hidden=_padded([[_hidden(r) for r in b] for b in blocks], 0))
        return batch

    def to(self, device: torch.device | str) -> TextBatch:
        """The same on another device."""
        values = (None if v is None else v.to(device) for v in vars(self).values())
        return TextBatch(*values)  # type: ignore[arg-type]


def _padded(blocks: Sequence[Sequence[Tensor]], padding: float) -> Tensor:
    whole = [torch.cat(list(parts)) for parts in blocks]
    return pad_sequence(whole, batch_first=True, padding_value=padding)


def _hidden(row: TextRow) -> Tensor:
    assert row.hidden is not None
    return row.hidden


def _like(row: TextRow, other: TextRow) -> TextRow:
    """The row, with hidden states of 0 where the other has some."""
    if other.hidden is None:
        return row
    shape = (len(row.tokens), other.hidden.shape[1])
    return replace(row, hidden=other.hidden.new_zeros(shape))


def batches_by_length(
    rows: TextRows, batch_size: int, device: torch.device | str, min_length: int = 0
) -> Iterator[TextBatch]:
    """All rows, those of about the same length together."""
    order = rows.lengths.argsort().tolist()
    for start in range(0, len(order), batch_size):
        chunk = [[rows[index]] for index in order[start : start + batch_size]]
        yield TextBatch.of(chunk, min_length).to(device)
