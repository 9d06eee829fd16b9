"""The data that `generate-data` wrote, checked against the target and split."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from vllm_redrafter.data.dataset import DatasetInfo, read_dataset
from vllm_redrafter.data.fingerprint import target_fingerprint, tokenizer_fingerprint
from vllm_redrafter.data.rows import DatasetRows
from vllm_redrafter.errors import ConfigError


@dataclass(frozen=True)
class TrainingData:
    """What to learn from, and what to measure on.

    Attributes:
        info: how the data was made.
        rows: to learn from.
        held_out: of other conversations.
    """

    info: DatasetInfo
    rows: DatasetRows
    held_out: DatasetRows


def read_checked(
    folder: str | Path, target: str, check_target: bool = True
) -> tuple[DatasetInfo, Any]:
    """Read a data folder; refuse data of another target or tokenizer.

    Args:
        folder: what generate-data wrote.
        target: folder or hub id.
        check_target: False accepts another target with the same tokenizer, such as a quantised
            copy that wrote the data.

    Raises:
        ConfigError: no data there, or another tokenizer's or target's.
    """
    info, dataset = read_dataset(folder)
    ours = tokenizer_fingerprint(AutoTokenizer.from_pretrained(target))
    if ours != info.tokenizer_fingerprint:
        raise ConfigError(
            f"{folder} was made with another tokenizer (that of {info.target!r}, fingerprint "
            f"{info.tokenizer_fingerprint[:12]}) than {target!r} has ({ours[:12]}): generate the "
            "data again with this target"
        )
    if check_target and (ours := target_fingerprint(target)) != info.target_fingerprint:
        raise ConfigError(
            f"{folder} was written by another target ({info.target!r}, fingerprint "
            f"{info.target_fingerprint[:12]}) than {target!r} ({ours[:12]}): generate the data "
            "again with this target, or, if the two differ in precision only, pass --other-target"
        )
    return info, dataset


def split(info: DatasetInfo, dataset: Any, held_out: int, seed: int, length: int) -> TrainingData:
    """Hold conversations out, chosen by the seed.

    Args:
        info: of the dataset.
        dataset: its rows.
        held_out: how many conversations.
        seed: of the choice.
        length: rows are cut to this many tokens.

    Raises:
        ConfigError: nothing would be left to learn from.
    """
    away = held_out_conversations(dataset, held_out, seed)
    return TrainingData(
        info,
        DatasetRows(dataset, (~away).nonzero().flatten().tolist(), length),
        DatasetRows(dataset, away.nonzero().flatten().tolist(), length),
    )


def held_out_conversations(dataset: Any, held_out: int, seed: int) -> Tensor:
    """[rows] bool: True for the rows of `held_out` conversations, chosen by the seed.

    Raises:
        ConfigError: no other conversation would be left.
    """
    conversations = torch.tensor(dataset["conversation"][:])
    numbers = torch.unique(conversations)
    if len(numbers) <= held_out:
        raise ConfigError(
            f"{held_out} conversations are to be held out and there are only {len(numbers)}: "
            "lower --held-out, or generate more data"
        )
    generator = torch.Generator().manual_seed(seed)
    chosen = numbers[torch.randperm(len(numbers), generator=generator)[:held_out]]
    return torch.isin(conversations, chosen)
