# SPDX-License-Identifier: Apache-2.0
"""Data folders, read one by one and together."""

from pathlib import Path

import pytest

from redrafter_testing.models.tiny_models import add_tokenizer, make_target
from redrafter_testing.models.training_data import write_data
from vllm_redrafter.data.source import read_all, split
from vllm_redrafter.data.target import Target
from vllm_redrafter.utils.errors import ConfigError

V = 64


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_target(tmp_path_factory.mktemp("target"), vocab_size=V)
    add_tokenizer(folder, vocab_size=V)
    return folder


@pytest.fixture(scope="module")
def folders(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Short and long answers to the same prompts, and others."""
    root = tmp_path_factory.mktemp("data")
    write_data(root / "short", target, num=10, max_tokens=5)
    write_data(root / "long", target, num=10, max_tokens=9)
    write_data(root / "others", target, num=4, max_tokens=5, seed=6)
    return {name: root / name for name in ("short", "long", "others")}


def test_the_rows_of_all_folders_follow_one_another(target: Path, folders: dict[str, Path]) -> None:
    data = read_all([folders["short"], folders["others"]], Target.open(target))
    alone = [read_all([folders[name]], Target.open(target)) for name in ("short", "others")]
    rows = [row["input_ids"] for part in alone for row in part.dataset]
    assert [row["input_ids"] for row in data.dataset] == rows
    assert data.infos == alone[0].infos + alone[1].infos
    assert data.conversations.tolist() == [*range(10), *range(10, 14)]


def test_answers_to_the_same_prompts_are_held_out_together_and_the_seed_chooses(
    target: Path, folders: dict[str, Path]
) -> None:
    data = read_all([folders["short"], folders["others"], folders["long"]], Target.open(target))
    assert data.conversations.tolist() == [*range(14), *range(10)]

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


def test_a_folder_given_twice_is_refused(target: Path, folders: dict[str, Path]) -> None:
    again = folders["short"].parent / "." / "short"
    with pytest.raises(ConfigError, match="given twice"):
        read_all([folders["short"], again], Target.open(target))


def test_each_folder_is_checked_against_the_target(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    other = make_target(tmp_path, vocab_size=V, seed=1)
    add_tokenizer(other, vocab_size=V)
    with pytest.raises(ConfigError, match="written by another target"):
        read_all([folders["short"]], Target.open(other))
    assert len(read_all([folders["short"]], Target.open(other), check_target=False).dataset) == 10


def test_rows_of_a_target_with_more_embeddings_are_refused(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    smaller = make_target(tmp_path, vocab_size=V // 2)
    add_tokenizer(smaller, vocab_size=V)
    with pytest.raises(
        ConfigError,
        match=r"long: conversation \d, row \d, is not for .*: token '.*' \(id \d\d\) has no row in "
        r".* embedding of 32 rows; give a target with the 64 rows of the one that wrote the data",
    ):
        read_all([folders["long"]], Target.open(smaller), check_target=False)
