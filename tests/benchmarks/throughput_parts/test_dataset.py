"""Dataset files: which are read, and how their rows are divided into tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from throughput_parts.dataset import read_dataset
from throughput_parts.methods import InputError
from throughput_parts.prompts import ByTask


def read(path: Path) -> tuple[ByTask, int]:
    by_task, left_out = read_dataset(path)
    return by_task, left_out.count


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


RECORDS: list[dict[str, Any]] = [
    {"prompt": "a", "text": "not this"},
    {"text": "b"},
    {"turns": ["c", "d"]},
    {"conversations": [{"from": "human", "value": "e"}, {"from": "gpt", "value": "f"}]},
    {"messages": [{"role": "system", "content": "g"}, {"role": "user", "content": "h"}]},
    {"conversations": [{"from": "gpt", "value": "an answer to nothing"}]},
    {"conversations": []},
]

PROMPTS = [
    "a",
    "b",
    [{"role": "user", "content": "c"}],
    [{"role": "user", "content": "e"}],
    [{"role": "system", "content": "g"}, {"role": "user", "content": "h"}],
]


def test_records_of_all_kinds_are_read(tmp_path: Path) -> None:
    lines = "\n\n".join(map(json.dumps, RECORDS))
    assert read(written(tmp_path, "a.jsonl", lines)) == ({None: PROMPTS}, 2)
    assert read(written(tmp_path, "a.json", json.dumps(RECORDS))) == ({None: PROMPTS}, 2)


def jsonl(folder: Path, *rows: object) -> Path:
    return written(folder, "rows.jsonl", "\n".join(map(json.dumps, rows)))


def asked(*turns: str) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": turn}] for turn in turns]


def test_mt_benchs_questions_are_divided_by_their_categories(tmp_path: Path) -> None:
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["a", "then b"]},
        {"question_id": 111, "category": "math", "turns": ["c", "then d"], "reference": ["1", ""]},
        {"question_id": 82, "category": "writing", "turns": ["e", "then f"]},
    ]
    by_task, left_out = read(jsonl(tmp_path, *rows))
    assert by_task == {"writing": asked("a", "e"), "math": asked("c")}
    assert list(by_task) == ["writing", "math"] and left_out == 0


def test_gsm8ks_questions_are_read_without_their_answers(tmp_path: Path) -> None:
    rows = [{"question": f"{i} apples?", "answer": f"#### {i}"} for i in range(2)]
    expected = {None: asked("0 apples?", "1 apples?")}
    assert read(jsonl(tmp_path, *rows)) == (expected, 0)


def test_a_question_is_not_read_where_there_is_a_prompt(tmp_path: Path) -> None:
    rows = [{"question": "a", "prompt": "b"}, {"question": "c", "prompt": "d"}]
    assert read(jsonl(tmp_path, *rows)) == ({None: ["b", "d"]}, 0)


def test_rows_must_have_a_category_if_the_first_one_has(tmp_path: Path) -> None:
    rows = [7, {"text": "a", "category": "x"}, {"text": "b"}]
    with pytest.raises(InputError, match=r"line 3: no 'category'.* every row one"):
        read_dataset(jsonl(tmp_path, *rows))
