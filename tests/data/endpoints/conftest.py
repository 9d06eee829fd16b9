# SPDX-License-Identifier: Apache-2.0
"""A target's folder, and servers that pretend to serve it."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from redrafter_testing.engines.fake_engine import APPENDING
from redrafter_testing.engines.fake_server import FakeServer
from redrafter_testing.engines.generation_runs import make_folder
from vllm_redrafter.data.endpoints import client
from vllm_redrafter.data.target import Target

Serve = Callable[..., FakeServer]


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("folder") / "target", APPENDING)


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


OPENED = cache(Target.open)


@pytest.fixture(autouse=True)
def _opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "open", OPENED)


@pytest.fixture(autouse=True)
def _without_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "RETRIES", 0)
