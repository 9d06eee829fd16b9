"""Trains one head and replays its drafts: a run."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from torch import Tensor

from heads_parts.eagle import EagleHead, EagleSearch, eagle_loss
from heads_parts.texts import answers_alone, narrowed
from heads_parts.variants import Variant
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.data.rows import ListRows
from vllm_redrafter.training.batches import BatchPlan, TextBatch
from vllm_redrafter.training.estimate import (
    Acceptance,
    batches,
    estimate_acceptance,
    replay_searches,
)
from vllm_redrafter.training.initialisation import most_used_tokens, new_drafter
from vllm_redrafter.training.trainer import Trainer, warmup_cosine
from vllm_redrafter.training.training_config import TrainingConfig
from vllm_redrafter.tree.policy import search_shape

EAGLE_RATE = 0.5
"""Of the learning rate of the others: a transformer layer's."""


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
    if variant.head is None:
        # EAGLE's own engines draft chains, too.
        longest = max(shape.beam_length for shape in shapes)
        shapes.append(ReDrafterConfig(longest, beam_width=1, beam_length=longest))
    figures = {
        text: {str_of(shape): asdict(trained(rows, shape)) for shape in shapes}
        for text, rows in material.measured.items()
    }
    return {"last_loss": loss, "seconds": seconds, "parameters": parameters, "texts": figures}


def str_of(shape: ReDrafterConfig) -> str:
    """`WxL:K`."""
    return f"{shape.beam_width}x{shape.beam_length}:{shape.num_speculative_tokens}"


Measure = Callable[[ListRows, ReDrafterConfig], Acceptance]


def _trained(
    variant: Variant, config: TrainingConfig, material: Material
) -> tuple[Measure, int, float]:
    """How to measure what was trained, its parameters, and its loss at the end."""
    kept = kept_tokens(config, material)
    if variant.head is None:
        return _trained_eagle(config, material, kept)
    config = settings_of(variant, config, material)
    head = new_drafter(material.target, config, kept)
    width = head.config.hidden_width
    learnt = answers_alone(narrowed(material.learnt, width))
    trainer = Trainer(
        head,
        material.target,
        learnt,
        ListRows(),
        config,
        material.shapes[0],
        material.accelerator,
        console=Console(file=io.StringIO()),
    )
    loss = trainer.run().loss

    def measure(rows: ListRows, shape: ReDrafterConfig) -> Acceptance:
        return estimate_acceptance(head.eval(), material.target, narrowed(rows, width), shape)

    return measure, num_parameters(head), loss


def kept_tokens(config: TrainingConfig, material: Material) -> Tensor | None:
    """The draft vocabulary of all heads; None for all tokens."""
    if config.draft_vocab_size is None:
        return None
    size = material.sizes.vocab_size
    return most_used_tokens(material.learnt, size, config.draft_vocab_size)[0]


def settings_of(variant: Variant, config: TrainingConfig, material: Material) -> TrainingConfig:
    """The settings with those of a variant that is no EAGLE head."""
    assert variant.head is not None
    layers = material.layers if variant.fused else ()
    return replace(
        config,
        head=variant.head,
        num_draft_layers=variant.num_draft_layers,
        target_layers=",".join(map(str, layers)) or None,
    )


def num_parameters(head: torch.nn.Module) -> int:
    """All of them, the vocabulary-wide layer's too."""
    return sum(parameter.numel() for parameter in head.parameters())


def new_eagle(material: Material, seed: int) -> EagleHead:
    """Of the target's sizes."""
    sizes = material.sizes
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return EagleHead(sizes.hidden_size, sizes.num_attention_heads, sizes.intermediate_size)


def _trained_eagle(
    config: TrainingConfig, material: Material, kept: Tensor | None
) -> tuple[Measure, int, float]:
    head = new_eagle(material, config.seed)
    weight = material.target.get_output_embeddings().weight
    weight = weight if kept is None else weight[kept]
    width = material.sizes.hidden_size
    embed = material.target.get_input_embeddings()

    def lm_head(hidden: Tensor) -> Tensor:
        return hidden @ weight.T

    def target_tokens(tokens: Tensor) -> Tensor:
        return tokens if kept is None else kept[tokens]

    loss = _train_eagle(head, lm_head, embed, config, narrowed(material.learnt, width))

    @torch.inference_mode()
    def measure(rows: ListRows, shape: ReDrafterConfig) -> Acceptance:
        total = Acceptance(0, 0)
        searched = search_shape(shape, shape.num_speculative_tokens)
        for batch in batches(narrowed(rows, width), 8, "cpu"):
            assert batch.hidden is not None
            text = batch.tokens, batch.hidden
            search = EagleSearch(head, lm_head, target_tokens, embed, *text, searched)
            total += replay_searches(search, batch, shape)
        return total

    return measure, num_parameters(head) + weight.numel(), loss


def _train_eagle(
    head: EagleHead,
    lm_head: Callable[[Tensor], Tensor],
    embed: Callable[[Tensor], Tensor],
    config: TrainingConfig,
    rows: ListRows,
) -> float:
    """The steps of the others, on the same conversations."""
    lengths = answers_alone(rows).lengths
    plan = BatchPlan(lengths, config.block_length, config.batch_size, config.seed)
    num_steps = plan.num_steps(config.epochs)
    optimizer = torch.optim.AdamW(head.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    steps, smoothed = plan.steps(), 0.0
    for step in range(num_steps):
        batch = TextBatch.of([[rows[row]] for block in next(steps) for row in block])
        assert batch.hidden is not None
        loss = eagle_loss(head, lm_head, embed(batch.tokens), batch.hidden, batch.generated)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), config.max_grad_norm)
        factor = EAGLE_RATE * warmup_cosine(step, config.warmup_steps, num_steps)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * factor
        optimizer.step()
        optimizer.zero_grad()
        value = float(loss.detach())
        smoothed = value if step == 0 else 0.95 * smoothed + 0.05 * value
    return smoothed
