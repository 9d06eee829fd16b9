# SPDX-License-Identifier: Apache-2.0
"""Text that the target wrote, with all that heads learn from it.

The target is by far the largest part of such a comparison's arithmetic, and all heads need the
same of it: its hidden states and those of a few layers. So they are computed once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_redrafter.data.rows import DatasetRows, ListRows, TextRow
from vllm_redrafter.data.source import read_checked
from vllm_redrafter.data.target import Target
from vllm_redrafter.replay.batches import TextBatch
from vllm_redrafter.replay.target import hidden_states

ROWS_AT_ONCE = 8


def read_texts(
    target: Target, model: Any, folder: Path, number: int, layers: Sequence[int], length: int
) -> tuple[str, ListRows]:
    """The first conversations that `generate-data` wrote: by what temperature, and as rows.

    They are `number` at most, and of `length` tokens at most. Hidden states of the n `layers` stand
    beside the last ones, [T, (1 + n) H] float32. A ConfigError where there is no such data.
    """
    info, dataset = read_checked(folder, target)
    temperature = info.sampling.temperature
    rows = DatasetRows(dataset, range(min(number, len(dataset))), length)
    found = dict(_with_states(rows, model, layers))
    name = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    return name, ListRows(found[number] for number in range(len(rows)))


def _with_states(
    rows: DatasetRows, model: Any, layers: Sequence[int]
) -> Iterator[tuple[int, TextRow]]:
    # Those of about the same length together: less padding.
    order = sorted(range(len(rows)), key=lambda number: int(rows.lengths[number]))
    for start in range(0, len(order), ROWS_AT_ONCE):
        chosen = order[start : start + ROWS_AT_ONCE]
        batch = TextBatch.of([[rows[number]] for number in chosen])
        hidden = hidden_states(model, layers, input_ids=batch.tokens)
        for number, states in zip(chosen, hidden, strict=True):
            # A copy, or all of the batch would be kept.
            states = states[: int(rows.lengths[number])].float().clone()
            yield number, replace(rows[number], hidden=states)


def narrowed(rows: ListRows, width: int) -> ListRows:
    """The rows with the first `width` numbers of their hidden states alone."""
    return ListRows(
        replace(row, hidden=row.hidden[:, :width]) for row in rows if row.hidden is not None
    )


def answers_alone(rows: ListRows) -> ListRows:
    """The rows from the token before their first answer on: recurrent heads read no other."""
    return ListRows(_from(row, max(int(row.generated.int().argmax()) - 1, 0)) for row in rows)


def _from(row: TextRow, first: int) -> TextRow:
    parts = {name: None if part is None else part[first:] for name, part in vars(row).items()}
    return TextRow(**parts)  # type: ignore[arg-type]
