"""Trains one head and replays its drafts: a run."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from accelerate import Accelerator
from rich.console import Console
from shared_parts.arguments import shape_text

from heads_parts.texts import answers_alone, narrowed
from heads_parts.variants import Variant
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.data.rows import ListRows
from vllm_redrafter.heads.head import DraftHead
from vllm_redrafter.training.estimate import (
    Acceptance,
    estimate_acceptance,
)
from vllm_redrafter.training.initialisation import most_used_tokens, new_drafter
from vllm_redrafter.training.resolution import loop_plan, new_head_config
from vllm_redrafter.training.trainer import Trainer
from vllm_redrafter.training.training_config import TrainingConfig


@dataclass(frozen=True)
class Material:
    """What all runs share.

    Attributes:
        target: its ends, frozen.
        learnt: rows to learn from, with hidden states [T, (1 + n) H] and top tokens.
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

    @property
    def sizes(self) -> Any:
        return self.target.config.get_text_config()


def run(variant: Variant, config: TrainingConfig, material: Material) -> dict[str, Any]:
    """Train a head and measure it; the figures."""
    started = time.monotonic()
    trained, parameters, loss = _trained(variant, config, material)
    seconds = time.monotonic() - started
    shapes = list(material.shapes)
    figures = {
        text: {shape_text(shape): asdict(trained(rows, shape)) for shape in shapes}
        for text, rows in material.measured.items()
    }
    return {"last_loss": loss, "seconds": seconds, "parameters": parameters, "texts": figures}


Measure = Callable[[ListRows, ReDrafterConfig], Acceptance]


def _trained(
    variant: Variant, config: TrainingConfig, material: Material
) -> tuple[Measure, int, float]:
    """How to measure what was trained, its parameters, and its loss at the end."""
    config = settings_of(variant, config, material)
    head = new_variant(config, material)
    width = head.config.hidden_width
    learnt = answers_alone(narrowed(material.learnt, width))
    trainer = Trainer(
        head,
        material.target,
        learnt,
        ListRows(),
        loop_plan(config, material.shapes[0], learnt, head.config),
        material.accelerator,
        console=Console(file=io.StringIO()),
    )
    loss = trainer.run().loss

    def measure(rows: ListRows, shape: ReDrafterConfig) -> Acceptance:
        return estimate_acceptance(head.eval(), material.target, narrowed(rows, width), shape)

    return measure, sum(parameter.numel() for parameter in head.parameters()), loss


def new_variant(config: TrainingConfig, material: Material) -> DraftHead:
    """A head before its first step; all heads have the same draft vocabulary."""
    vocabulary, hidden = material.sizes.vocab_size, material.sizes.hidden_size
    assert config.draft_vocab_size is not None
    kept = most_used_tokens(material.learnt, vocabulary, config.draft_vocab_size)[0]
    lm_head = material.target.get_output_embeddings() if config.init == "lm_head" else None
    return new_drafter(new_head_config(config, vocabulary, hidden), lm_head, kept, config.seed)


def settings_of(variant: Variant, config: TrainingConfig, material: Material) -> TrainingConfig:
    """The settings with those of the variant."""
    layers = material.layers if variant.fused else ()
    return replace(
        config,
        head=variant.head,
        num_draft_layers=variant.num_draft_layers,
        target_layers=",".join(map(str, layers)) or None,
    )
