"""Prompts for base models, cut from text files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from redrafter_testing.models.tiny_models import add_tokenizer, make_target
from vllm_redrafter.data import texts
from vllm_redrafter.data.generation_settings import PromptSettings
from vllm_redrafter.data.prompts import read_prompts
from vllm_redrafter.data.texts import LEAST_TOKENS, cut_prompts
from vllm_redrafter.utils.errors import ConfigError

SETTINGS = PromptSettings(num=20, max_tokens=30)
LINES = [f"value {i} list name {i * i}" for i in range(100)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_target(tmp_path_factory.mktemp("target"))
    add_tokenizer(folder)
    return folder


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    (tmp_path / "a.txt").write_text("\n\n".join(LINES[:50]))
    (tmp_path / "b.txt").write_text("\n".join(LINES[50:]))
    return [tmp_path / "a.txt", tmp_path / "b.txt"]


def prompts(output: Path) -> list[str]:
    return [row["prompt"] for row in map(json.loads, output.open())]


def test_each_prompt_is_a_piece_that_begins_with_a_line(
    target: Path, files: list[Path], tmp_path: Path
) -> None:
    output = tmp_path / "prompts.jsonl"
    summary = cut_prompts(str(target), files, output, SETTINGS)
    found = prompts(output)
    assert summary.prompts == len(set(found)) == 20
    contents = [file.read_text() for file in files]
    assert all(any(text in content for content in contents) for text in found)
    assert all(text.split("\n")[0][:9] in {line[:9] for line in LINES} for text in found)
    tokenizer = AutoTokenizer.from_pretrained(target)
    lengths = {len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in found}
    assert max(lengths) <= 30 and len(lengths) > 3
    assert min(lengths) >= LEAST_TOKENS - 2
    assert [c.turns[0] for c in read_prompts(str(output))[0]] == found


def test_a_run_with_fewer_is_continued_to_the_same_prompts(
    target: Path, files: list[Path], tmp_path: Path
) -> None:
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    cut_prompts(str(target), files, whole, SETTINGS)
    cut_prompts(str(target), files, parts, replace(SETTINGS, num=7))
    summary = cut_prompts(str(target), files, parts, SETTINGS)
    assert (summary.found, summary.prompts) == (7, 13)
    assert parts.read_bytes() == whole.read_bytes()
    with pytest.raises(ConfigError, match=r"made with other settings.*texts_fingerprint"):
        cut_prompts(str(target), files[:1], parts, replace(SETTINGS, num=30))


def test_texts_without_enough_pieces_are_refused(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "PATIENCE", 60)
    (tmp_path / "one.txt").write_text(LINES[0])
    with pytest.raises(ConfigError, match=r"no more new pieces.*lower --num"):
        cut_prompts(str(target), [tmp_path / "one.txt"], tmp_path / "prompts.jsonl", SETTINGS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "not readable"),
        (b"\xff\xfe\x00", "not readable as text in UTF-8"),
        (b" \n", "no text"),
    ],
)
def test_files_that_are_no_text_are_refused(
    target: Path, tmp_path: Path, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        cut_prompts(str(target), [tmp_path / "bad.txt"], tmp_path / "prompts.jsonl", SETTINGS)


def test_pieces_too_short_to_go_on_from_are_refused(
    target: Path, files: list[Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="--max-tokens 5: a piece of text has at least 8"):
        cut_prompts(str(target), files, tmp_path / "prompts.jsonl", replace(SETTINGS, max_tokens=5))
