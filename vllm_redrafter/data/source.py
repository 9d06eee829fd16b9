# SPDX-License-Identifier: Apache-2.0
"""The data that `generate-data` wrote, checked against the target and split."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import concatenate_datasets
from torch import Tensor

from vllm_redrafter.data.dataset import DatasetInfo, first_broken_row, read_dataset
from vllm_redrafter.data.fingerprint import tokenizer_fingerprint
from vllm_redrafter.data.rows import DatasetRows
from vllm_redrafter.data.target import Target
from vllm_redrafter.utils.errors import ConfigError


@dataclass(frozen=True)
class WrittenData:
    """The rows of one or several folders, one folder after the other.

    `conversations` is [rows] int64. Folders that answer the same prompts (greedily and sampled,
    say) share their conversations: one that is held out is held out in all of them.
    """

    infos: tuple[DatasetInfo, ...]
    parts: tuple[Any, ...]
    dataset: Any
    conversations: Tensor

    @property
    def sampled(self) -> Tensor:
        """[rows] bool: the target's tokens were sampled, not the most probable ones."""
        of_parts = zip(self.infos, self.parts, strict=True)
        return torch.cat([torch.full((len(p),), i.sampling.temperature > 0) for i, p in of_parts])


@dataclass(frozen=True)
class TrainingData:
    """Rows to learn from, and rows of other conversations to measure on."""

    infos: tuple[DatasetInfo, ...]
    rows: DatasetRows
    held_out: DatasetRows


def read_all(folders: Sequence[Path], target: Target, check_target: bool = True) -> WrittenData:
    """Read data folders as one, each by `read_checked`; ConfigError where one is given twice."""
    if len({folder.expanduser().resolve() for folder in folders}) < len(folders):
        names = ", ".join(map(str, folders))
        raise ConfigError(f"--data {names}: a folder is given twice; leave the second one out")
    read = [read_checked(folder, target, check_target) for folder in folders]
    datasets, conversations = [], []
    first_of: dict[str, int] = {}
    total = 0
    for info, dataset in read:
        if info.prompts_fingerprint not in first_of:
            first_of[info.prompts_fingerprint] = total
            total += info.num_conversations
        first = first_of[info.prompts_fingerprint]
        conversations.append(first + torch.tensor(dataset["conversation"][:]))
        datasets.append(dataset)
    infos, parts = zip(*read, strict=True)
    return WrittenData(infos, parts, concatenate_datasets(datasets), torch.cat(conversations))


def read_checked(
    folder: str | Path, target: Target, check_target: bool = True
) -> tuple[DatasetInfo, Any]:
    """Read a data folder; a ConfigError refuses data of another target or tokenizer.

    Without check_target, it may be of another target with this tokenizer, such as a quantised copy.
    """
    info, dataset = read_dataset(folder)
    ours = tokenizer_fingerprint(target.tokenizer)
    if ours != info.tokenizer_fingerprint:
        raise ConfigError(
            f"{folder} was made with another tokenizer (that of {info.target!r}, fingerprint "
            f"{info.tokenizer_fingerprint[:12]}) than {target.name!r} has ({ours[:12]}): generate "
            "the data again with this target"
        )
    if check_target and (ours := target.fingerprint) != info.target_fingerprint:
        raise ConfigError(
            f"{folder} was written by another target ({info.target!r}, fingerprint "
            f"{info.target_fingerprint[:12]}) than {target.name!r} ({ours[:12]}): generate the "
            "data again with this target, or, if the two differ in precision only, pass "
            "--other-target"
        )
    is_smaller = target.vocab_size < info.vocab_size
    if is_smaller and (broken := first_broken_row(dataset, target.vocab_size)):
        row = dataset[broken[0]]
        raise ConfigError(
            f"{folder}: conversation {row['conversation']}, row {broken[0]}, is not for "
            f"{target.name!r}: {target.embedded.trouble(row['input_ids'])}; give a target with the "
            f"{info.vocab_size} rows of the one that wrote the data"
        )
    return info, dataset


def split(data: WrittenData, held_out: int, seed: int, length: int) -> TrainingData:
    """Hold conversations out, see `held_out_conversations`; rows are cut to `length` tokens."""
    away = held_out_conversations(data.conversations, held_out, seed)
    return TrainingData(
        data.infos,
        DatasetRows(data.dataset, (~away).nonzero().flatten().tolist(), length),
        DatasetRows(data.dataset, away.nonzero().flatten().tolist(), length),
    )


def held_out_conversations(conversations: Tensor, held_out: int, seed: int) -> Tensor:
    """[rows] bool: True for the rows of `held_out` conversations, chosen by the seed.

    `conversations` is [rows] int64. ConfigError: no other conversation would be left.
    """
    numbers = torch.unique(conversations)
    if len(numbers) <= held_out:
        raise ConfigError(
            f"{held_out} conversations are to be held out and there are only {len(numbers)}: "
            "lower --held-out, or generate more data"
        )
    generator = torch.Generator().manual_seed(seed)
    chosen = numbers[torch.randperm(len(numbers), generator=generator)[:held_out]]
    return torch.isin(conversations, chosen)
