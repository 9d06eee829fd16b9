# SPDX-License-Identifier: Apache-2.0
"""What a single request may ask for: how many tree nodes its verifications have at most.

Offline `SamplingParams(extra_args={"redrafter": {"spec_tokens": 4}})`; through the OpenAI server,
whose `vllm_xargs` hold no nested objects, `"vllm_xargs": {"redrafter.spec_tokens": 4}`.
"""

import reprlib
from collections.abc import Mapping
from typing import Any

from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.names import METHOD

KEY = "spec_tokens"
FLAT_KEY = f"{METHOD}.{KEY}"

shorten = reprlib.Repr()
shorten.maxstring = shorten.maxlong = shorten.maxother = 80


def requested_nodes(extra_args: Mapping[str, Any] | None, max_nodes: int) -> int:
    """How many nodes a request, checked by `check_request`, wants verified; at most `max_nodes`."""
    if not extra_args:
        return max_nodes
    nodes = extra_args.get(FLAT_KEY)
    if nodes is None:
        nodes = extra_args.get(METHOD, {}).get(KEY)
    return max_nodes if nodes is None else min(int(nodes), max_nodes)


def check_request(extra_args: Mapping[str, Any] | None, max_nodes: int) -> None:
    """Refuse a request's options where they cannot be met; K is `max_nodes`.

    Raises:
        ConfigError: an unknown option, one given twice, or a number out of range.
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
    given = [n for n in (options.get(KEY), extra_args.get(FLAT_KEY)) if n is not None]
    if len(given) > 1:
        raise ConfigError(f"{FLAT_KEY} is given twice, {_shown(given[0])} and {_shown(given[1])}")
    for nodes in given:
        if type(nodes) is not int or not 0 <= nodes <= max_nodes:
            raise ConfigError(
                f"{FLAT_KEY} must be an integer from 0 to {max_nodes} (the engine's "
                f"num_speculative_tokens), got {_shown(nodes)}"
            )


def _shown(value: Any) -> str:
    """A value from outside, cut: it may be long, and goes into a log."""
    return shorten.repr(value)
