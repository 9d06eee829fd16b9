# SPDX-License-Identifier: Apache-2.0
"""Prompts: which are read, what is made of them, and which are chosen."""

import json
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from throughput_parts.methods import InputError
from throughput_parts.prompts import SUITES, choose, read_dataset, tokenize

from vllm_redrafter.data.target import EmbeddedTokens

WORDS = ["<s>", "a", "g", "h", "<system>", "<user>"]
CONVERSATION = [{"role": "system", "content": "g"}, {"role": "user", "content": "h"}]


class Words:
    """A tokenizer: a token per word, the beginning-of-text token in front where asked."""

    def __init__(self, chat_template: str | None) -> None:
        self.chat_template = chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[Any]:
        words = ["<s>"] * add_special_tokens + text.split()
        return [WORDS.index(word) for word in words]

    def get_vocab(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(WORDS)}

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return " ".join(f"<{m['role']}> {m['content']}" for m in messages)


EMBEDDED = EmbeddedTokens(Words(None), len(WORDS))


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
    rows, left_out = tokenize(["a", CONVERSATION], Words(template), EMBEDDED, chat)
    assert [[WORDS[token] for token in row] for row in rows] == expected
    assert not left_out.count


def test_chat_needs_a_template() -> None:
    with pytest.raises(InputError, match="no chat template"):
        tokenize(["a"], Words(None), EMBEDDED, chat=True)


class Numbers(Words):
    """A tokenizer of numbers; its template refuses system messages."""

    def get_vocab(self) -> dict[str, int]:
        return {str(i): i for i in range(12)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[Any]:
        return [int(word) for word in text.split()]

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        if messages[0]["role"] == "system":
            raise TemplateError("no system message")
        return messages[0]["content"]


def test_what_the_target_cannot_be_asked_is_left_out_and_named() -> None:
    tokenizer = Numbers("template")
    embedded = EmbeddedTokens(tokenizer, num_rows=10)
    rows, left_out = tokenize(["1 2", "3 11", CONVERSATION, "4"], tokenizer, embedded, chat=True)
    assert rows == [[1, 2], [4]]
    assert left_out.reasons() == [
        "rows with a token that has no embedding: 1, the first: prompt 2: token '11' (id 11) has "
        "no row in the target's embedding of 10 rows",
        "rows that the target's chat template refuses: 1, the first: prompt 3: the "
        "target's chat template refuses it: no system message",
    ]
    with pytest.raises(InputError, match=r"can be asked none of the prompts: rows with a token"):
        tokenize(["10"], tokenizer, embedded, chat=None)


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


def jsonl(folder: Path, *rows: object) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_prompts_and_conversations_are_read_up_to_the_users_first_turn(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "text": "not this"},
        {"turns": ["c", "d"]},
        {"messages": CONVERSATION},
        {"question": "2 apples?", "answer": "#### 2"},
        {"conversations": [{"from": "gpt", "value": "an answer to nothing"}]},
    ]
    by_task, left_out = read_dataset(jsonl(tmp_path, *rows))
    asked = [[{"role": "user", "content": text}] for text in ("c", "2 apples?")]
    assert by_task == {None: ["a", asked[0], CONVERSATION, asked[1]]}
    assert left_out.count == 1


def test_rows_are_divided_by_their_categories(tmp_path: Path) -> None:
    rows = [{"category": name, "turns": [name, "then"]} for name in ("b", "a", "b")]
    by_task, _ = read_dataset(jsonl(tmp_path, *rows))
    assert {task: len(prompts) for task, prompts in by_task.items()} == {"b": 2, "a": 1}
    assert list(by_task) == ["b", "a"]
    with pytest.raises(InputError, match=r"line 2: no 'category'.* every row one"):
        read_dataset(jsonl(tmp_path, rows[0], {"prompt": "c"}))


def test_the_prompts_that_come_with_it_are_of_four_tasks() -> None:
    by_task, left_out = read_dataset(SUITES)
    sizes = {task: len(prompts) for task, prompts in by_task.items()}
    assert sizes == {"chat": 32, "summary": 16, "code": 16, "math": 16}, "as the README says"
    assert not left_out.count
