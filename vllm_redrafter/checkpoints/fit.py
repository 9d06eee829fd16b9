# SPDX-License-Identifier: Apache-2.0
"""Does a drafter fit a target? The sizes that both must have, and the layers that it reads."""

from collections.abc import Iterator
from typing import Any

from vllm_redrafter.heads.head import HeadConfig
from vllm_redrafter.heads.target_layers import missing_layers
from vllm_redrafter.utils.errors import ConfigError


def misfits(head: HeadConfig, hidden_size: int | None, vocab_size: int | None) -> Iterator[str]:
    """How a drafter's sizes differ from a target's, a line each; None is a size not configured."""
    compared = (
        ("hidden size", head.hidden_size, hidden_size),
        ("vocabulary size", head.vocab_size, vocab_size),
    )
    for what, drafter, target in compared:
        if drafter != target:
            yield f"the drafter's {what} is {drafter}, the target's {target}"


def misfits_of(head: HeadConfig, target_config: Any, with_layers: bool = True) -> list[str]:
    """The same by a target's transformers configuration, of which the text model counts.

    `with_layers`: check the layers that the drafter reads, too.
    """
    text = target_config.get_text_config()
    sizes = (getattr(text, name, None) for name in ("hidden_size", "vocab_size"))
    num_layers = getattr(text, "num_hidden_layers", None)
    missing = missing_layers(head.target_layers, num_layers) if with_layers else None
    return [*misfits(head, *sizes), *([missing] if missing else [])]


def require_fit(name: str, target: str | None, reasons: list[str]) -> None:
    """Raise a ConfigError where there are reasons why a drafter does not fit a target."""
    if reasons:
        where = "this target" if target is None else f"the target {target!r}"
        raise ConfigError(
            f"{name} does not fit {where}: {'; '.join(reasons)}: use the drafter that was trained "
            "for this target"
        )
