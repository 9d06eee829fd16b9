# SPDX-License-Identifier: Apache-2.0
"""Text that the target wrote, row by row: kept in memory, or read from disk when needed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Row:
    """A row of T tokens as it is written; `dataset.py` describes the columns."""

    conversation: int
    input_ids: list[int]
    assistant_mask: list[bool]


@dataclass(frozen=True)
class TextRow:
    """A row of T tokens to learn from, or to measure on.

    Attributes:
        tokens: [T] int64.
        generated: [T] bool, True where the target wrote the token. The others (the first token is
            one) are context: nothing is learnt or measured from predicting them.
        hidden: [T, H], the target's last hidden states if captured; that of the last token is 0.
    """

    tokens: Tensor
    generated: Tensor
    hidden: Tensor | None = None


class TextRows(Protocol):
    """Rows by number; their lengths are known without reading them."""

    lengths: np.ndarray

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> TextRow: ...


class ListRows(list[TextRow]):
    """Rows in memory."""

    def __init__(self, rows: Iterable[TextRow] = ()) -> None:
        super().__init__(rows)
        self.lengths = np.array([len(row.tokens) for row in self])


class DatasetRows:
    """Those rows of a `datasets.Dataset` that `indices` names, read when they are asked for.

    They are cut to `max_length` tokens.
    """

    def __init__(self, dataset: Any, indices: Sequence[int], max_length: int) -> None:
        self.dataset, self.indices, self.max_length = dataset, list(indices), max_length
        whole = row_lengths(dataset)[np.asarray(self.indices, dtype=np.int64)]
        self.num_cut = int((whole > max_length).sum())
        self.lengths = np.minimum(whole, max_length)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int, /) -> TextRow:
        values = self.dataset[self.indices[index]]
        kept = slice(self.max_length)
        tokens = torch.tensor(values["input_ids"][kept], dtype=torch.int64)
        generated = torch.tensor(values["assistant_mask"][kept], dtype=torch.bool)
        return TextRow(tokens, generated)


def row_lengths(dataset: Any) -> np.ndarray:
    """[rows], of all rows of a `datasets.Dataset` in tokens."""
    import pyarrow.compute as pc  # here: a Mac that only decodes may lack it

    lengths: np.ndarray = pc.list_value_length(dataset.data.column("input_ids")).to_numpy()
    return lengths
