"""Dataset files: which are read, and how their rows are divided into tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from throughput_parts.dataset import read_dataset
from throughput_parts.methods import InputError


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_text_has_a_prompt_per_line(tmp_path: Path) -> None:
    path = written(tmp_path, "a.txt", "one prompt\r\n\nanother\u2028one\n  \n")
    assert read_dataset(path) == ({None: ["one prompt", "another\u2028one"]}, 0)


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
    assert read_dataset(written(tmp_path, "a.jsonl", lines)) == ({None: PROMPTS}, 2)
    assert read_dataset(written(tmp_path, "a.json", json.dumps(RECORDS))) == ({None: PROMPTS}, 2)


def test_parquet_is_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"prompt": ["a", "b"]}), path)
    assert read_dataset(path) == ({None: ["a", "b"]}, 0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'prompt': 'x'}", "line 3: not JSON"),
        ("[]", r'line 3: found \[\]; expected {"text"'),
        ("{}", "line 3: found nothing; expected .*text.*turns.*prompt.*messages.*conversations"),
        ('{"prompt": 5}', "line 3: 'prompt' must be text, found 5"),
        ('{"text": " "}', "line 3: 'text' must be text"),
        ('{"turns": "x"}', "line 3: 'turns' must be a list of texts"),
        ('{"messages": [{"role": "user"}]}', r"line 3: 'messages'\[0\] must have 'role' and"),
        ('{"conversations": null}', "line 3: found 'conversations'; expected"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = written(tmp_path, "a.jsonl", f'{{"prompt": "fine"}}\n\n{line}\n')
    with pytest.raises(InputError, match=message):
        read_dataset(path)


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
    by_task, left_out = read_dataset(jsonl(tmp_path, *rows))
    assert by_task == {"writing": asked("a", "e"), "math": asked("c")}
    assert list(by_task) == ["writing", "math"] and left_out == 0


def test_gsm8ks_questions_are_read_without_their_answers(tmp_path: Path) -> None:
    rows = [{"question": f"{i} apples?", "answer": f"#### {i}"} for i in range(2)]
    expected = {None: asked("0 apples?", "1 apples?")}
    assert read_dataset(jsonl(tmp_path, *rows)) == (expected, 0)


def test_a_question_is_not_read_where_there_is_a_prompt(tmp_path: Path) -> None:
    rows = [{"question": "a", "prompt": "b"}, {"question": "c", "prompt": "d"}]
    assert read_dataset(jsonl(tmp_path, *rows)) == ({None: ["b", "d"]}, 0)


def test_conversations_that_are_left_out_need_no_category(tmp_path: Path) -> None:
    rows = [{"messages": RECORDS[4]["messages"], "category": "x"}, {"conversations": []}]
    assert read_dataset(jsonl(tmp_path, *rows)) == ({"x": [PROMPTS[-1]]}, 1)


@pytest.mark.parametrize("category", [3, None, " ", ["a"]])
def test_what_is_no_text_is_no_category(tmp_path: Path, category: object) -> None:
    assert read_dataset(jsonl(tmp_path, {"text": "a", "category": category})) == ({None: ["a"]}, 0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "a", "category": "x"}, {"text": "b"}], "line 2: no 'category'.* every row one"),
        ([{"question": "a"}, {"text": "b"}], r"line 2: found {'text': 'b'}; expected {\"question"),
        ([{"question": 5}], "line 1: found {'question': 5}; expected"),
        ([{"question": " "}], "line 1: expected text"),
    ],
)
def test_rows_must_have_what_the_first_one_has(
    tmp_path: Path, rows: list[object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        read_dataset(jsonl(tmp_path, *rows))
