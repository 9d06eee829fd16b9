"""Prompts from files and datasets, and what is said about those that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from vllm_redrafter.data.prompts import Conversation, read_openings, read_prompts
from vllm_redrafter.errors import ConfigError

ROWS: list[dict[str, Any]] = [
    {"prompt": "Write a haiku."},
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "One?"},
            {"role": "assistant", "content": "1"},
            {"role": "user", "content": "Two?"},
            {"role": "assistant", "content": "2"},
        ]
    },
    {
        "conversations": [
            {"from": "gpt", "value": "the middle of something"},
            {"from": "human", "value": "And then?\u2028So?"},
            {"from": "gpt", "value": "Then."},
        ]
    },
]
EXPECTED = [
    Conversation(("Write a haiku.",)),
    Conversation(("One?", "Two?"), system="Be brief."),
    Conversation(("And then?\u2028So?",)),
]


def write(path: Path, rows: list[Any]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


def columns(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As Parquet has them: every row has every column."""
    return [{key: row.get(key) for key in ("prompt", "messages", "conversations")} for row in rows]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_all_kinds_of_rows_are_read_from_all_kinds_of_files(tmp_path: Path, suffix: str) -> None:
    rows = columns(ROWS) if suffix == ".parquet" else ROWS
    conversations, left_out = read_prompts(str(write(tmp_path / f"prompts{suffix}", rows)))
    assert conversations == EXPECTED
    assert left_out == 0


def test_a_line_of_a_text_file_is_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffOne ü?\r\n\r\n  Two?\n".encode())
    conversations, _ = read_prompts(str(path))
    assert [c.turns for c in conversations] == [("One ü?",), ("  Two?",)]
    assert [c.source for c in conversations] == [f"{path}, line 1", f"{path}, line 3"]


def test_datasets_are_read_by_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    folder = tmp_path / "dataset"
    folder.mkdir()
    write(folder / "train.jsonl", [{"prompt": "train"}])
    write(folder / "test.jsonl", [{"prompt": "test"}, {"prompt": "more"}])
    assert read_prompts(str(folder))[0] == [Conversation(("train",))]
    conversations, _ = read_prompts(str(folder), "test")
    assert conversations == [Conversation(("test",)), Conversation(("more",))]
    assert conversations[1].source == f"{folder}, split test, row 2"
    with pytest.raises(ConfigError, match=r"can be loaded with split 'nothing' \(--split names"):
        read_prompts(str(folder), "nothing")


def test_conversations_without_a_word_from_the_user_are_left_out_and_counted(
    tmp_path: Path,
) -> None:
    silent = [
        {"conversations": []},
        {"conversations": [{"from": "gpt", "value": "Hello?"}]},
        {"messages": [{"role": "user", "content": "  "}]},
    ]
    conversations, left_out = read_prompts(str(write(tmp_path / "p.jsonl", [*silent, ROWS[0]])))
    assert (len(conversations), left_out) == (1, 3)
    with pytest.raises(ConfigError, match="no usable prompt among its 3 rows; expected"):
        read_prompts(str(write(tmp_path / "silent.jsonl", silent)))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        pytest.param("[1]", r"found \[1\]; expected \{\"prompt\"", id="no object"),
        pytest.param('{"prompt": "half', r"not JSON \(.*\), found '\{\"prompt", id="cut"),
        pytest.param('{"text": "x", "id": 1}', "found 'text', 'id'; expected", id="other keys"),
        pytest.param('{"prompt": ""}', "'prompt' must be text, found ''", id="empty"),
        pytest.param('{"prompt": 7}', "'prompt' must be text, found 7", id="number"),
        pytest.param('{"messages": "hi"}', "'messages' must be a list, found 'hi'", id="no list"),
        pytest.param(
            '{"messages": [{"from": "human", "value": "x"}]}',
            r"'messages'\[0\] must have 'role' and 'content', both text; found \{'from'",
            id="mixed up",
        ),
        pytest.param(
            '{"conversations": [{"from": "human", "value": "x"}, {"from": "tool", "value": "y"}]}',
            r"'conversations'\[1\]: unknown role 'tool'; expected one of system, user",
            id="role",
        ),
        pytest.param(
            '{"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]}',
            r"'messages'\[1\]: a system message must be the first one",
            id="late system message",
        ),
    ],
)
def test_malformed_rows_are_named(tmp_path: Path, row: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "good"}}\n\n{row}\n')
    with pytest.raises(ConfigError, match=rf"prompts.jsonl, line 3: {message}"):
        read_prompts(str(path))


def test_files_that_are_none_of_these_are_refused(tmp_path: Path) -> None:
    for name, content, message in (
        ("p.csv", b"a,b", "unknown format '.csv'; expected .jsonl, .json, .parquet, .txt"),
        ("p.json", b'{"prompt": "x"}', "expected a list of rows, found {'prompt': 'x'}"),
        ("q.json", b'[{"prompt":\n"x"', "line 2"),
        ("p.parquet", b"PAR1", "not readable as Parquet"),
        ("p.txt", b"good\n\xff\xfe\n", "p.txt, line 2: expected UTF-8"),
        ("empty.txt", b"", "no usable prompt among its 0 rows"),
        ("empty.jsonl", b"\n", "no usable prompt among its 0 rows"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError) as error:
            read_prompts(str(tmp_path / name))
        assert name in str(error.value) and message in str(error.value)


def test_sources_that_are_not_there_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.jsonl: no such file"):
        read_prompts(str(tmp_path / "nothing.jsonl"))
    with pytest.raises(ConfigError, match="nothing: no such file or folder"):
        read_prompts(str(tmp_path / "nothing"))
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="neither a file nor a dataset"):
        read_prompts("someone/nothing")


def test_a_split_of_a_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", ROWS)
    with pytest.raises(ConfigError, match=r"--split test is for datasets, .* leave it out"):
        read_prompts(str(path), "test")


@pytest.mark.parametrize(
    ("row", "opening"),
    [
        ({"text": "Once upon"}, Conversation(("Once upon",))),
        ({"turns": ["", "One?", "Two?"]}, Conversation(("One?",))),
        (ROWS[1], Conversation(("One?",), system="Be brief.")),
        (ROWS[2], EXPECTED[2]),
        # Keys that are mixed up, a role that is not known, two system messages.
        (
            {
                "conversations": [
                    {"role": "tool", "content": "x"},
                    {"from": "system", "value": "Be brief."},
                    {"role": "system", "content": "Be kind."},
                    {"from": "human", "value": "One?"},
                ]
            },
            Conversation(("One?",), system="Be brief.\n\nBe kind."),
        ),
        # What follows the user's first turn is not looked at.
        ({"messages": [{"role": "user", "content": "One?"}, 7]}, Conversation(("One?",))),
    ],
)
def test_of_an_opening_more_is_accepted(
    tmp_path: Path, row: dict[str, Any], opening: Conversation
) -> None:
    path = write(tmp_path / "p.jsonl", [row, {"turns": [" "]}])
    assert read_openings(path) == ([opening], 1)


def test_only_a_mere_text_is_bare(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [*ROWS, {"text": "a"}, {"turns": ["a"]}])
    assert [opening.bare for opening in read_openings(path)[0]] == [True, False, False, True, False]
    conversations, _ = read_prompts(str(write(tmp_path / "q.jsonl", ROWS)))
    assert [conversation.bare for conversation in conversations] == [True, False, False]


def test_openings_are_read_from_files_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="someone/nothing: no such file"):
        read_openings(Path("someone/nothing"))
    with pytest.raises(ConfigError, match=r'no usable prompt among its 1 rows; .* {"turns"'):
        read_openings(write(tmp_path / "p.jsonl", [{"turns": []}]))
