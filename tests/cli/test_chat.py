# SPDX-License-Identifier: Apache-2.0
"""What is said, shown and remembered."""

import io
import json
import os
import re
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from rich.console import Console

from redrafter_testing import process_trees
from redrafter_testing.engines import server
from redrafter_testing.engines.fake_chat import FakeClient, Typed, chunk
from redrafter_testing.models.reciting_target import ANSWERS, make_reciting_pair
from vllm_redrafter.cli.chat import conversation
from vllm_redrafter.cli.chat.chat_settings import ChatSettings
from vllm_redrafter.cli.chat.conversation import Conversation, chat
from vllm_redrafter.utils.errors import ConfigError

SENT = httpx.Request("POST", "http://server")


@pytest.mark.engine
def test_what_a_server_accepts_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = make_reciting_pair(tmp_path)
    console = Typed(["names"])
    monkeypatch.setattr("builtins.input", console.input)
    speculation = {"target": str(target), "num_speculative_tokens": 4, "adaptive": False}
    arguments = ["--speculative-config", json.dumps(speculation), "--dtype", "float32"]
    command = ["-m", "vllm_redrafter", "serve", str(drafter)]
    command += [*arguments, "--enforce-eager"]
    with server.started(command, process_trees.forking(os.environ)) as url:
        chat(url, None, ChatSettings(temperature=0.0, max_tokens=100), console)
    shown = console.shown()
    assert f"{drafter} at {url}; " in shown and "/help" in shown
    assert ANSWERS["names"] in re.sub(r"\x1b\[[\d;]+m", "", shown)
    assert len(marked(shown)) > 1  # the legend's, and the answer's


def test_a_url_without_a_server_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no server at .*: start `vllm serve` and name its"):
        chat("http://127.0.0.1:9", None, ChatSettings())


def talk(
    answers: list[Any], *said: str, settings: ChatSettings | None = None
) -> tuple[FakeClient, str]:
    """The client behind a conversation of these messages, and what the terminal got."""
    console, client = Typed(said), FakeClient(answers)
    Conversation(client, "target", settings or ChatSettings(), console).converse(console.input)
    return client, console.shown()


def contents(client: FakeClient, number: int) -> list[str]:
    """The messages of a request."""
    return [message["content"] for message in client.asked[number]["messages"]]


def marked(shown: str) -> list[str]:
    return re.findall(r"\x1b\[4;32m(.*?)\x1b\[0m", shown)


def test_accepted_tokens_alone_are_marked_and_rates_leave_the_prompts_step_out() -> None:
    client, shown = talk([[["val"], ["ue", " list", " name"], ["s"]]], "hello")
    assert marked(shown) == ["ue list"]
    assert "value list names" in re.sub(r"\x1b\[[\d;]+m", "", shown)
    assert re.search(r"5 tokens in [\d.]+ s, [\d.]+ per second, 2.00 per step", shown)
    assert client.closed == 1
    step = chunk(" list", [" list", "\ufffd"])  # a character that the next step completes
    assert marked(talk([[["value"], step, chunk("€", ["€"])]], "hello")[1]) == [" list"]
    _, shown = talk([[chunk("value"), chunk(" list")]], "hello")  # without a drafter
    assert not marked(shown) and re.search(r"2 tokens in [\d.]+ s, [\d.]+ per second\x1b", shown)
    in_a_file = Console(file=io.StringIO())
    assert str(conversation.marked("ue list", in_a_file)) == "‹ue list›"


def test_help_is_given_here_and_no_message() -> None:
    client, shown = talk([], "/help")
    assert "/new forgets it" in shown and not client.asked


def test_an_answer_goes_into_the_next_messages_context_until_new_forgets_it() -> None:
    settings = ChatSettings(system_prompt="be brief", temperature=0.0, max_tokens=7)
    answers = [[["value"]], [["name"]], [["list"]]]
    client, _ = talk(answers, "hello", "", "again", "/new", "other", settings=settings)
    assert contents(client, 1) == ["be brief", "hello", "value", "again"]
    assert contents(client, 2) == ["be brief", "other"]
    assert (client.asked[0]["temperature"], client.asked[0]["max_tokens"]) == (0.0, 7)


def test_ctrl_c_ends_the_answer_and_what_was_said_counts() -> None:
    client, shown = talk([[["value"], KeyboardInterrupt()], [["name"]]], "hello", "again")
    assert client.closed == 2
    assert contents(client, 1) == ["hello", "value", "again"]
    assert "…" in shown


def test_a_refused_message_is_said_and_not_remembered() -> None:
    response = httpx.Response(400, request=SENT)
    refused = openai.BadRequestError("the prompt is too long", response=response, body=None)
    answers = [refused, [["name"]]]
    client, shown = talk(answers, "hello", "value \ud83d", "again")
    assert "refused: the prompt is too long" in shown
    assert r"refused: '\ud83d' is half of a character" in shown
    assert contents(client, 1) == ["again"]


def test_a_server_that_is_gone_ends_the_chat() -> None:
    with pytest.raises(ConfigError, match="the server does not answer any more"):
        talk([openai.APIConnectionError(request=SENT)], "hello")
