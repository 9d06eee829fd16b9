# SPDX-License-Identifier: Apache-2.0
"""A target before its weights are needed: its configuration, tokenizer and fingerprint."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from transformers import AutoConfig, AutoTokenizer

from vllm_redrafter.data.fingerprint import target_fingerprint
from vllm_redrafter.utils.errors import ConfigError, one_line
from vllm_redrafter.utils.hub import check_within_reach


class EmbeddedTokens:
    """The tokens that a target has a row of its embedding for; an engine dies of any other.

    A tokenizer may know more: tokens that were added to it, and not to the model's `num_rows` rows.
    """

    def __init__(self, tokenizer: Any, num_rows: int) -> None:
        self._num_rows = num_rows
        self._without = {id: token for token, id in tokenizer.get_vocab().items() if id >= num_rows}
        self.are_all = not self._without

    def trouble(self, tokens: Sequence[int]) -> str | None:
        """The first token without a row, in words; None where there is none."""
        for token in tokens:
            if token >= self._num_rows:
                return (
                    f"token {self._without.get(token)!r} (id {token}) has no row in the target's "
                    f"embedding of {self._num_rows} rows"
                )
        return None


@dataclass(frozen=True)
class Target:
    """A target, a folder or hub id, whose config.json has been read once."""

    name: str
    config: Any

    @classmethod
    def open(cls, name: str | Path) -> Self:
        """Read a target's configuration; ConfigError where that is not possible."""
        return cls(str(name), _read(AutoConfig, str(name)))

    @property
    def text_config(self) -> Any:
        return self.config.get_text_config()

    @property
    def vocab_size(self) -> int:
        """Rows of its embedding."""
        return int(self.text_config.vocab_size)

    @cached_property
    def tokenizer(self) -> Any:
        """transformers' tokenizer; ConfigError where there is none."""
        return _read(AutoTokenizer, self.name)

    @cached_property
    def embedded(self) -> EmbeddedTokens:
        return EmbeddedTokens(self.tokenizer, self.vocab_size)

    @cached_property
    def fingerprint(self) -> str:
        return target_fingerprint(self.name)


def _read(factory: Any, name: str) -> Any:
    check_within_reach(name, "target")
    try:
        # Explicitly: otherwise it asks, in a terminal, whether to run code of the target's.
        return factory.from_pretrained(os.path.expanduser(name), trust_remote_code=False)
    except Exception as error:  # with odd values in a file it may be any: ZeroDivisionError, say
        raise ConfigError(
            f"target {name!r}: transformers cannot read its tokenizer or configuration; give "
            "the folder or the hub id of a model with both: "
            f"{one_line(error) or type(error).__name__}"
        ) from error
