# SPDX-License-Identifier: Apache-2.0
"""Prompts from files and datasets, and what is said about those that cannot be read."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from vllm_redrafter.data.conversation_rows import Conversation
from vllm_redrafter.data.prompts import read_prompts
from vllm_redrafter.utils.errors import ConfigError

ROWS: list[dict[str, Any]] = [
    {"prompt": "Write a haiku."},
    {"messages": [{"role": "user", "content": "And then?\u2028So?"}]},
    {"conversations": [{"from": "human", "value": "One?"}, {"from": "gpt", "value": "1"}]},
]
EXPECTED = [Conversation((text,)) for text in ("Write a haiku.", "And then?\u2028So?", "One?")]


def write(path: Path, rows: list[Any]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        names = {name for row in rows for name in row}
        columns = {name: [row.get(name) for row in rows] for name in names}
        parquet.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_all_kinds_of_rows_are_read_from_all_kinds_of_files(tmp_path: Path, suffix: str) -> None:
    conversations, left_out = read_prompts(str(write(tmp_path / f"prompts{suffix}", ROWS)))
    assert conversations == EXPECTED
    assert not left_out.count


def test_a_line_of_a_text_file_is_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffOne ü?\r\n\r\n  Two?\n".encode())
    conversations, _ = read_prompts(str(path))
    assert [c.turns for c in conversations] == [("One ü?",), ("  Two?",)]
    assert [c.source for c in conversations] == [f"{path}, line 1", f"{path}, line 3"]


@pytest.mark.parametrize("name", ["run[1]", "what?", "lr*", "a::b", "T=0.7 [v2]", "p.parquet"])
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_folder_is_read_by_its_name_and_no_other_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, suffix: str
) -> None:
    for folder in ("run1", "whatx", "lr-2", "a", "b", name):
        (tmp_path / folder / "data").mkdir(parents=True)
        write(tmp_path / folder / "data" / f"train{suffix}", [{"prompt": folder}] * 2)
        write(tmp_path / folder / "data" / f"test{suffix}", [{"prompt": f"{folder}?"}])
    monkeypatch.chdir(tmp_path)
    for given in (str(tmp_path / name), name):
        assert read_prompts(given)[0] == [Conversation((name,))] * 2
        conversations, _ = read_prompts(given, "test")
        assert conversations == [Conversation((f"{name}?",))]
        assert conversations[0].source == f"{given}, split test, row 1"
    with pytest.raises(ConfigError, match=r"can be loaded with split 'nothing' \(--split names"):
        read_prompts(name, "nothing")


def test_of_files_with_other_columns_is_said_what_to_do(tmp_path: Path) -> None:
    write(tmp_path / "train-0.parquet", [{"prompt": "One?"}])
    write(tmp_path / "train-1.parquet", [{"text": 7, "id": 1.5}])
    message = r"\(.*files with other columns .* one at a time\)"
    with pytest.raises(ConfigError, match=message) as error:
        read_prompts(str(tmp_path))
    assert "\n" not in str(error.value) and "vllm-redrafter-" not in str(error.value)


BAD_LINES = {
    "that are not JSON": b'{"prompt": "half',
    "that are not UTF-8 text": b'{"prompt": "\xff"}',
    "with half of a character": rb'{"messages": [{"role": "user", "content": "\ud83d"}]}',
    "with something else than text": b'{"data": ["One?"], "images": ["a.png"]}',
}


@pytest.mark.parametrize(("kind", "line"), BAD_LINES.items())
def test_a_row_that_cannot_be_used_is_left_out_and_counted(
    tmp_path: Path, kind: str, line: bytes
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "One?"}\n\n' + line + b"\n" + line + b'\n{"prompt": "Two?"}\n')
    conversations, left_out = read_prompts(str(path))
    assert [c.turns for c in conversations] == [("One?",), ("Two?",)]
    assert left_out.count == 2
    assert str(left_out).startswith(f"left out: rows {kind}: 2, the first: {path}, line 3: ")


def test_a_parquet_file_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    texts = pa.array([b"One?", b"\xed\xa0\xbd"], pa.binary())
    unchecked = pa.Array.from_buffers(pa.string(), 2, texts.buffers())
    parquet.write_table(pa.table({"prompt": unchecked}), tmp_path / "p.parquet")
    with pytest.raises(ConfigError, match=r"p\.parquet: not readable as Parquet: .*utf-8"):
        read_prompts(str(tmp_path / "p.parquet"))


def test_sources_that_cannot_be_read_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, content, message in (
        ("p.csv", b"a,b", "unknown format '.csv'; expected .jsonl, .json, .parquet, .txt"),
        ("p.json", b'{"prompt": "x"}', "expected a list of rows, found {'prompt': 'x'}"),
        ("q.json", b'[{"prompt":\n"x"', "line 2"),
        ("p.parquet", b"PAR1", "not readable as Parquet"),
        ("p.txt", "first\nsecond".encode("utf-16"), "p.txt, line 1: expected UTF-8"),
        ("empty.jsonl", b"\n", "no usable prompt among its 0 rows"),
        ("nothing.jsonl", None, "no such file"),
        ("nothing", None, "no such file or folder"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError) as error:
            read_prompts(str(tmp_path / name))
        assert name in str(error.value) and message in str(error.value)
    with pytest.raises(ConfigError, match=r"--split test is for datasets, .* leave it out"):
        read_prompts(str(tmp_path / "p.txt"), "test")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="neither a file nor a dataset"):
        read_prompts("someone/nothing")
