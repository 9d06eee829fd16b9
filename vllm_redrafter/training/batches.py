"""How training and evaluation read rows: rows are packed into blocks, blocks form batches, and
batches form the steps of a run."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vllm_redrafter.data.rows import TextRow, TextRows
from vllm_redrafter.utils.errors import ConfigError

OPEN_BLOCKS = 64
"""While rows are packed, at most this many blocks are kept open for a further row that fits in:
enough to fill them well."""


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


def pack(lengths: Sequence[int], order: Sequence[int], capacity: int) -> list[list[int]]:
    """Put rows into blocks of at most `capacity` tokens, each row into the fullest that has room.

    Args:
        lengths: of all rows, none above the capacity.
        order: the rows to pack, in the order in which they come.
        capacity: of a block, in tokens.

    Returns:
        Per block, its rows.
    """
    blocks: list[list[int]] = []
    room: list[tuple[int, int]] = []  # of open blocks: (tokens left, block), ascending
    for row in order:
        length = int(lengths[row])
        place = bisect.bisect_left(room, (length, -1))
        if place < len(room):
            left, block = room.pop(place)
        else:
            left, block = capacity, len(blocks)
            blocks.append([])
            if len(room) == OPEN_BLOCKS:
                room.pop(0)  # the fullest
        blocks[block].append(row)
        bisect.insort(room, (left - length, block))
    return blocks


class BatchPlan:
    """Which rows each optimizer step reads.

    It follows from the lengths, the sizes and the seed alone: every process finds the same plan,
    and training can start at any step.

    Args:
        lengths: of all rows.
        block_length: tokens in a block.
        batch_size: blocks in a step.
        seed: of the order of the rows, which differs from epoch to epoch.

    Raises:
        ConfigError: there are no rows.
    """

    def __init__(self, lengths: np.ndarray, block_length: int, batch_size: int, seed: int) -> None:
        if not len(lengths):
            raise ConfigError("training: there is no text to draw batches from")
        self.lengths, self.block_length = lengths.tolist(), block_length
        self.batch_size, self.seed = batch_size, seed

    def epoch(self, number: int) -> list[list[list[int]]]:
        """Per step, per block, its rows; blocks that fill no whole step are left out, unless
        there are no others."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        blocks = pack(self.lengths, order, self.block_length)
        order = torch.randperm(len(blocks), generator=generator).tolist()
        size = min(self.batch_size, len(blocks))
        steps = [order[i : i + size] for i in range(0, len(blocks) - size + 1, size)]
        return [[blocks[block] for block in step] for step in steps]

    def num_steps(self, epochs: int) -> int:
        """The number of steps in this many epochs."""
        return sum(len(self.epoch(number)) for number in range(epochs))

    def steps(self, first: int = 0) -> Iterator[list[list[int]]]:
        """Steps without end, epoch after epoch, from step `first` on."""
        number = 0
        while True:
            epoch = self.epoch(number)
            yield from epoch[first:]
            first, number = max(first - len(epoch), 0), number + 1


def batches_by_length(
    rows: TextRows, batch_size: int, device: torch.device | str, min_length: int = 0
) -> Iterator[TextBatch]:
    """All rows, those of about the same length together."""
    order = rows.lengths.argsort().tolist()
    for start in range(0, len(order), batch_size):
        chunk = [[rows[index]] for index in order[start : start + batch_size]]
        yield TextBatch.of(chunk, min_length).to(device)
