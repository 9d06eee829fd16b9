# SPDX-License-Identifier: Apache-2.0
"""Data folders, read one by one and together."""

import json
from pathlib import Path

import pytest

from redrafter_testing.models.tiny_models import add_tokenizer, make_target, make_worded_target
from redrafter_testing.models.training_data import write_data
from redrafter_testing.shared_results import made_once
from vllm_redrafter.data.source import read_all, split
from vllm_redrafter.data.target import Target
from vllm_redrafter.utils.errors import ConfigError

V = 64

target = made_once(make_worded_target, V)


@pytest.fixture(scope="module")
def folders(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Short and long answers to the same prompts, and others."""
    root = tmp_path_factory.mktemp("data")
    write_data(root / "short", target, num=10, max_tokens=5)
    write_data(root / "others", target, num=4, max_tokens=5, seed=6)
    write_data(root / "long", target, num=10, max_tokens=9)
    return {name: root / name for name in ("short", "others", "long")}


def test_answers_to_the_same_prompts_are_held_out_together_and_the_seed_chooses(
    target: Path, folders: dict[str, Path]
) -> None:
    data = read_all([*folders.values()], Target.open(target))
    assert data.conversations.tolist() == [*range(14), *range(10)]
    alone = [read_all([folder], Target.open(target)) for folder in folders.values()]
    assert data.infos == tuple(info for part in alone for info in part.infos)
    assert data.dataset["input_ids"][:] == [ids for p in alone for ids in p.dataset["input_ids"]]

    def prompts_of(seed: int) -> list[set[tuple[int, ...]]]:
        parts = split(data, held_out=5, seed=seed, length=64)
        assert len(parts.rows) + len(parts.held_out) == 24
        return [
            {tuple(rows[i].tokens[:6].tolist()) for i in range(len(rows))}
            for rows in (parts.rows, parts.held_out)
        ]

    rest, held_out = prompts_of(0)
    assert len(held_out) == 5 and not rest & held_out
    assert prompts_of(0)[1] == held_out != prompts_of(1)[1]


def test_each_folder_is_checked_against_the_target(
    target: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    again = folders["short"].parent / "." / "short"
    with pytest.raises(ConfigError, match="given twice"):
        read_all([folders["short"], again], Target.open(target))
    other = make_worded_target(tmp_path / "other", V, seed=1)
    with pytest.raises(ConfigError, match=r"written by another target .* pass --other-target"):
        read_all([folders["short"]], Target.open(other))
    assert len(read_all([folders["short"]], Target.open(other), check_target=False).dataset) == 10
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, two = (name for name, index in vocabulary.items() if index in (40, 41))
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="made with another tokenizer"):
        read_all([folders["short"]], Target.open(other), check_target=False)
    smaller = add_tokenizer(make_target(tmp_path / "smaller", vocab_size=V // 2), V)
    message = r"long: conversation \d, row \d, is not for .*: token '.*' \(id \d\d\) has no row in "
    message += r".* embedding of 32 rows; give a target with the 64 rows of the one that wrote"
    with pytest.raises(ConfigError, match=message):
        read_all([folders["long"]], Target.open(smaller), check_target=False)
