# SPDX-License-Identifier: Apache-2.0
"""What transformers reads of a target before its weights are needed."""

from __future__ import annotations

import os
from typing import Any

from vllm_redrafter.utils.errors import ConfigError, one_line
from vllm_redrafter.utils.hub import check_within_reach


def load_from(factory: Any, target: str) -> Any:
    """The target's tokenizer or configuration.

    Args:
        factory: transformers' `AutoTokenizer` or `AutoConfig`.
        target: a folder, or a hub id.

    Raises:
        ConfigError: it cannot be read.
    """
    check_within_reach(target, "target")
    try:
        return factory.from_pretrained(os.path.expanduser(target))
    except Exception as error:  # with odd values in a file it may be any: ZeroDivisionError, say
        raise ConfigError(
            f"target {target!r}: transformers cannot read its tokenizer or configuration; give "
            "the folder or the hub id of a model with both: "
            f"{one_line(error) or type(error).__name__}"
        ) from error
