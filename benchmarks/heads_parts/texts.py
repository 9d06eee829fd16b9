"""Text that the target wrote, with all that heads learn from: computed once, and kept.

The target is by far the largest part of such a comparison's arithmetic, and all heads need the
same of it: its hidden states and those of a few layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from vllm_redrafter.data.fingerprint import target_fingerprint
from vllm_redrafter.data.rows import DatasetRows, ListRows, TextRow
from vllm_redrafter.data.source import read_checked
from vllm_redrafter.training.batches import TextBatch
from vllm_redrafter.training.target import hidden_states, load_target
from vllm_redrafter.utils.errors import ConfigError

ROWS_PER_FILE = 64
ROWS_AT_ONCE = 8
STORED = torch.float16


class Texts:
    """The first conversations of a data folder.

    Args:
        target: folder or hub id.
        folder: what `generate-data` wrote.
        number: how many rows; at most what there is.
        layers: whose hidden states are kept beside the last ones.
        length: rows are cut to this many tokens.
        kept: a folder for what was computed.

    Raises:
        ConfigError: no such data, or what is kept is of something else.
    """

    def __init__(
        self,
        target: str,
        folder: Path,
        number: int,
        layers: Sequence[int],
        length: int,
        kept: Path,
    ) -> None:
        self.info, dataset = read_checked(folder, target)
        self.rows = DatasetRows(dataset, range(min(number, len(dataset))), length)
        self.temperature = self.info.sampling.temperature
        self._files = [
            kept / f"{folder.resolve().name}-{first:05d}.safetensors"
            for first in range(0, len(self.rows), ROWS_PER_FILE)
        ]
        self._about = {
            "target": target_fingerprint(target),
            "prompts": self.info.prompts_fingerprint,
            "temperature": str(self.temperature),
            "layers": ",".join(map(str, layers)),
            "length": str(length),
        }
        missing = [path for path in self._files if not path.exists()]
        if missing:
            kept.mkdir(parents=True, exist_ok=True)
            model = load_target(target)
            for path in missing:
                self._compute(model, layers, path)

    def _compute(self, model: Any, layers: Sequence[int], path: Path) -> None:
        first = self._files.index(path) * ROWS_PER_FILE
        numbers = range(first, min(first + ROWS_PER_FILE, len(self.rows)))
        tensors: dict[str, Tensor] = {}
        # Those of about the same length together: less padding.
        order = sorted(numbers, key=lambda number: int(self.rows.lengths[number]))
        for start in range(0, len(order), ROWS_AT_ONCE):
            chosen = order[start : start + ROWS_AT_ONCE]
            batch = TextBatch.of([[self.rows[number]] for number in chosen])
            hidden = hidden_states(model, layers, input_ids=batch.tokens)
            for index, number in enumerate(chosen):
                states = hidden[index, : int(self.rows.lengths[number])]
                tensors[f"hidden-{number}"] = states.to(STORED)
        half = path.with_suffix(".tmp")
        save_file(tensors, half, self._about)
        half.rename(path)

    def read(self) -> ListRows:
        """All rows with everything: hidden [T, (1 + n) H] float32."""
        return ListRows(self._rows())

    def _rows(self) -> Iterator[TextRow]:
        for index, path in enumerate(self._files):
            with safe_open(path, framework="pt") as file:
                if file.metadata() != self._about:
                    raise ConfigError(
                        f"{path}: kept from {file.metadata()}, and {self._about} is asked for: "
                        "give another folder, or delete it"
                    )
                first = index * ROWS_PER_FILE
                for number in range(first, min(first + ROWS_PER_FILE, len(self.rows))):
                    hidden = file.get_tensor(f"hidden-{number}").float()
                    yield replace(self.rows[number], hidden=hidden)


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
