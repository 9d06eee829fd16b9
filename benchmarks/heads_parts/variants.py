"""What is compared: draft heads by name, each a kind of head and what it reads of the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_redrafter.training.choices import HeadName


@dataclass(frozen=True)
class Variant:
    """A head to train.

    Attributes:
        name: of the row in tables.
        head: as `train --head` names it.
        fused: it reads three further layers of the target.
        num_draft_layers: its residual blocks; None for the head's own number.
        selector: it gets one, trained after it for as many steps on the same text.
    """

    name: str
    head: HeadName
    fused: bool = False
    num_draft_layers: int | None = None
    selector: bool = False


VARIANTS = (
    Variant("recurrent", "recurrent"),
    Variant("recurrent, fused", "recurrent", fused=True),
    Variant("gated", "gated"),
    Variant("gated, fused", "gated", fused=True),
    Variant("gated, fused, selector", "gated", fused=True, selector=True),
    Variant("gated, a block", "gated", num_draft_layers=1),
    Variant("gated, fused, a block", "gated", fused=True, num_draft_layers=1),
    Variant("Medusa", "medusa"),
)


def named(names: Sequence[str] | None) -> tuple[Variant, ...]:
    """Some of them, in their own order; all without names."""
    return tuple(v for v in VARIANTS if names is None or v.name in names)
