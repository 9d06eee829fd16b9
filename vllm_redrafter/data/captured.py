# SPDX-License-Identifier: Apache-2.0
"""Rows together with the hidden states that `capture` computed of them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vllm_redrafter.data.hidden_states import StatesInfo, StoredStates, text_fingerprint
from vllm_redrafter.data.rows import DatasetRows, TextRow, row_lengths
from vllm_redrafter.data.source import WrittenData
from vllm_redrafter.heads.target_layers import named_layers
from vllm_redrafter.utils.errors import ConfigError


class CapturedRows:
    """Rows of several folders in turn, with the hidden states of each folder in the same order.

    `hidden_size` is the target's; `layers` are wanted besides the last one. ConfigError: a row is
    longer than what was captured, a layer was not captured, or H differs.
    """

    def __init__(
        self,
        rows: DatasetRows,
        states: Sequence[StoredStates],
        hidden_size: int,
        layers: Sequence[int] = (),
    ) -> None:
        self.rows, self.states, self.lengths = rows, states, rows.lengths
        for part in states:
            if hidden_size != part.info.hidden_size:
                raise ConfigError(
                    f"{part.folder}: hidden states of size {part.info.hidden_size}, the target "
                    f"has {hidden_size}: capture again with this target"
                )
        self._columns = [_columns(part, layers) for part in states]
        self._ends = np.cumsum([len(part) for part in states])
        shortest = min(states, key=lambda part: part.info.max_length)
        limit = shortest.info.max_length
        if len(rows) and (longest := int(rows.lengths.max())) > limit:
            raise ConfigError(
                f"{shortest.folder}: hidden states of rows cut to {limit} tokens, and rows of up "
                f"to {longest} are to be read: train with --block-length {limit}, evaluate with "
                f"--max-length {limit}, or capture again with --max-length {longest}"
            )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int, /) -> TextRow:
        row = self.rows[index]
        number = self.rows.indices[index]
        folder = int(np.searchsorted(self._ends, number, side="right"))
        states = self.states[folder]
        captured = states[number - int(self._ends[folder]) + len(states)][: len(row.tokens)]
        if (columns := self._columns[folder]) is not None:
            captured = captured[:, columns]
        # What the last token predicts is not in the data.
        hidden = captured.new_zeros(len(row.tokens), captured.shape[1])
        hidden[: len(captured)] = captured
        return replace(row, hidden=hidden)


def _columns(states: StoredStates, layers: Sequence[int]) -> Tensor | None:
    """The wanted columns of a row; None for all of them."""
    found = states.info.target_layers
    if found == tuple(layers):
        return None
    if missing := [layer for layer in layers if layer not in found]:
        raise ConfigError(
            f"{states.folder}: no hidden states of layers {', '.join(map(str, missing))} were "
            f"captured: capture again with --target-layers {','.join(map(str, layers))}, or train "
            f"with --target-layers {named_layers(found)}"
        )
    parts = torch.split(torch.arange(states.info.width), states.info.hidden_size)
    return torch.cat([parts[0], *(parts[1 + found.index(layer)] for layer in layers)])


def states_of(
    written: WrittenData, folders: Sequence[Path], check_target: bool = True
) -> list[StoredStates]:
    """The hidden states of each data folder, matched by the fingerprint of the text.

    With check_target False they may be of another target than the one that wrote the data.
    ConfigError: states of other data or of another target, or none for a data folder.
    """
    found: dict[str, StoredStates] = {}
    parts = {text_fingerprint(part): part for part in written.parts}
    for folder in (path.expanduser() for path in folders):
        text = StatesInfo.load(folder).text_fingerprint
        if text not in parts:
            raise ConfigError(
                f"--hidden-states {folder}: captured from other text than any --data has now: "
                "give the data that it was captured from, or capture again"
            )
        if text in found:
            raise ConfigError(f"--hidden-states {folder}: of the same data as another folder")
        found[text] = StoredStates(folder, row_lengths(parts[text]))
    states = []
    for text, info in zip(map(text_fingerprint, written.parts), written.infos, strict=True):
        if text not in found:
            raise ConfigError(
                f"--hidden-states: none is of the data that {info.target!r} wrote "
                f"({info.num_conversations} conversations): capture them as well; all hidden "
                "states are read, or none"
            )
        states.append(found[text])
        theirs = found[text].info
        if check_target and theirs.target_fingerprint != info.target_fingerprint:
            raise ConfigError(
                f"{found[text].folder}: captured from another target ({theirs.target!r}, "
                f"fingerprint {theirs.target_fingerprint}) than wrote the data ({info.target!r}, "
                f"{info.target_fingerprint}): capture again with that one, or, if the two differ "
                "in precision only, pass --other-target"
            )
    return states
