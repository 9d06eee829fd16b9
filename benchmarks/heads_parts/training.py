# SPDX-License-Identifier: Apache-2.0
"""What is compared, and a run: one head is trained, and its drafts are replayed.

A head that tells candidates is measured twice: ranking the vocabulary at every level, and among
USUAL_CANDIDATES.
"""

import io
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from accelerate import Accelerator
from rich.console import Console
from shared_parts.arguments import shape_text

from heads_parts.texts import answers_alone, narrowed
from vllm_redrafter.config import USUAL_CANDIDATES, ReDrafterConfig
from vllm_redrafter.data.rows import ListRows
from vllm_redrafter.heads.head import DraftHead
from vllm_redrafter.heads.target_layers import named_layers
from vllm_redrafter.replay.estimate import estimate_acceptance
from vllm_redrafter.training.initialisation import (
    continued_drafter,
    most_used_tokens,
    new_drafter,
    with_selector,
)
from vllm_redrafter.training.resolution import loop_plan, new_head_config
from vllm_redrafter.training.trainer import Trainer
from vllm_redrafter.training.training_config import HeadName, TrainingConfig


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
)


@dataclass(frozen=True)
class Material:
    """What all runs share.

    Attributes:
        target: its ends, frozen.
        learnt: rows to learn from, with hidden states [T, (1 + n) H].
        measured: by a text's name, such as `greedy`: rows to measure on.
        layers: the n.
        shapes: of the trees that are measured.
        accelerator: of the trainings.
    """

    target: Any
    learnt: ListRows
    measured: Mapping[str, ListRows]
    layers: Sequence[int]
    shapes: Sequence[ReDrafterConfig]
    accelerator: Accelerator


def run(variant: Variant, config: TrainingConfig, material: Material) -> dict[str, Any]:
    """Train a head and measure it; the figures."""
    started = time.monotonic()
    config = settings_of(variant, config, material)
    head = new_variant(config, material)
    loss = _train(head, config, material)
    if variant.selector:
        sizes = with_selector(head.config, config.unroll_steps)
        head = continued_drafter(head, sizes, True, config.seed)
        _train(head, config, material, trains_selector=True)
    seconds = time.monotonic() - started
    parameters = sum(parameter.numel() for parameter in head.parameters())
    figures = {
        text: _measured(head.eval(), rows, material) for text, rows in material.measured.items()
    }
    return {"last_loss": loss, "seconds": seconds, "parameters": parameters, "texts": figures}


def _train(
    head: DraftHead, config: TrainingConfig, material: Material, trains_selector: bool = False
) -> float:
    """Train it in place; its loss at the end."""
    learnt = answers_alone(narrowed(material.learnt, head.config.hidden_width))
    plan = loop_plan(config, material.shapes[0], learnt, trains_selector=trains_selector)
    trainer = Trainer(
        head,
        material.target,
        learnt,
        ListRows(),
        plan,
        material.accelerator,
        console=Console(file=io.StringIO()),
    )
    return trainer.run().loss


def _measured(head: DraftHead, rows: ListRows, material: Material) -> dict[str, Any]:
    """Steps and tokens by shape."""
    rows = narrowed(rows, head.config.hidden_width)
    figures = {}
    for shape in material.shapes:
        for count in (0, USUAL_CANDIDATES) if head.config.selected_depths else (0,):
            name = shape_text(shape) + (f", {count} candidates" if count else "")
            among = replace(shape, candidates=count, context_matches=0)
            figures[name] = asdict(estimate_acceptance(head, material.target, rows, among))
    return figures


def new_variant(config: TrainingConfig, material: Material) -> DraftHead:
    """A head before its first step; all heads have the same draft vocabulary."""
    sizes = material.target.config.get_text_config()
    assert config.draft_vocab_size is not None
    kept = most_used_tokens(material.learnt, sizes.vocab_size, config.draft_vocab_size)[0]
    lm_head = material.target.get_output_embeddings()
    head = new_head_config(config, sizes.vocab_size, sizes.hidden_size)
    return new_drafter(head, lm_head, kept, config.seed)


def settings_of(variant: Variant, config: TrainingConfig, material: Material) -> TrainingConfig:
    """The settings with those of the variant."""
    layers = material.layers if variant.fused else ()
    return replace(
        config,
        head=variant.head,
        num_draft_layers=variant.num_draft_layers,
        target_layers=named_layers(layers),
    )
