"""What is said, shown and remembered; and the same in a terminal, with Ctrl-C and Ctrl-D."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
import sys
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from redrafter_testing.engines.fake_chat import FakeClient, gone, refused
from redrafter_testing.models.tiny_models import add_tokenizer, make_target
from vllm_redrafter.cli.chat.chat_settings import ChatSettings
from vllm_redrafter.cli.chat.conversation import Conversation, StepDecoder, converse
from vllm_redrafter.data.vocabulary import EmbeddedTokens
from vllm_redrafter.utils.errors import ConfigError

GREEN, PLAIN = "\x1b[32m", "\x1b[0m"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_target(tmp_path_factory.mktemp("target"))
    add_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def tokens(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def talk(
    tokenizer: Any,
    answers: list[Any],
    *said: str,
    settings: ChatSettings | None = None,
    num_rows: int = 512,
    context_matches: int = 0,
) -> tuple[Conversation, FakeClient, str]:
    """A conversation after these messages, its client, and what the terminal got."""
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, color_system="standard", width=200)
    client = FakeClient(answers)
    embedded = EmbeddedTokens(tokenizer, num_rows)
    conversation = Conversation(
        client, "target", tokenizer, embedded, settings or ChatSettings(), console, context_matches
    )
    lines = iter(said)

    def read() -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    converse(conversation, console, read)
    return conversation, client, shown.getvalue()


def test_accepted_tokens_are_tinted_and_the_targets_own_are_not(tokenizer: Any) -> None:
    first, drafted, own = (tokens(tokenizer, text) for text in ("value", " list list", " name"))
    conversation, client, shown = talk(tokenizer, [[first, [*drafted, *own]]], "hello")
    assert conversation.messages == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "value list list name"},
    ]
    tinted = "".join(re.findall(r"\x1b\[32m(.*?)\x1b\[0m", shown))
    text = tokenizer.decode(drafted + own[:-1])
    assert tinted == text
    assert client.closed == 1


def test_tokens_that_were_found_in_the_text_have_a_colour_of_their_own(tokenizer: Any) -> None:
    prompt, found, drafted, own = (
        tokens(tokenizer, text) for text in ("list value", " value", " name", " list")
    )
    first, following = prompt[:1], [*prompt[1:], *drafted, *own]
    assert prompt[1:] == found, "the token of a word depends on what stands before"
    answer = [(prompt, first), following]
    _, _, shown = talk(tokenizer, [answer], "hello", context_matches=1)
    assert "".join(re.findall(r"\x1b\[36m(.*?)\x1b\[0m", shown)) == " value"
    assert "".join(re.findall(r"\x1b\[32m(.*?)\x1b\[0m", shown)).startswith(" name")
    assert f"{len(found)} found in the text" in shown
    _, _, shown = talk(tokenizer, [answer], "hello", context_matches=0)
    assert "\x1b[36m" not in shown and "found in the text" not in shown


def test_rates_leave_the_prompts_step_out(tokenizer: Any) -> None:
    steps = [tokens(tokenizer, "value"), *[tokens(tokenizer, " list") * 3] * 2]
    _, _, shown = talk(tokenizer, [steps], "hello")
    number = len(steps[0]) + 2 * len(steps[1])
    assert re.search(rf"{number} tokens, [\d.]+ per second, {len(steps[1]):.2f} per step", shown)


def test_an_answer_goes_into_the_next_messages_context(tokenizer: Any) -> None:
    answers = [[tokens(tokenizer, "value")], [tokens(tokenizer, "name")]]
    settings = ChatSettings(system_prompt="be brief", temperature=0.0, max_tokens=7)
    _, client, _ = talk(tokenizer, answers, "hello", "", "again", settings=settings)
    assert [message["content"] for message in client.asked[1]["messages"]] == [
        *("be brief", "hello", "value", "again")
    ]
    assert (client.asked[0]["temperature"], client.asked[0]["max_tokens"]) == (0.0, 7)


def test_new_forgets_all_but_the_system_message(tokenizer: Any) -> None:
    answers = [[tokens(tokenizer, "value")], [tokens(tokenizer, "name")]]
    settings = ChatSettings(system_prompt="be brief")
    _, client, _ = talk(tokenizer, answers, "hello", "/new", "again", settings=settings)
    assert [message["content"] for message in client.asked[1]["messages"]] == ["be brief", "again"]


def test_ctrl_c_ends_the_answer_and_what_was_said_counts(tokenizer: Any) -> None:
    answers = [[tokens(tokenizer, "value"), KeyboardInterrupt()], [tokens(tokenizer, "name")]]
    _, client, shown = talk(tokenizer, answers, "hello", "again")
    assert client.closed == 2
    assert [m["content"] for m in client.asked[1]["messages"]] == ["hello", "value", "again"]
    assert "…" in shown


def test_a_refused_message_is_said_and_not_remembered(tokenizer: Any) -> None:
    answers = [refused("the prompt is too long"), [tokens(tokenizer, "name")]]
    _, client, shown = talk(tokenizer, answers, "hello", "again")
    assert "refused: the prompt is too long" in shown
    assert [m["content"] for m in client.asked[1]["messages"]] == ["again"]


def test_what_would_end_the_server_is_not_sent(tokenizer: Any) -> None:
    tokenizer = deepcopy(tokenizer)
    rows = len(tokenizer)
    tokenizer.add_tokens(["<|extra|>"])
    said = ("value <|extra|>", "value \ud83d", "again")
    answers = [[tokens(tokenizer, "name")]]
    _, client, shown = talk(tokenizer, answers, *said, num_rows=rows)
    assert f"refused: token '<|extra|>' (id {rows}) has no row in the target's" in shown
    assert r"refused: '\ud83d' is half of a character" in shown
    assert [[m["content"] for m in asked["messages"]] for asked in client.asked] == [["again"]]


def test_a_server_that_is_gone_ends_the_chat(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="the server does not answer any more"):
        talk(tokenizer, [gone()], "hello")


def test_a_character_of_several_tokens_is_shown_when_all_of_it_is_there(tokenizer: Any) -> None:
    parts = tokens(tokenizer, "€")
    assert len(parts) > 1, "the tokenizer has a token for it"
    decoder = StepDecoder(tokenizer)
    assert list(decoder.pieces(parts[:-1], 0)) == []
    assert list(decoder.pieces([parts[-1], *tokens(tokenizer, " name")][:1], 0)) == [("€", "")]


SCRIPT = """
import signal, sys
from rich.console import Console
from transformers import AutoTokenizer
from redrafter_testing.engines.fake_chat import FakeClient
from vllm_redrafter.cli.chat.conversation import Conversation, converse
from vllm_redrafter.cli.chat.chat_settings import ChatSettings
from vllm_redrafter.data.vocabulary import EmbeddedTokens

# A test's process may ignore it, and so would this one.
signal.signal(signal.SIGINT, signal.default_int_handler)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
word = tokenizer(" value", add_special_tokens=False)["input_ids"]
console = Console()
client = FakeClient([[word] * 1000, [word]], seconds=0.02)
embedded = EmbeddedTokens(tokenizer, 512)
conversation = Conversation(client, "target", tokenizer, embedded, ChatSettings(), console, 0)
converse(conversation, console, lambda: console.input("> "))
print("messages:", len(conversation.messages))
"""


def test_in_a_terminal_ctrl_c_stops_an_answer_and_ctrl_d_the_chat(folder: Path) -> None:
    ours, theirs = pty.openpty()
    chat = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=_take_terminal,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    terminal = Terminal(ours)
    try:
        terminal.wait_for("> ")
        terminal.type("hello\n")
        terminal.wait_for("value\x1b[32m")
        terminal.type("\x03")
        terminal.wait_for("per step")
        terminal.wait_for("> ")
        terminal.type_until("\x03", "Ctrl-D ends the chat")
        terminal.type("again\n")
        terminal.wait_for("2 tokens")
        terminal.type("\x04")
        terminal.wait_for("messages: 4")
        assert chat.wait(timeout=20) == 0
    finally:
        chat.kill()
        chat.wait()
        os.close(ours)


class Terminal:
    """The other end of a pseudo-terminal; what was waited for is read and done with."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.read = ""

    def type(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def type_until(self, typed: str, text: str, every: float = 2.0, times: int = 30) -> None:
        """Type it again where nothing came of it.

        Python sees a signal between two bytecodes, or where it interrupts a system call: one that
        comes after the prompt, just before `input` begins to read, waits for the next key.
        """
        for _ in range(times):
            self.type(typed)
            if self._comes(text, every):
                return
        raise AssertionError(f"typed {typed!r} {times} times for {text!r}, read {self.read!r}")

    def wait_for(self, text: str, seconds: float = 60.0) -> None:
        assert self._comes(text, seconds), f"waited for {text!r}, read {self.read[-2000:]!r}"

    def _comes(self, text: str, seconds: float) -> bool:
        ends = time.monotonic() + seconds
        while text not in self.read:
            ready, _, _ = select.select([self.descriptor], [], [], max(ends - time.monotonic(), 0))
            if not ready:
                return False
            self.read += os.read(self.descriptor, 4096).decode(errors="replace")
        self.read = self.read.split(text, 1)[1]
        return True


def _take_terminal() -> None:
    """Make the pseudo-terminal the one whose Ctrl-C reaches this process."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
