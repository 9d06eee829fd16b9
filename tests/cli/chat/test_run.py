"""What can be talked to."""

from __future__ import annotations

import importlib.util
import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from redrafter_testing.engines.fake_engine import APPENDING
from redrafter_testing.engines.generation_runs import with_extra_token, with_template
from redrafter_testing.models.tiny_models import add_tokenizer, make_drafter, make_target
from vllm_redrafter.cli.chat.chat_settings import ChatSettings
from vllm_redrafter.cli.chat.run import chat, chat_tokenizer, context_matches_of
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.utils.errors import ConfigError


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
        tokenizer, embedded = chat_tokenizer(str(model), None)
        assert tokenizer.chat_template == APPENDING and embedded.are_all


@pytest.mark.parametrize(
    ("template", "system_prompt"), [("<|extra|>" + APPENDING, None), (APPENDING, "<|extra|>")]
)
def test_a_template_or_system_prompt_without_embeddings_is_refused(
    target: Path, template: str, system_prompt: str | None
) -> None:
    with_extra_token(with_template(target, template))
    with pytest.raises(ConfigError, match=r"target .*: token '<.extra.>' .id 512. has no row"):
        chat_tokenizer(str(target), system_prompt)


def test_a_model_without_a_chat_template_is_refused_with_what_to_do(tmp_path: Path) -> None:
    base = make_target(tmp_path / "base")
    add_tokenizer(base)
    with pytest.raises(ConfigError, match="has no chat template: it is no instruct model"):
        chat_tokenizer(str(base), None)


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        chat_tokenizer(str(tmp_path / "nowhere"), None)


@pytest.mark.parametrize("given", ["--speculative-config", "--speculative_config", "-sc"])
def test_matches_are_as_many_as_the_server_is_told_of(given: str) -> None:
    config = '{"context_matches": 3, "beam_width": 2}'
    assert context_matches_of(["--dtype", "float32", given, config, "--seed", "1"]) == 3
    assert context_matches_of([f"--speculative-config={config}"]) == 3


@pytest.mark.parametrize(
    "arguments",
    [[], ["-sc"], ["-sc", "{"], ["-sc", "[]"], ["-sc", "{}"], ["-sc", '{"context_matches": null}']],
)
def test_where_nothing_is_said_of_matches_the_default_counts(arguments: list[str]) -> None:
    assert context_matches_of(arguments) == ReDrafterConfig.context_matches


@pytest.mark.skipif(importlib.util.find_spec("mlx_lm") is None, reason="mlx-lm is not installed")
def test_where_mlx_lm_serves_it_answers_and_the_chat_says_what_is_missing(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = make_drafter(tmp_path / "drafter")
    console = Console(file=io.StringIO(), width=400)
    lines = iter(["value 3"])

    def read(prompt: str) -> str:
        if (line := next(lines, None)) is None:
            raise EOFError
        return line

    monkeypatch.setattr(console, "input", read)
    settings = ChatSettings(temperature=0.0, max_tokens=12)
    chat(str(target), str(drafter), ["--log-level", "INFO"], settings, console, "mlx")
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "nothing is tinted" in shown and "refused" not in shown
    assert re.search(r"^\d+ tokens, [\d.]+ per second$", shown, re.MULTILINE)
