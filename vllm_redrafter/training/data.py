"""Text that the target wrote, as training and evaluation read it: rows, batches, packing."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vllm_redrafter.config import ConfigError

OPEN_BLOCKS = 64
"""So many blocks wait for a row that fits while rows are packed: enough to fill them well."""


@dataclass(frozen=True)
class TextRow:
    """One conversation, or a part of it.

    Attributes:
        tokens: [T] int64.
        generated: [T] bool, True where the target wrote the token; prompts are context, and
            nothing is learnt or measured from predicting them. The first token is a prompt's.
        top_tokens: [T, k] int64, the target's k most probable tokens at each generated one, -1
            elsewhere; None where the data has none.
        top_log_probs: [T, k] float32, theirs.
    """

    tokens: Tensor
    generated: Tensor
    top_tokens: Tensor | None = None
    top_log_probs: Tensor | None = None

    @classmethod
    def from_answer(cls, prompt: Sequence[int], answer: Sequence[int]) -> TextRow:
        """A prompt and what the target answered."""
        tokens = torch.tensor([*prompt, *answer], dtype=torch.int64)
        return cls(tokens, torch.arange(len(tokens)) >= len(prompt))


class TextRows(Protocol):
    """Rows by number, with their lengths at hand."""

    @property
    def lengths(self) -> np.ndarray: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> TextRow: ...


class ListRows(list[TextRow]):
    """Rows in memory."""

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(row.tokens) for row in self])


class DatasetRows:
    """Rows of a dataset that `generate-data` wrote, read from disk when they are asked for.

    Args:
        dataset: a `datasets.Dataset` with the columns of `training/dataset.py`.
        indices: which rows, in order.
        max_length: rows are cut behind so many tokens.
    """

    def __init__(self, dataset: Any, indices: Sequence[int], max_length: int) -> None:
        import pyarrow.compute as pc

        self.dataset, self.indices, self.max_length = dataset, list(indices), max_length
        whole = pc.list_value_length(dataset.data.column("input_ids")).to_numpy()
        whole = whole[np.asarray(self.indices, dtype=np.int64)]
        self.num_cut = int((whole > max_length).sum())
        self._lengths = np.minimum(whole, max_length)

    @property
    def lengths(self) -> np.ndarray:
        return self._lengths

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int, /) -> TextRow:
        values = self.dataset[self.indices[index]]
        kept = slice(self.max_length)
        tokens = torch.tensor(values["input_ids"][kept], dtype=torch.int64)
        generated = torch.tensor(values["assistant_mask"][kept], dtype=torch.bool)
        if "top_tokens" not in values:
            return TextRow(tokens, generated)
        top_tokens = _rectangle(values["top_tokens"][kept], -1, torch.int64)
        top_log_probs = _rectangle(values["top_log_probs"][kept], -torch.inf, torch.float32)
        return TextRow(tokens, generated, top_tokens, top_log_probs)


def _rectangle(ragged: Sequence[Sequence[float]], padding: float, dtype: torch.dtype) -> Tensor:
    parts = [torch.tensor(values, dtype=dtype) for values in ragged]
    return pad_sequence(parts, batch_first=True, padding_value=padding)


@dataclass(frozen=True)
class TextBatch:
    """Rows side by side, and one behind another: B blocks of T tokens.

    Attributes:
        tokens: [B, T] int64; padding, at a block's end, is token 0.
        generated: [B, T] bool; False on padding.
        positions: [B, T] int64, from 0 in each row; a target that is given them keeps the rows
            of a block apart (transformers' packed sequences).
        top_tokens: [B, T, k] int64 or None, as in TextRow.
        top_log_probs: [B, T, k] float32 or None.
    """

    tokens: Tensor
    generated: Tensor
    positions: Tensor
    top_tokens: Tensor | None = None
    top_log_probs: Tensor | None = None

    @classmethod
    def of(cls, blocks: Sequence[Sequence[TextRow]], min_length: int = 0) -> TextBatch:
        """Pack each block's rows one behind another; blocks are padded to the longest.

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
        tops = [(row.top_tokens, row.top_log_probs) for rows in blocks for row in rows]
        if any(tokens is None for tokens, _ in tops):
            return batch
        width = max(tokens.shape[1] for tokens, _ in tops if tokens is not None)
        return replace(
            batch,
            top_tokens=_padded([[_wide(r.top_tokens, width, -1) for r in b] for b in blocks], -1),
            top_log_probs=_padded(
                [[_wide(r.top_log_probs, width, -torch.inf) for r in b] for b in blocks],
                -torch.inf,
            ),
        )

    def to(self, device: torch.device | str) -> TextBatch:
        """The same on another device."""
        values = (None if v is None else v.to(device) for v in vars(self).values())
        return TextBatch(*values)  # type: ignore[arg-type]


def _padded(blocks: Sequence[Sequence[Tensor]], padding: float) -> Tensor:
    whole = [torch.cat(list(parts)) for parts in blocks]
    return pad_sequence(whole, batch_first=True, padding_value=padding)


def _like(row: TextRow, other: TextRow) -> TextRow:
    """With top tokens if the other row has them: none, at each token."""
    if other.top_tokens is None:
        return row
    none = torch.full((len(row.tokens), 1), -1)
    return TextRow(row.tokens, row.generated, none, torch.full(none.shape, -torch.inf))


def _wide(values: Tensor | None, width: int, padding: float) -> Tensor:
    """[T, k] made [T, width]."""
    assert values is not None
    return torch.nn.functional.pad(values, (0, width - values.shape[1]), value=padding)


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
        """How many steps so many epochs have."""
        return sum(len(self.epoch(number)) for number in range(epochs))

    def steps(self, first: int = 0) -> Iterator[list[list[int]]]:
        """Steps without end, epoch after epoch, from step `first` on."""
        number = 0
        while True:
            epoch = self.epoch(number)
            yield from epoch[first:]
            first, number = max(first - len(epoch), 0), number + 1
