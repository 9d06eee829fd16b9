# SPDX-License-Identifier: Apache-2.0
"""Are the rows of training data what the columns promise? Nothing later looks before it indexes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

ROWS_AT_ONCE = 1000


def first_broken_row(table: Any, vocab_size: int) -> tuple[int, str] | None:
    """The first row in which something is wrong.

    Args:
        table: a table of pyarrow with the columns `dataset.COLUMNS`; it is read once, from
            front to back, and may be larger than the memory.
        vocab_size: of the target: token ids are below it.

    Returns:
        (the number of the row, what is wrong with it), or None.
    """
    start = 0
    for batch in table.to_batches(max_chunksize=ROWS_AT_ONCE):
        broken = [
            (int(rows.argmax()), what) for rows, what in _findings(batch, vocab_size) if rows.any()
        ]
        if broken:
            row, what = min(broken)
            return start + row, what
        start += batch.num_rows
    return None


def _findings(batch: Any, vocab_size: int) -> Iterator[tuple[Any, str]]:
    """(which rows of the batch have it, what it is)."""
    ids, mask = batch.column("input_ids"), batch.column("assistant_mask")
    lengths = _lengths(ids)
    yield _lengths(mask) != lengths, "input_ids and assistant_mask differ in length"
    yield _rows_with(ids, _outside(ids.flatten(), vocab_size)), _OUTSIDE.format(vocab_size)


_OUTSIDE = "a token id is outside the target's vocabulary of {}"


def _lengths(column: Any) -> Any:
    """Of a column's lists; −1 for a missing one."""
    return pc.fill_null(pc.list_value_length(column), -1).to_numpy(zero_copy_only=False)


def _outside(tokens: Any, vocab_size: int) -> Any:
    values = pc.fill_null(tokens.cast(pa.int64()), -1).to_numpy(zero_copy_only=False)
    return (values < 0) | (values >= vocab_size)


def _rows_with(column: Any, found: Any) -> Any:
    """From a finding for each entry of a column's lists to one for each list."""
    rows = np.zeros(len(column), dtype=bool)
    # Only where there is one are the entries' lists looked up: almost always there is none.
    if found.any():
        rows[pc.list_parent_indices(column).to_numpy(zero_copy_only=False)[found]] = True
    return rows
