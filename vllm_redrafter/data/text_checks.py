# SPDX-License-Identifier: Apache-2.0
"""Is a text one that UTF-8 can express? Tokenizers take no other."""

from __future__ import annotations

from vllm_redrafter.utils.errors import ConfigError


def half_character(text: str) -> str | None:
    """The first lone surrogate, as Python writes it; None where there is none.

    JSON can express one, and a byte that is not UTF-8 becomes one on the command line.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return repr(text[error.start])
    return None


def check_system_prompt(text: str | None) -> None:
    """Refuse a --system-prompt that no tokenizer takes.

    Raises:
        ConfigError: there is half of a character in it.
    """
    if text is not None and (half := half_character(text)):
        raise ConfigError(
            f"--system-prompt {text!r}: {half} is half of a character or a byte that is not UTF-8: "
            "give text in UTF-8"
        )
