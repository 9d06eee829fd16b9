"""A target that listens: with speculation it answers what it answers without, on both engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from redrafter_testing.engines.cpu_engine import cpu_engine
from redrafter_testing.engines.interpreted_engine import interpreted_engine
from redrafter_testing.models.audio_target import HIDDEN, VOCAB, Listening, make_audio_target
from redrafter_testing.models.tiny_models import make_drafter

pytestmark = pytest.mark.engine

ARGUMENTS: dict[str, Any] = {"limit_mm_per_prompt": {"audio": 1}, "max_model_len": 256}
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_audio_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def speculative(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    drafter = make_drafter(tmp_path_factory.mktemp("drafter"), VOCAB, HIDDEN)
    return {"model": str(drafter), "num_speculative_tokens": 8}


def test_on_cpu(target: Path, speculative: dict[str, Any]) -> None:
    with cpu_engine(target, **ARGUMENTS) as llm:
        expected = llm.run(Listening(6, 24))
        silent = llm.run(Listening(6, 24, silent=True))
    # Answers are too short for the budget, which begins with plain steps.
    fixed = {**speculative, "adaptive": False}
    with cpu_engine(target, speculative_config=fixed, **ARGUMENTS) as llm:
        assert llm.run(Listening(6, 24)) == expected
        accepted = llm.counter(ACCEPTED)
    assert accepted > 11, "trees were hardly used"
    assert [a == b for a, b in zip(expected, silent, strict=True)] == [True, False, False] * 2


def test_on_model_runner_v2(target: Path, speculative: dict[str, Any]) -> None:
    with interpreted_engine(target, **ARGUMENTS) as llm:
        expected = llm.run(Listening(4, 16))
    with interpreted_engine(target, speculative_config=speculative, **ARGUMENTS) as llm:
        assert llm.run(Listening(4, 16)) == expected
        assert llm.counter(ACCEPTED) > 5, "trees were hardly used"
