# SPDX-License-Identifier: Apache-2.0
"""The target's hidden states on disk: what training needs of the target's layers.

```
STATES/
  states.json                  StatesInfo
  states-00000.safetensors     the rows of the first shard; a shard that exists is complete
  states-00001.safetensors     and so on
```

A shard holds a tensor per row of the data, `row-0` and so on, [T-1, (1 + n) H] in the target's
dtype: the last hidden states, after the final norm, then those of n further layers, of all tokens
of the row but its last one, which predicts nothing that the data has. Which rows a shard holds
follows from the rows' lengths and `shard_tokens` alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from vllm_redrafter.data.fingerprint import LENGTH
from vllm_redrafter.data.folder_info import read_info, save_info
from vllm_redrafter.heads.target_layers import checked_layers
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.files import numbered_files, whole_file

FORMAT_VERSION = 1
INFO_FILE = "states.json"
SHARD_BYTES = 1 << 30
"""Of a shard, about: it is put together in memory, and is what a run that is stopped loses."""


@dataclass(frozen=True)
class StatesInfo:
    """What a folder's hidden states are: states.json.

    Attributes:
        target: its folder or hub id, as it was given; only a name.
        target_fingerprint: of the model that computed them.
        text_fingerprint: of the rows, see `text_fingerprint`.
        num_rows: of the data.
        num_tokens: of these rows, each cut to max_length.
        max_length: rows were cut to this many tokens.
        hidden_size: H.
        dtype: of the hidden states, as torch calls it: `bfloat16`.
        shard_tokens: a shard has rows of at most this many tokens together, or one longer row.
        target_layers: those n, in ascending order; see `target_layers.py`.
        format_version: of the folder.
    """

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

    @property
    def width(self) -> int:
        """Numbers of a token: (1 + n) H."""
        return (1 + len(self.target_layers)) * self.hidden_size

    @property
    def bytes_per_token(self) -> int:
        return int(getattr(torch, self.dtype).itemsize * self.width)

    @property
    def num_bytes(self) -> int:
        """Of all shards, their headers apart."""
        return (self.num_tokens - self.num_rows) * self.bytes_per_token

    def save(self, folder: Path) -> None:
        """Write states.json, unless there is one."""
        save_info(folder / INFO_FILE, self)

    @classmethod
    def load(cls, folder: Path) -> StatesInfo:
        """Read states.json.

        Raises:
            ConfigError: it is missing, malformed, or of another format version.
        """
        path = folder / INFO_FILE
        values = read_info(path, FORMAT_VERSION, "capture")
        try:
            layers = checked_layers(values.get("target_layers", []), "target_layers")
            info = cls(**(values | {"target_layers": layers}))
            _check_fields(info)
        except (ConfigError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}: not what capture writes: {error}") from error
        return info


def _check_fields(info: StatesInfo) -> None:
    """Raise a TypeError where a field has not the type, or the range, that capture writes."""
    for name in ("num_rows", "num_tokens", "max_length", "hidden_size", "shard_tokens"):
        value = getattr(info, name)
        if type(value) is not int or not 1 <= value < 2**63:
            raise TypeError(f"{name} is {value!r}")
    if info.dtype not in ("float32", "bfloat16", "float16"):
        raise TypeError(f"dtype is {info.dtype!r}")


def text_fingerprint(dataset: Any) -> str:
    """Which rows these are, token by token, in their order: 16 hexadecimal digits.

    Args:
        dataset: a `datasets.Dataset` with the columns of `dataset.py`.
    """
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
    """Which rows each shard has: as many in turn as have at most `shard_tokens` tokens together.

    Args:
        lengths: of all rows, in tokens.
        shard_tokens: of a shard; a longer row is a shard of its own.
    """
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
    """Write a shard; it gets its name when all of it is on the disk.

    Args:
        folder: of the states.
        shard: its number.
        states: by row, [T-1, (1 + n) H].

    Raises:
        ConfigError: it cannot be written (a full disk, say).
    """
    path = _shard_path(folder, shard)
    try:
        with whole_file(path) as file:
            file.write(save({f"row-{row}": value for row, value in sorted(states.items())}))
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be written: {error.strerror}. Finished shards are kept: make room "
            "and start the same command again to continue"
        ) from error


def finished_shards(folder: Path) -> set[int]:
    """The numbers of the shards that are there.

    Raises:
        ConfigError: a shard has a name that nobody gave it.
    """
    return set(numbered_files(folder, "states-", ".safetensors"))


class StoredStates:
    """The hidden states of one data folder's rows, read from disk when they are asked for.

    Args:
        folder: what capture wrote.
        lengths: of the data's rows, uncut.

    Raises:
        ConfigError: no states there, others, or not all of them.
    """

    def __init__(self, folder: Path, lengths: np.ndarray) -> None:
        self.folder = folder
        self.info = StatesInfo.load(folder)
        self._lengths = np.minimum(lengths, self.info.max_length)
        missing = set(range(len(self._shards))) - finished_shards(folder)
        if missing:
            raise ConfigError(
                f"{folder}: {len(missing)} of {len(self._shards)} shards are missing, "
                f"{_shard_path(folder, min(missing)).name} first: start capture again, which "
                "writes them"
            )

    @cached_property
    def _shards(self) -> list[range]:
        return plan_shards(self._lengths.tolist(), self.info.shard_tokens)

    @cached_property
    def _shard_of(self) -> np.ndarray:
        sizes = [len(rows) for rows in self._shards]
        return np.repeat(np.arange(len(sizes)), sizes)

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, row: int) -> Tensor:
        """[T-1, (1 + n) H], in the target's dtype.

        Raises:
            ConfigError: the row's shard is damaged.
        """
        path = _shard_path(self.folder, int(self._shard_of[row]))
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
                f"{path}: row {row} is {list(states.shape)} {states.dtype} where {INFO_FILE} and "
                f"the data make it {list(expected)} {dtype}; delete it and start capture again"
            )
        return states


def _shard_path(folder: Path, shard: int) -> Path:
    return folder / f"states-{shard:05d}.safetensors"
