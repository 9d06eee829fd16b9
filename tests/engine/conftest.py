"""Engines for the tests of engine/: they take half a minute to start, so few are, and shared."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Read by vLLM in this process and in those it starts.
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # collective_rpc with a function
TESTS = str(Path(__file__).parent.parent)
os.environ["PYTHONPATH"] = os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")])


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_models import add_tokenizer, make_target

    folder = make_target(tmp_path_factory.mktemp("target"))
    add_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_models import make_drafter

    return make_drafter(tmp_path_factory.mktemp("drafter"))
