# SPDX-License-Identifier: Apache-2.0
"""What is said, shown and remembered; and the same in a terminal, with Ctrl-C and Ctrl-D."""

import os
import pty
import re
import select
import subprocess
import sys
import time
from typing import Any

import pytest

from redrafter_testing.engines.fake_chat import FakeClient, Typed, chunk, gone, refused
from vllm_redrafter.cli.chat.chat_settings import ChatSettings
from vllm_redrafter.cli.chat.conversation import Conversation, converse
from vllm_redrafter.utils.errors import ConfigError


def talk(
    answers: list[Any], *said: str, settings: ChatSettings | None = None
) -> tuple[FakeClient, str]:
    """The client behind a conversation of these messages, and what the terminal got."""
    console, client = Typed(said), FakeClient(answers)
    conversation = Conversation(client, "target", settings or ChatSettings(), console)
    converse(conversation, console, console.input)
    return client, console.shown()


def contents(client: FakeClient, number: int) -> list[str]:
    """The messages of a request."""
    return [message["content"] for message in client.asked[number]["messages"]]


def tinted(shown: str) -> list[str]:
    return re.findall(r"\x1b\[32m(.*?)\x1b\[0m", shown)


def test_accepted_tokens_are_tinted_and_the_targets_own_are_not() -> None:
    client, shown = talk([[["val"], ["ue", " list", " name"], ["s"]]], "hello")
    assert tinted(shown) == ["ue list"]
    assert "value list names" in re.sub(r"\x1b\[\d+m", "", shown)
    assert client.closed == 1


def test_drafted_tokens_are_tinted_where_the_targets_own_shows_nothing_yet() -> None:
    step = chunk(" list", [" list", "\ufffd"])  # a character that the next step completes
    _, shown = talk([[["value"], step, chunk("€", ["€"])]], "hello")
    assert tinted(shown) == [" list"]


def test_rates_leave_the_prompts_step_out() -> None:
    _, shown = talk([[["value"], [" a", " b", " c"], [" d"]]], "hello")
    assert re.search(r"5 tokens, [\d.]+ per second, 2.00 per step", shown)


def test_without_a_drafter_nothing_is_said_of_steps() -> None:
    for answer in ([["value"], [" list"]], [chunk("value"), chunk(" list")]):
        _, shown = talk([answer], "hello")
        assert not tinted(shown)
        assert re.search(r"2 tokens, [\d.]+ per second\x1b", shown)


def test_an_answer_goes_into_the_next_messages_context() -> None:
    settings = ChatSettings(system_prompt="be brief", temperature=0.0, max_tokens=7)
    client, _ = talk([[["value"]], [["name"]]], "hello", "", "again", settings=settings)
    assert contents(client, 1) == ["be brief", "hello", "value", "again"]
    assert (client.asked[0]["temperature"], client.asked[0]["max_tokens"]) == (0.0, 7)


def test_new_forgets_all_but_the_system_message() -> None:
    settings = ChatSettings(system_prompt="be brief")
    client, _ = talk([[["value"]], [["name"]]], "hello", "/new", "again", settings=settings)
    assert contents(client, 1) == ["be brief", "again"]


def test_ctrl_c_ends_the_answer_and_what_was_said_counts() -> None:
    client, shown = talk([[["value"], KeyboardInterrupt()], [["name"]]], "hello", "again")
    assert client.closed == 2
    assert contents(client, 1) == ["hello", "value", "again"]
    assert "…" in shown


def test_a_refused_message_is_said_and_not_remembered() -> None:
    answers = [refused("the prompt is too long"), [["name"]]]
    client, shown = talk(answers, "hello", "value \ud83d", "again")
    assert "refused: the prompt is too long" in shown
    assert r"refused: '\ud83d' is half of a character" in shown
    assert contents(client, 1) == ["again"]


def test_a_server_that_is_gone_ends_the_chat() -> None:
    with pytest.raises(ConfigError, match="the server does not answer any more"):
        talk([gone()], "hello")


SCRIPT = """
import signal
from rich.console import Console
from redrafter_testing.engines.fake_chat import FakeClient
from vllm_redrafter.cli.chat.conversation import Conversation, converse
from vllm_redrafter.cli.chat.chat_settings import ChatSettings

# A test's process may ignore it, and so would this one.
signal.signal(signal.SIGINT, signal.default_int_handler)
console = Console()
client = FakeClient([[[" value", " list"]] * 1000, [["name"]]], seconds=0.02)
conversation = Conversation(client, "target", ChatSettings(), console)
converse(conversation, console, lambda: console.input("> "))
print("messages:", len(conversation.messages))
"""


def test_in_a_terminal_ctrl_c_stops_an_answer_and_ctrl_d_the_chat() -> None:
    ours, theirs = pty.openpty()
    chat = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
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
        terminal.wait_for("value\x1b[0m list")
        terminal.type("\x03")
        terminal.wait_for(" tokens")
        terminal.wait_for("> ")
        terminal.type_until("\x03", "Ctrl-D ends the chat")
        terminal.type("again\n")
        terminal.wait_for("1 tokens")
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
