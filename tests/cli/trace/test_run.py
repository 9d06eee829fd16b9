# SPDX-License-Identifier: Apache-2.0
"""What the command refuses before it starts an engine."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from redrafter_testing.engines.fake_engine import APPENDING
from redrafter_testing.engines.generation_runs import make_folder
from vllm_redrafter.cli.trace.run import prompt_tokens, trace
from vllm_redrafter.utils.errors import ConfigError


def test_a_page_in_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing/a\.html' cannot be written: No such file"):
        trace(str(tmp_path), None, "Hello", 8, tmp_path / "missing" / "a.html")


def test_a_page_where_a_folder_is_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written: Is a directory"):
        trace(str(tmp_path), None, "Hello", 8, tmp_path)


def test_an_empty_prompt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--prompt ' '"):
        trace(str(tmp_path), None, " ", 8, tmp_path / "a.html")


def test_a_target_that_is_no_models_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^target .*: transformers cannot read its tokenizer"):
        trace(str(tmp_path), None, "Hello", 8, tmp_path / "a.html")


def test_a_page_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--html '/proc/a\.html' cannot be written"):
        trace(str(tmp_path), None, "Hello", 8, Path("/proc/a.html"))


def test_a_prompt_is_written_by_templates_of_texts_and_of_parts(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_folder(tmp_path / "target", APPENDING))
    tokens = prompt_tokens(tokenizer, "value 1")
    assert tokenizer.decode(tokens) == "<s>user\nvalue 1<s>assistant\n"
    parts = "{% for p in m.content %}{{ p.text }}{% endfor %}"
    tokenizer.chat_template = APPENDING.replace("{{ m['content'] }}", parts)
    assert prompt_tokens(tokenizer, "value 1") == tokens
    tokenizer.chat_template = "{{ messages[0].content + 1 }}"
    with pytest.raises(
        ConfigError, match=r"^--prompt: the target's .* can only .*; trace a target"
    ):
        prompt_tokens(tokenizer, "value 1")
