# SPDX-License-Identifier: Apache-2.0
"""A rope that mlx-lm would take for another, as it does not read all of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_redrafter.utils.errors import ConfigError


def check_rope(name: str, config: Mapping[str, Any], arguments: Any) -> None:
    """Refuse a target whose positions mlx-lm would turn by another angle than it was trained with.

    transformers 5 writes the base of the angles into `rope_parameters`; many of mlx-lm's models
    look for `rope_theta`, beside it, and else take their default without a word.

    Args:
        name: of the target.
        config: its config.json.
        arguments: `args` of mlx-lm's model.

    Raises:
        ConfigError: the message has the line to add.
    """
    theta = (config.get("rope_parameters") or {}).get("rope_theta")
    taken = getattr(arguments, "rope_theta", None)
    if theta is None or taken is None or hasattr(arguments, "rope_parameters") or taken == theta:
        return
    raise ConfigError(
        f"mlx-lm reads no rope_parameters of {name!r}, and would compute with rope_theta {taken:g} "
        f'in the place of {theta:g}: write "rope_theta": {theta} into its config.json, outside of '
        "rope_parameters"
    )
