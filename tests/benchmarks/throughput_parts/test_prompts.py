"""Prompts: what is made of them, and which are chosen."""

from __future__ import annotations

from typing import Any

import pytest
from throughput_parts.methods import InputError
from throughput_parts.prompts import choose, tokenize

CONVERSATION = [{"role": "system", "content": "g"}, {"role": "user", "content": "h"}]


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
    assert tokenize(["a", CONVERSATION], Words(template), chat) == expected


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
