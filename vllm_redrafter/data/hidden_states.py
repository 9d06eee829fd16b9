# SPDX-License-Identifier: Apache-2.0
"""The target's hidden states on disk: what training needs of the target's layers.

```
STATES/
  states.json                  StatesInfo
  states-00000.safetensors     the rows of the first shard; a shard that exists is complete
```

A shard holds a tensor per row of the data, `row-0` and so on, [T-1, (1 + n) H] in the target's
dtype: the last hidden states, after the final norm, then those of n further layers, of all tokens
of the row but its last one, which predicts nothing that the data has. Which rows a shard holds
follows from the rows' lengths and `shard_tokens` alone.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from vllm_redrafter.data.fingerprint import LENGTH
from vllm_redrafter.data.output_folder import FORMAT_VERSION, FolderInfo, shard_file
from vllm_redrafter.heads.target_layers import checked_layers
from vllm_redrafter.utils.errors import ConfigError

SHARD_BYTES = 1 << 30
"""Of a shard, about: it is put together in memory, and a run that is stopped loses it."""


@dataclass(frozen=True)
class StatesInfo(FolderInfo):
    """What a folder's hidden states are: states.json.

    Attributes:
        num_tokens: of the rows, each cut to max_length.
        hidden_size: H.
        dtype: as torch calls it: `bfloat16`.
        shard_tokens: a shard has rows of at most this many tokens together, or one longer row.
    """

    FILE, COMMAND, SHARD = "states.json", "capture", ("states-", ".safetensors")

    target: str
    target_fingerprint: str
    text_fingerprint: str
    num_rows: int
    num_tokens: int
    max_length: int
    hidden_size: int
    dtype: str
    shard_tokens: int
    target_layers: tuple[int, ...] = ()
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        names = ("num_rows", "num_tokens", "max_length", "hidden_size", "shard_tokens")
        self._check_integers(**dict.fromkeys(names, 1))
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ConfigError(f"dtype is {self.dtype!r}")

    @classmethod
    def _from_json(cls, values: dict[str, Any]) -> dict[str, Any]:
        layers = values.get("target_layers", [])
        return {**values, "target_layers": checked_layers(layers, "target_layers")}

    @property
    def width(self) -> int:
        return (1 + len(self.target_layers)) * self.hidden_size

    @property
    def bytes_per_token(self) -> int:
        return int(getattr(torch, self.dtype).itemsize * self.width)


def text_fingerprint(dataset: Any) -> str:
    """Which rows of a `datasets.Dataset` these are, token by token, in their order."""
    sha = hashlib.sha256()
    # How the rows lie in chunks must not matter, only which rows they are.
    for chunk in dataset.data.column("input_ids").chunks:
        lengths = chunk.value_lengths().to_numpy(zero_copy_only=False)
        tokens = np.split(chunk.flatten().to_numpy(), np.cumsum(lengths))
        for row in tokens[: len(lengths)]:
            sha.update(len(row).to_bytes(8, "little"))
            sha.update(row.astype("<i4", copy=False).tobytes())
    return sha.hexdigest()[:LENGTH]


def plan_shards(lengths: Sequence[int], shard_tokens: int) -> list[range]:
    """Which rows each shard has: of at most `shard_tokens` tokens together, or one longer row."""
    shards: list[range] = []
    start = tokens = 0
    for row, length in enumerate(lengths):
        if row > start and tokens + length > shard_tokens:
            shards.append(range(start, row))
            start, tokens = row, 0
        tokens += int(length)
    if start < len(lengths):
        shards.append(range(start, len(lengths)))
    return shards


def write_states(folder: Path, shard: int, states: Mapping[int, Tensor]) -> None:
    """Write a shard: by row, [T-1, (1 + n) H]; ConfigError where it cannot be written."""
    with shard_file(StatesInfo.shard_path(folder, shard)) as file:
        file.write(save({f"row-{row}": value for row, value in sorted(states.items())}))


class StoredStates:
    """The hidden states of a data folder's rows, read from disk when asked for.

    `lengths` are those of the data's rows, uncut. ConfigError: no states, others, or not all.
    """

    def __init__(self, folder: Path, lengths: np.ndarray) -> None:
        self.folder = folder
        self.info = StatesInfo.load(folder)
        self._lengths = np.minimum(lengths, self.info.max_length)
        sizes = list(map(len, plan_shards(self._lengths.tolist(), self.info.shard_tokens)))
        self._shard_of = np.repeat(np.arange(len(sizes)), sizes)
        missing = set(range(len(sizes))).difference(self.info.finished_shards(folder))
        if missing:
            raise ConfigError(
                f"{folder}: {len(missing)} of {len(sizes)} shards are missing, "
                f"{self.info.shard_path(folder, min(missing)).name} first: start capture again, "
                "which writes them"
            )

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, row: int) -> Tensor:
        """[T-1, (1 + n) H], in the target's dtype; ConfigError where the row's shard is damaged."""
        path = self.info.shard_path(self.folder, int(self._shard_of[row]))
        expected = (int(self._lengths[row]) - 1, self.info.width)
        try:
            with safe_open(path, framework="pt") as file:
                states: Tensor = file.get_tensor(f"row-{row}")
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"{path}: row {row} is not to be read from it ({error}); delete it and start "
                "capture again, which writes what is missing"
            ) from error
        dtype = getattr(torch, self.info.dtype)
        if states.shape != expected or states.dtype != dtype:
            raise ConfigError(
                f"{path}: row {row} is {list(states.shape)} {states.dtype} where states.json and "
                f"the data make it {list(expected)} {dtype}; delete it and start capture again"
            )
        return states
