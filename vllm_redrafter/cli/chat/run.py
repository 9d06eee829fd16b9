"""From a target's name to a conversation with it."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
from rich.console import Console
from transformers import AutoTokenizer

from vllm_redrafter.checkpoints.drafter_files import read_config
from vllm_redrafter.checkpoints.reading import is_redrafter, verifier_of
from vllm_redrafter.cli.accepted import legend
from vllm_redrafter.cli.chat.chat_settings import ChatSettings
from vllm_redrafter.cli.chat.conversation import NEW, Conversation, converse
from vllm_redrafter.cli.chat.server import OwnServer
from vllm_redrafter.cli.chat.service import Service
from vllm_redrafter.cli.chat.untinted import UNTINTED, UntintedConversation
from vllm_redrafter.cli.serving_backend import Backend, serving_backend
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.data.conversation_rows import Conversation as Said
from vllm_redrafter.data.target_files import load_from
from vllm_redrafter.data.turns import PromptRenderer
from vllm_redrafter.data.vocabulary import EmbeddedTokens
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.json_files import parse_json


def chat(
    model: str,
    drafter: str | None,
    arguments: Sequence[str],
    settings: ChatSettings,
    console: Console | None = None,
    backend: Backend | None = None,
) -> None:
    """Serve a target and talk to it.

    Args:
        model: the target, or a drafter that records it.
        drafter: of the target; None for none, or if `model` is one.
        arguments: more of the server's.
        settings: how answers are drawn.
        console: where to talk.
        backend: what serves; None for what is installed.

    Raises:
        ConfigError: a target without a chat template; nothing that serves is installed, or it does
            not start.
    """
    console = console or Console()
    service = Service.of(backend or serving_backend(), model, drafter, arguments)
    tokenizer, embedded = chat_tokenizer(model, settings.system_prompt)
    context_matches = context_matches_of(arguments)
    kind = Conversation if service.tells_tokens else UntintedConversation
    with tempfile.NamedTemporaryFile(
        prefix="vllm-redrafter-chat-", suffix=".log", delete=False
    ) as made:
        log = Path(made.name)
    with OwnServer(service, log) as server:
        with console.status(f"{service.name} starts (its log: {log})"):
            server.wait_until_ready()
        console.print(
            f"Ctrl-C stops an answer, Ctrl-D ends the chat, {NEW} forgets what was said; "
            + (legend(context_matches) if service.tells_tokens else UNTINTED),
            style="dim",
        )
        client = openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)
        with client:
            conversation = kind(
                client, service.model, tokenizer, embedded, settings, console, context_matches
            )
            converse(conversation, console, lambda: console.input("[bold]> [/]"))
    log.unlink(missing_ok=True)


def context_matches_of(arguments: Sequence[str]) -> int:
    """How many continuations found in the text vLLM is told to verify; the default if it is not.

    What vLLM will refuse counts as nothing said.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--speculative-config", "--speculative_config", "-sc", nargs="?")
    try:
        config = parse_json(parser.parse_known_args(arguments)[0].speculative_config or "{}")
        return int(config["context_matches"])
    except (ValueError, TypeError, KeyError, OverflowError):
        return ReDrafterConfig.context_matches


def chat_tokenizer(model: str, system_prompt: str | None) -> tuple[Any, EmbeddedTokens]:
    """The tokenizer of a target, or of the target that a drafter records; and what it can be sent.

    Raises:
        ConfigError: it cannot be read, has no chat template, or is no fast one; or the target has
            no embedding of what the template or the system prompt makes.
    """
    values = read_config(model, what="target")
    target = (verifier_of(values) or model) if is_redrafter(values) else model
    tokenizer = load_from(AutoTokenizer, target)
    if not tokenizer.chat_template:
        raise ConfigError(
            f"target {target!r} has no chat template: it is no instruct model, and cannot chat; "
            "serve it with `vllm serve` or `vllm-redrafter mlx-serve`, and let it go on with a text"
        )
    if not tokenizer.is_fast:
        raise ConfigError(
            f"target {target!r} has a tokenizer in Python alone, which cannot decode as tokens "
            "come: give its folder a tokenizer.json"
        )
    embedded = EmbeddedTokens.of(target, tokenizer)
    if not embedded.are_all:
        hello = Said(("Hello",), source=f"target {target!r}")
        PromptRenderer(tokenizer, embedded, system_prompt).check(hello)
    return tokenizer, embedded
