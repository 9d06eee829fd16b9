# SPDX-License-Identifier: Apache-2.0
"""What a single request may ask for: at most so many tree nodes in its verifications.

Offline `SamplingParams(extra_args={"redrafter": {"spec_tokens": 4}})`; through the OpenAI server,
whose `vllm_xargs` hold no nested objects, `"vllm_xargs": {"redrafter.spec_tokens": 4}`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.names import METHOD

KEY = "spec_tokens"
FLAT_KEY = f"{METHOD}.{KEY}"

shorten = reprlib.Repr()
shorten.maxstring = shorten.maxlong = shorten.maxother = 80


def spec_tokens(extra_args: Mapping[str, Any] | None, limit: int) -> int:
    """The most nodes that a request wants verified in a step, at most `limit`.

    Args:
        extra_args: of its sampling parameters, checked by `check_request` when it came in.
        limit: what it gets at most.
    """
    if not extra_args:
        return limit
    node_limit = extra_args.get(FLAT_KEY)
    if node_limit is None:
        node_limit = extra_args.get(METHOD, {}).get(KEY)
    return limit if node_limit is None else min(int(node_limit), limit)


def check_request(extra_args: Mapping[str, Any] | None, limit: int) -> None:
    """Refuse what a request cannot have.

    Args:
        extra_args: of its sampling parameters.
        limit: K.

    Raises:
        ConfigError: the number is none, or out of range; an option that there is not; or both
            ways of writing it at once.
    """
    if not extra_args:
        return
    if not isinstance(extra_args, Mapping):
        raise ConfigError(f"extra_args must be an object, got {_shown(extra_args)}")
    options = extra_args.get(METHOD, {})
    if not isinstance(options, Mapping) or set(options) - {KEY}:
        raise ConfigError(
            f"{METHOD} takes an object with {KEY!r} alone, or {FLAT_KEY!r} beside it, "
            f"got {_shown(options)}"
        )
    names = [key for key in extra_args if isinstance(key, str) and key.startswith(f"{METHOD}.")]
    if unknown := sorted({*names} - {FLAT_KEY}):
        raise ConfigError(
            f"there is no {', '.join(map(_shown, unknown))}: a request may ask for {FLAT_KEY!r} "
            "alone; everything else is the engine's"
        )
    node_limits = [w for w in (options.get(KEY), extra_args.get(FLAT_KEY)) if w is not None]
    if len(node_limits) > 1:
        raise ConfigError(
            f"{FLAT_KEY} is given twice, {_shown(node_limits[0])} and {_shown(node_limits[1])}"
        )
    for node_limit in node_limits:
        if (
            isinstance(node_limit, bool)
            or not isinstance(node_limit, int)
            or not 0 <= node_limit <= limit
        ):
            raise ConfigError(
                f"{FLAT_KEY} must be an integer from 0 to {limit} (the engine's "
                f"num_speculative_tokens), got {_shown(node_limit)}"
            )


def _shown(value: Any) -> str:
    """A value from outside: it may be long, and what is said of it goes into a log."""
    return shorten.repr(value)
