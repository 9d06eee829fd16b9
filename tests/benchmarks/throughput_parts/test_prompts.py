"""Prompts: what files are read, what is made of them, which are chosen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from throughput_parts.methods import InputError
from throughput_parts.prompts import choose, read_dataset, tokenize


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_text_has_a_prompt_per_line(tmp_path: Path) -> None:
    path = written(tmp_path, "a.txt", "one prompt\r\n\nanother\u2028one\n  \n")
    assert read_dataset(path) == (["one prompt", "another\u2028one"], 0)


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
    assert read_dataset(written(tmp_path, "a.jsonl", lines)) == (PROMPTS, 2)
    assert read_dataset(written(tmp_path, "a.json", json.dumps(RECORDS))) == (PROMPTS, 2)


def test_parquet_is_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"prompt": ["a", "b"]}), path)
    assert read_dataset(path) == (["a", "b"], 0)


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


class Words:
    """A tokenizer: a token per word, the beginning-of-text token in front where asked."""

    def __init__(self, chat_template: str | None) -> None:
        self.chat_template = chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[Any]:
        return ["<s>"] * add_special_tokens + text.split()

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return " ".join(f"<{m['role']}> {m['content']}" for m in messages)


@pytest.mark.parametrize(
    ("template", "chat", "expected"),
    [
        (None, None, [["<s>", "a"], ["<s>", "h"]]),
        ("template", None, [["<s>", "a"], ["<system>", "g", "<user>", "h"]]),
        ("template", True, [["<user>", "a"], ["<system>", "g", "<user>", "h"]]),
        ("template", False, [["<s>", "a"], ["<s>", "h"]]),
    ],
)
def test_the_chat_template_is_for_conversations(
    template: str | None, chat: bool | None, expected: list[list[str]]
) -> None:
    assert tokenize(["a", PROMPTS[-1]], Words(template), chat) == expected


def test_chat_needs_a_template() -> None:
    with pytest.raises(InputError, match="no chat template"):
        tokenize(["a"], Words(None), chat=True)


def test_prompts_are_drawn_by_the_seed_and_repeated_to_fill_the_highest_level() -> None:
    prompts = [[i] * (i + 1) for i in range(20)]
    drawn = choose(prompts, count=5, longest=10, at_least=2, seed=3)
    assert len(drawn) == 5 and all(prompt in prompts[:10] for prompt in drawn)
    assert drawn == choose(prompts, count=5, longest=10, at_least=2, seed=3)
    assert choose(prompts[:2], count=5, longest=None, at_least=3, seed=0) == [[0], [1, 1], [0]]


def test_prompts_must_fit_and_have_tokens() -> None:
    with pytest.raises(InputError, match="the shortest has 3 tokens, and only 2 leave room"):
        choose([[1, 2, 3]], count=1, longest=2, at_least=1, seed=0)
    with pytest.raises(InputError, match="a prompt is empty"):
        choose([[1], []], count=2, longest=None, at_least=1, seed=0)
