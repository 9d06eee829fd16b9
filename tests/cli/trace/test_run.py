# SPDX-License-Identifier: Apache-2.0
"""What the command refuses before it starts an engine."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from redrafter_testing.engines.fake_engine import APPENDING
from redrafter_testing.engines.generation_runs import make_folder
from vllm_redrafter.cli.trace.run import prompt_tokens, trace
from vllm_redrafter.utils.errors import ConfigError


@pytest.mark.parametrize(
    ("prompt", "page", "message"),
    [
        ("Hello", "missing/a.html", r"missing/a\.html' cannot be written: No such file"),
        ("Hello", ".", "cannot be written: Is a directory"),
        ("Hello", "/proc/a.html", r"--html '/proc/a\.html' cannot be written"),
        (" ", "a.html", "--prompt ' '"),
        ("Hello", "a.html", r"^target .*: transformers cannot read its tokenizer"),
    ],
)
def test_what_cannot_be_traced_is_refused_before_an_engine_starts(
    prompt: str, page: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        trace(str(tmp_path), None, prompt, 8, tmp_path / page)


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
