# SPDX-License-Identifier: Apache-2.0
"""Halves of characters, which JSON and the command line can bring."""

import json

import pytest

from vllm_redrafter.cli.chat.chat_settings import ChatSettings
from vllm_redrafter.data.generation_settings import GenerationSettings, PromptSettings
from vllm_redrafter.data.text_checks import half_character
from vllm_redrafter.utils.errors import ConfigError


def test_halves_of_characters_are_found() -> None:
    assert half_character(json.loads(r'"a \ud83d b"')) == r"'\ud83d'"
    assert half_character(json.loads(r'"\udc00"')) == r"'\udc00'"
    assert half_character(json.loads(r'"\ud83d\ude00 é"')) is None


@pytest.mark.parametrize("settings", [GenerationSettings, PromptSettings, ChatSettings])
def test_a_system_prompt_that_is_not_utf_8_is_refused(settings: type) -> None:
    given = b"caf\xe9".decode(errors="surrogateescape")  # as Python reads the command line
    with pytest.raises(ConfigError, match=r"--system-prompt 'caf\\udce9': .* give text in UTF-8"):
        settings(system_prompt=given)
