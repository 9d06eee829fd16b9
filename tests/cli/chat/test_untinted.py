"""A conversation with a server that tells text alone."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from redrafter_testing.engines.fake_chat import FakeClient
from redrafter_testing.models.tiny_models import add_tokenizer, make_target
from vllm_redrafter.cli.chat.chat_settings import ChatSettings
from vllm_redrafter.cli.chat.untinted import UntintedConversation
from vllm_redrafter.data.vocabulary import EmbeddedTokens


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = make_target(tmp_path_factory.mktemp("target"))
    add_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def talk(tokenizer: Any, answer: list[Any]) -> tuple[UntintedConversation, str]:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, color_system="standard", width=200)
    conversation = UntintedConversation(
        FakeClient([answer], seconds=0.01),
        "target",
        tokenizer,
        EmbeddedTokens(tokenizer, 512),
        ChatSettings(),
        console,
        2,
    )
    conversation.answer("hello")
    return conversation, shown.getvalue()


def test_the_text_is_shown_and_remembered_without_colours(tokenizer: Any) -> None:
    conversation, shown = talk(tokenizer, ["value", " [1]", " list"])
    assert conversation.messages[-1] == {"role": "assistant", "content": "value [1] list"}
    assert shown.startswith("value [1] list\n")
    number = len(tokenizer("value [1] list", add_special_tokens=False)["input_ids"])
    assert re.search(rf"{number} tokens, [\d.]+ per second\x1b", shown)


def test_ctrl_c_ends_the_answer_and_counts_what_came(tokenizer: Any) -> None:
    conversation, shown = talk(tokenizer, ["value", " list", KeyboardInterrupt()])
    assert conversation.messages[-1]["content"] == "value list"
    number = len(tokenizer("value list", add_special_tokens=False)["input_ids"])
    assert "…" in shown and f"{number} tokens" in shown


def test_an_answer_without_text_has_no_tokens(tokenizer: Any) -> None:
    _, shown = talk(tokenizer, [])
    assert "0 tokens" in shown
