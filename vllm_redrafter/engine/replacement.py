# SPDX-License-Identifier: Apache-2.0
"""Another checkpoint in the drafter's place, between two steps of an engine that serves.

All ranks read and check it before any of them changes. What was made for the drafter at start-up,
such as CUDA graphs, and what the budget has learned stay: so the head must be the same.
"""

from collections.abc import Callable
from dataclasses import asdict
from itertools import chain
from typing import Protocol

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from vllm_redrafter.checkpoints.reading import Checkpoint
from vllm_redrafter.engine.log import logger
from vllm_redrafter.utils.errors import ConfigError


class _Drafter(Protocol):
    """What drafts on a rank; `checkpoint` is what it was read from, None without a drafter."""

    checkpoint: Checkpoint | None

    def replacement(self, checkpoint: Checkpoint) -> Callable[[], object]:
        """Read and check another one of the same head; returns what puts it in the place."""


def of_all_ranks(reasons: list[str]) -> list[str]:
    """Each rank's reasons, on all ranks of the engine: a collective call."""
    for group in (get_tp_group(), get_pp_group()):
        if group.world_size > 1:
            found: list[list[str]] = [[]] * group.world_size
            torch.distributed.all_gather_object(found, reasons, group=group.cpu_group)
            reasons = list(dict.fromkeys(chain.from_iterable(found)))
    return reasons


def read_replacement(
    drafter: _Drafter | None,
    model: str | None = None,
    revision: str | None = None,
    obstacle: str | None = None,
) -> Callable[[], None] | None:
    """Read what is to take a drafter's place: a collective call.

    Args:
        drafter: this rank's; None on pipeline stages without one.
        model, revision: a folder or a hub id; None for the checkpoint in use, as it is now.
        obstacle: why nothing can be replaced now.

    Returns:
        What replaces it on this rank; None where a later rank raises the error.

    Raises:
        ConfigError: a rank finds the checkpoint unreadable, of another head, or not finite. On the
            engine's last rank, as vLLM reads the ranks' results up to the first error.
    """
    refused, replace = [obstacle] if obstacle else [], _nothing
    try:
        if drafter is not None and not refused:
            replace = _read(drafter, model, revision)
    except Exception as error:  # whatever it is: other ranks wait
        refused = [str(error)]
    for reason in of_all_ranks(refused):
        if get_pp_group().is_last_rank and get_tp_group().is_last_rank:
            raise ConfigError(reason)
        return None
    return replace


def swap(
    drafter: _Drafter | None, model: str, revision: str | None, obstacle: str | None
) -> dict[str, str] | None:
    """Replace a drafter for `collective_rpc`; see `read_replacement`. Returns what drafts now."""
    if (replace := read_replacement(drafter, model, revision, obstacle)) is None:
        return None
    replace()
    logger.info("ReDrafter drafts with %s from now on", model)
    return {"drafter": model}


def _nothing() -> None:
    """On a rank that has no drafter."""


def _read(drafter: _Drafter, model: str | None, revision: str | None) -> Callable[[], None]:
    current = drafter.checkpoint
    if current is None:
        if model is None:
            return _nothing
        raise ConfigError(f"{model}: no ReDrafter is in use; start with --spec-model {model}")
    if model is None:
        model, revision = current.model, current.revision
    checkpoint = Checkpoint.open(model, revision)
    if checkpoint.head != current.head:
        heads = (current.head, checkpoint.head)
        known, new = ({"model_type": head.model_type, **asdict(head)} for head in heads)
        changed = [name for name in {**known, **new} if known.get(name) != new.get(name)]
        differences = ", ".join(f"{name} {known.get(name)} -> {new.get(name)}" for name in changed)
        raise ConfigError(
            f"{model} has another head than the drafter in use: {differences}; restart the engine "
            "with it, or train one of the same sizes (--initial-drafter; then --add-selector)"
        )
    put = drafter.replacement(checkpoint)

    def replace() -> None:
        put()
        drafter.checkpoint = checkpoint

    return replace
