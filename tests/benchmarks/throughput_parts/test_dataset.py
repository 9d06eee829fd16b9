"""Dataset files: which are read, and how their rows are divided into tasks."""

from __future__ import annotations

import json
import re
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


def test_text_has_a_prompt_per_line(tmp_path: Path) -> None:
    path = written(tmp_path, "a.txt", "one prompt\r\n\nanother\u2028one\n  \n")
    assert read(path) == ({None: ["one prompt", "another\u2028one"]}, 0)


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


def test_parquet_is_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"prompt": ["a", "b"]}), path)
    assert read(path) == ({None: ["a", "b"]}, 0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'prompt': 'x'}", "not JSON"),
        ("[]", r"found \[\], expected an object"),
        ("{}", "found nothing; expected .*messages.*conversations.*turns.*prompt.*text"),
        ('{"prompt": 5}', "'prompt' must be text or messages, found 5"),
        ('{"text": " "}', "the user says nothing"),
        ('{"turns": "x"}', "found 'turns'; expected"),
        ('{"messages": [{"content": "x"}]}', r"'messages'\[0\] must be text, or say in 'role'"),
        ('{"conversations": null}', "found 'conversations'; expected"),
        ('{"question": 5}', "'question' must be text or messages, found 5"),
        (r'{"text": "\ud83d"}', ".* is half of a character"),
    ],
)
def test_a_malformed_line_is_left_out_and_named(tmp_path: Path, line: str, message: str) -> None:
    path = written(tmp_path, "a.jsonl", f'{{"prompt": "fine"}}\n\n{line}\n')
    by_task, left_out = read_dataset(path)
    assert by_task == {None: ["fine"]} and left_out.count == 1
    assert re.search(f"line 3: {message}", str(left_out))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "\n \n", "no usable prompt among"),
        ("a.jsonl", '{"messages": []}', "no usable prompt among"),
        ("a.csv", "prompt\nx", "unknown format '.csv'"),
        ("a.json", '{"prompt": "x"}', "expected a list"),
        ("a.json", "[", "not JSON"),
        ("a.parquet", "x", "not readable as Parquet"),
    ],
)
def test_an_unusable_file_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_dataset(written(tmp_path, name, text))


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


def test_conversations_that_are_left_out_need_no_category(tmp_path: Path) -> None:
    rows = [{"messages": RECORDS[4]["messages"], "category": "x"}, {"conversations": []}]
    assert read(jsonl(tmp_path, *rows)) == ({"x": [PROMPTS[-1]]}, 1)


@pytest.mark.parametrize("category", [3, None, " ", ["a"], "\ud83d"])
def test_what_is_no_text_is_no_category(tmp_path: Path, category: object) -> None:
    assert read(jsonl(tmp_path, {"text": "a", "category": category})) == ({None: ["a"]}, 0)


def test_rows_must_have_a_category_if_the_first_one_has(tmp_path: Path) -> None:
    rows = [7, {"text": "a", "category": "x"}, {"text": "b"}]
    with pytest.raises(InputError, match=r"line 3: no 'category'.* every row one"):
        read_dataset(jsonl(tmp_path, *rows))
