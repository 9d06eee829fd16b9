# SPDX-License-Identifier: Apache-2.0
"""Which of the target's layers a drafter reads, beside the last hidden state.

Layer i is the output of the target's i-th layer, the residual added, before any norm: 1 to N - 1 of
N. vLLM counts so for EAGLE-3's heads, and so do transformers' `hidden_states`.
"""

from collections.abc import Sequence
from typing import Any

from vllm_redrafter.utils.errors import ConfigError

AUTO = "auto"
"""A low layer, the middle one and a high one: EAGLE-3's choice, where the target has them."""

NONE = "none"
"""The last hidden state alone."""

MOST = 64
"""Of these layers: more than any drafter reads."""

OPTION = "--target-layers"

LAYERS_HELP = (
    f"layers counted from 1, with commas between, or {NONE}, or {AUTO} for 2, N/2 and N-3 of N"
)


def checked_layers(layers: Any, where: str) -> tuple[int, ...]:
    """Layers as a tuple; `where` begins the message that refuses what is no ascending list."""
    numbers = layers if isinstance(layers, list | tuple) else None
    if numbers is None or any(isinstance(i, bool) or not isinstance(i, int) for i in numbers):
        raise ConfigError(f"{where} must be a list of the target's layers, got {layers!r}")
    if any(i < 1 for i in numbers) or sorted(set(numbers)) != list(numbers):
        raise ConfigError(
            f"{where} must be layers of the target from 1 on, each once and in ascending order, "
            f"got {list(numbers)}"
        )
    if len(numbers) > MOST:
        raise ConfigError(
            f"{where} must be at most {MOST} layers of the target, got {len(numbers)}"
        )
    return tuple(numbers)


def named_layers(layers: Sequence[int]) -> str:
    """Layers as the command line has them."""
    return ",".join(map(str, layers)) or NONE


def parsed_layers(text: str) -> tuple[int, ...] | None:
    """Layers as the command line has them: () for `none`, None for `auto`."""
    if text == NONE:
        return ()
    if text == AUTO:
        return None
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"{OPTION} must be numbers with commas between, {AUTO} or {NONE}, got {text!r}"
        ) from error
    return checked_layers(numbers, OPTION)


def layers_of(text: str, num_layers: int | None) -> tuple[int, ...]:
    """The target's layers that the command line names; refused where it does not have them."""
    layers = parsed_layers(text)
    if layers is None:
        if num_layers is None:
            raise ConfigError(
                f"{OPTION}: {AUTO} is asked for, and the target does not say how many layers it "
                f"has: give {NONE}"
            )
        wanted = {2, num_layers // 2, num_layers - 3}
        return tuple(sorted(wanted & set(range(1, num_layers))))
    if missing := missing_layers(layers, num_layers):
        raise ConfigError(f"{OPTION}: {missing}")
    return layers


def missing_layers(layers: Sequence[int], num_layers: int | None) -> str | None:
    """Why a drafter cannot read these layers of a target: a sentence; None if it can."""
    if not layers or (num_layers is not None and layers[-1] < num_layers):
        return None
    asked = ", ".join(map(str, layers))
    if num_layers is None:
        return f"layers {asked} are asked for, and the target does not say how many it has"
    return (
        f"layers {asked} are asked for, and the target has {num_layers}: beside the last one, "
        f"whose output the last hidden state is, 1 to {num_layers - 1} can be read"
    )
