# SPDX-License-Identifier: Apache-2.0
"""What is said, shown and remembered, and the server that the chat starts."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console
from typer.testing import CliRunner

from redrafter_testing import process_trees
from redrafter_testing.engines.fake_chat import FakeClient, Typed, chunk, gone, refused
from redrafter_testing.models.reciting_target import ANSWERS, make_reciting_pair
from redrafter_testing.process_trees import eventually, status
from vllm_redrafter.cli.chat.chat_settings import ChatSettings
from vllm_redrafter.cli.chat.conversation import Conversation
from vllm_redrafter.cli.chat.run import chat, own_server, serve_and_chat
from vllm_redrafter.cli.main import app
from vllm_redrafter.utils.errors import ConfigError

# The worker ends with its server by itself, as vLLM's do.
SERVER = """
import http.server, os, subprocess, sys
worker = subprocess.Popen(sys.argv[1].split(), stdin=subprocess.PIPE)

class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"{os.getpid()} {worker.pid}".encode())

port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Healthy).serve_forever()
"""

PARENT = """
import signal, sys, time
from rich.console import Console
from vllm_redrafter.cli.chat.run import own_server

# A test's process may ignore it, and so would this one.
signal.signal(signal.SIGINT, signal.default_int_handler)
with own_server([sys.executable, "-c", sys.argv[1], "sleep 1000"], Console(quiet=True)) as (url, _):
    try:
        print(url, flush=True)
        time.sleep(1000)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.stdin.readline()
"""


def pids(url: str) -> list[int]:
    """Of the fake server and its worker."""
    with urllib.request.urlopen(url) as response:
        return [int(pid) for pid in response.read().split()]


def test_one_that_does_not_start_shows_the_end_of_its_log() -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    with (
        pytest.raises(ConfigError, match=r"the server ended; the end of .*log:\nno such model"),
        own_server(command, Console(quiet=True)),
    ):
        pytest.fail("it is said to answer")


def test_the_server_does_not_hear_ctrl_c_and_ends_with_the_chat_and_its_workers() -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-c", PARENT, SERVER]
    with process_trees.started(command, **pipes, process_group=0) as process:
        assert process.stdin is not None and process.stdout is not None
        server, worker = pids(process.stdout.readline().strip())
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
        assert psutil.STATUS_ZOMBIE not in (status(server), status(worker))
        process.stdin.write("\n")
        process.stdin.close()
        assert process.wait(timeout=20) == 0
        assert eventually(lambda: {status(server), status(worker)} == {psutil.STATUS_ZOMBIE})


@pytest.mark.engine
def test_a_drafter_is_served_and_its_accepted_tokens_are_tinted(tmp_path: Path) -> None:
    target, drafter = make_reciting_pair(tmp_path)
    console = Typed(["names"])
    speculation = {"target": str(target), "num_speculative_tokens": 4, "adaptive": False}
    arguments = ["--speculative-config", json.dumps(speculation), "--dtype", "float32"]
    settings = ChatSettings(temperature=0.0, max_tokens=100)
    serve_and_chat(str(drafter), [*arguments, "--enforce-eager"], settings, console)
    shown = console.shown()
    assert ANSWERS["names"] in re.sub(r"\x1b\[[\d;]+m", "", shown)
    assert re.search(r"\x1b\[32m.+\x1b\[0m.* per step", shown, re.DOTALL)


def test_a_url_without_a_server_and_one_beside_a_drafter_are_refused() -> None:
    url = "http://127.0.0.1:9"
    with pytest.raises(ConfigError, match=r"no server at .*: start `vllm serve` and name its"):
        chat(url, None, ChatSettings())
    result = CliRunner().invoke(app, ["chat", "drafter", "--url", url])
    assert result.exit_code == 1 and "leave either out" in result.output


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


def tinted(shown: str) -> list[str]:
    return re.findall(r"\x1b\[32m(.*?)\x1b\[0m", shown)


def test_accepted_tokens_alone_are_tinted_and_rates_leave_the_prompts_step_out() -> None:
    client, shown = talk([[["val"], ["ue", " list", " name"], ["s"]]], "hello")
    assert tinted(shown) == ["ue list"]
    assert "value list names" in re.sub(r"\x1b\[\d+m", "", shown)
    assert re.search(r"5 tokens, [\d.]+ per second, 2.00 per step", shown)
    assert client.closed == 1
    step = chunk(" list", [" list", "\ufffd"])  # a character that the next step completes
    assert tinted(talk([[["value"], step, chunk("€", ["€"])]], "hello")[1]) == [" list"]
    _, shown = talk([[chunk("value"), chunk(" list")]], "hello")  # without a drafter
    assert not tinted(shown) and re.search(r"2 tokens, [\d.]+ per second\x1b", shown)


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
    answers = [refused("the prompt is too long"), [["name"]]]
    client, shown = talk(answers, "hello", "value \ud83d", "again")
    assert "refused: the prompt is too long" in shown
    assert r"refused: '\ud83d' is half of a character" in shown
    assert contents(client, 1) == ["again"]


def test_a_server_that_is_gone_ends_the_chat() -> None:
    with pytest.raises(ConfigError, match="the server does not answer any more"):
        talk([gone()], "hello")
