# SPDX-License-Identifier: Apache-2.0
"""How to speculate with a drafter: the user's settings, then those that its checkpoint records."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from vllm_redrafter.checkpoints.drafter_files import CONFIG_FILE, resolve_file
from vllm_redrafter.checkpoints.reading import SHAPE_KEYS, Checkpoint, shape_of
from vllm_redrafter.config import USUAL_CANDIDATES, ReDrafterConfig
from vllm_redrafter.utils.errors import ConfigError

NODES = "num_speculative_tokens"


def speculation(
    checkpoint: Checkpoint | None,
    given: Mapping[str, Any],
    default_max_nodes: Callable[[], int | None] = lambda: None,
    owner: str = "speculative config",
) -> ReDrafterConfig:
    """The given settings, completed from the checkpoint.

    Args:
        checkpoint: the drafter's; None to verify prompt-lookup (n-gram) matches alone.
        given: by the names of `ReDrafterConfig`.
        default_max_nodes: limits K if it is not given; None does not. Called only if needed.
        owner: what messages begin with.
    """
    recorded = {} if checkpoint is None else _recorded_besides(checkpoint, given)
    shape = {**recorded, **given}
    if NODES not in given and (limit := default_max_nodes()) is not None:
        shape[NODES] = min(shape.get(NODES, limit), limit)
    if NODES not in shape:
        reason = "the checkpoint does not record it" if checkpoint else "there is no drafter"
        raise ConfigError(
            f"{owner}: num_speculative_tokens (--spec-tokens) is missing, and {reason}: the most "
            "tree nodes verified per request and step, between 1 and 127"
        )
    if checkpoint is not None:
        return _with_drafter(checkpoint, given, shape, owner)
    config = ReDrafterConfig(**shape)
    if not config.context_matches:
        raise ConfigError(
            f"{owner}: without a drafter and with context_matches=0 there is nothing to verify: "
            "name a drafter, or leave context_matches out"
        )
    return config


def _with_drafter(
    checkpoint: Checkpoint, given: Mapping[str, Any], shape: dict[str, Any], owner: str
) -> ReDrafterConfig:
    head = checkpoint.head
    if head.max_beam_length is not None and "beam_length" not in shape:
        shape["beam_length"] = min(ReDrafterConfig.beam_length, head.max_beam_length)
    usual = USUAL_CANDIDATES if head.selected_depths else 0
    recorded = usual if "candidates" in given else shape.pop("candidates", usual)
    config = ReDrafterConfig(**shape)
    # A default must not reject longer or wider drafts than it is for.
    if "candidates" not in given and config.beam_length <= 1 + head.selected_depths:
        is_enough = not 0 < recorded < config.beam_width
        config = replace(config, candidates=recorded if is_enough else USUAL_CANDIDATES)
    head.require_beam_length(owner, config.beam_length, config.candidates)
    return config


def _recorded_besides(checkpoint: Checkpoint, given: Mapping[str, Any]) -> dict[str, Any]:
    """The checkpoint's settings beside those given; checked here, where the file can be named."""
    needed = {key: value for key, value in shape_of(checkpoint.values).items() if key not in given}
    for key, value in needed.items():
        try:
            ReDrafterConfig(**{NODES: 1, key: value})
        except ConfigError as error:
            where = resolve_file(checkpoint.model, CONFIG_FILE, checkpoint.revision)
            raise ConfigError(
                f"{where}: {SHAPE_KEYS[key]} in proposal_methods cannot be "
                f"served: {error}; give {key} yourself, or record another shape in the checkpoint "
                "with `vllm-redrafter evaluate --record`"
            ) from error
    return needed
