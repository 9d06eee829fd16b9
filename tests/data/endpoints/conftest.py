"""A target's folder, and servers that pretend to serve it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from redrafter_testing.engines.fake_engine import APPENDING
from redrafter_testing.engines.fake_server import FakeServer
from redrafter_testing.models.tiny_models import add_tokenizer, make_target
from vllm_redrafter.data import generation
from vllm_redrafter.data.endpoints import client, endpoint, engine, served_target
from vllm_redrafter.data.target_files import load_from

Serve = Callable[..., FakeServer]


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_target(tmp_path_factory.mktemp("folder") / "target")
    add_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = APPENDING
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(target: Path) -> Any:
    return AutoTokenizer.from_pretrained(target)


@pytest.fixture
def serve(tokenizer: Any) -> Iterator[Serve]:
    """Starts servers, which end with the test."""
    servers: list[FakeServer] = []

    def start(**values: Any) -> FakeServer:
        servers.append(FakeServer(values.pop("tokenizer", tokenizer), **values))
        return servers[-1]

    yield start
    for server in servers:
        server.die()


LOADED = cache(load_from)


@pytest.fixture(autouse=True)
def _loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (generation, served_target):
        monkeypatch.setattr(module, "load_from", LOADED)


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits of seconds take hundredths."""
    monkeypatch.setattr(client, "RETRIES", 0)
    monkeypatch.setattr(endpoint, "FIRST_DELAY_SECONDS", 0.02)
    monkeypatch.setattr(endpoint, "LONGEST_DELAY_SECONDS", 0.1)
    monkeypatch.setattr(endpoint, "LOOK_EVERY_SECONDS", 0.05)
    monkeypatch.setattr(engine, "READ_AGAIN_SECONDS", 0.05)
    monkeypatch.setattr(engine, "TICK_SECONDS", 0.05)
