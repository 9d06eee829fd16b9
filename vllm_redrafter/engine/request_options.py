# SPDX-License-Identifier: Apache-2.0
"""What a single request may ask for: how many tree nodes its verifications have at most, and to
share nothing with others.

Offline `SamplingParams(extra_args={"redrafter": {"spec_tokens": 4}})`; through the OpenAI server,
whose `vllm_xargs` hold no nested objects, `"vllm_xargs": {"redrafter.spec_tokens": 4}`.
"""

import reprlib
from collections.abc import Hashable, Mapping
from typing import Any

from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.names import METHOD

KEYS = NODES, SHARE = "spec_tokens", "share"
FLAT_KEY = f"{METHOD}.{NODES}"
SALT_KEY = f"{METHOD}.salt"
"""Where `plugin.py` puts a request's `cache_salt`, which vLLM keeps from its workers."""

shorten = reprlib.Repr()
shorten.maxstring = shorten.maxlong = shorten.maxother = 80
_shown = shorten.repr
"""A value from outside, cut: it may be long, and goes into a log."""


def requested_nodes(extra_args: Mapping[str, Any] | None, max_nodes: int) -> int:
    """How many nodes a request, checked by `check_request`, wants verified; at most `max_nodes`."""
    nodes = _option(extra_args, NODES)
    return max_nodes if nodes is None else min(int(nodes), max_nodes)


def partition_of(extra_args: Mapping[str, Any] | None, adapter: Any) -> Hashable | None:
    """Which requests may see each other's answers: those for which this is equal.

    Args:
        extra_args: of a request checked by `check_request`.
        adapter: its LoRA adapter, as vLLM has it, or None.

    Returns:
        None for a request that shares nothing.
    """
    if _option(extra_args, SHARE) in (None, 1):
        of_adapter = adapter and (adapter.lora_name, adapter.lora_path)
        return (extra_args or {}).get(SALT_KEY), of_adapter
    return None


def _option(extra_args: Mapping[str, Any] | None, key: str) -> Any:
    if not extra_args:
        return None
    value = extra_args.get(f"{METHOD}.{key}")
    return extra_args.get(METHOD, {}).get(key) if value is None else value


def check_request(extra_args: Mapping[str, Any] | None, max_nodes: int) -> None:
    """Refuse a request's options where they cannot be met; K is `max_nodes`.

    ConfigError: an unknown option, one given twice, or a number out of range.
    """
    if not extra_args:
        return
    if not isinstance(extra_args, Mapping):
        raise ConfigError(f"extra_args must be an object, got {_shown(extra_args)}")
    options = extra_args.get(METHOD, {})
    if not isinstance(options, Mapping) or set(options) - {*KEYS}:
        raise ConfigError(
            f"{METHOD} takes an object with {' and '.join(map(repr, KEYS))} alone, or "
            f"{FLAT_KEY!r} and the like beside it, got {_shown(options)}"
        )
    flat = {f"{METHOD}.{key}": key for key in KEYS}
    names = [key for key in extra_args if isinstance(key, str) and key.startswith(f"{METHOD}.")]
    if unknown := sorted({*names} - {*flat}):
        raise ConfigError(
            f"there is no {', '.join(map(_shown, unknown))}: a request may ask for "
            f"{' and '.join(map(repr, flat))} alone; everything else is the engine's"
        )
    for name, key in flat.items():
        given = [value for value in (options.get(key), extra_args.get(name)) if value is not None]
        if len(given) > 1:
            raise ConfigError(f"{name} is given twice, {_shown(given[0])} and {_shown(given[1])}")
    nodes, share = (_option(extra_args, key) for key in KEYS)
    if nodes is not None and (type(nodes) is not int or not 0 <= nodes <= max_nodes):
        raise ConfigError(
            f"{FLAT_KEY} must be an integer from 0 to {max_nodes} (the engine's "
            f"num_speculative_tokens), got {_shown(nodes)}"
        )
    # The OpenAI server makes 0 of false.
    if not (share is None or (isinstance(share, int) and share in (0, 1))):
        raise ConfigError(f"{METHOD}.{SHARE} must be true or false, got {_shown(share)}")
