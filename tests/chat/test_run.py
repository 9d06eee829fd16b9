"""What can be talked to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from redrafter_testing.engines.fake_engine import APPENDING
from redrafter_testing.models.tiny_models import add_tokenizer, make_drafter, make_target
from vllm_redrafter.chat.run import chat_tokenizer
from vllm_redrafter.errors import ConfigError


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = make_target(tmp_path / "target")
    add_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = APPENDING
    tokenizer.save_pretrained(folder)
    return folder


def test_a_drafter_has_the_tokenizer_of_its_target(target: Path, tmp_path: Path) -> None:
    drafter = make_drafter(tmp_path / "drafter")
    config = json.loads((drafter / "config.json").read_text())
    config["speculators_config"]["verifier"] = {"name_or_path": str(target)}
    (drafter / "config.json").write_text(json.dumps(config))
    for model in (target, drafter):
        assert chat_tokenizer(str(model)).chat_template == APPENDING


def test_a_model_without_a_chat_template_is_refused_with_what_to_do(tmp_path: Path) -> None:
    base = make_target(tmp_path / "base")
    add_tokenizer(base)
    with pytest.raises(ConfigError, match="has no chat template: it is no instruct model"):
        chat_tokenizer(str(base))


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        chat_tokenizer(str(tmp_path / "nowhere"))
