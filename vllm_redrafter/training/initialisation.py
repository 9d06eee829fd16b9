"""The drafter before its first step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from vllm_redrafter.config import DrafterConfig
from vllm_redrafter.data.rows import TextRow, TextRows
from vllm_redrafter.drafter import Drafter
from vllm_redrafter.errors import ConfigError
from vllm_redrafter.training.config import TrainingConfig


def new_drafter(target: Any, config: TrainingConfig, kept: Tensor | None = None) -> Drafter:
    """A drafter of the target's sizes; its last layer starts as the target's own, where it fits.

    Args:
        target: a transformers causal language model.
        config: the drafter's sizes, the initialisation and its seed.
        kept: [draft tokens] int64, the draft vocabulary; None for all tokens.

    Raises:
        ConfigError: sizes that cannot be.
    """
    sizes = target.config.get_text_config()
    drafter_config = DrafterConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        exit_dim=config.exit_dim or sizes.hidden_size,
        num_draft_layers=config.num_draft_layers,
        draft_vocab_size=None if kept is None else len(kept),
    )
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        drafter = Drafter(drafter_config)
    if kept is not None:
        drafter.keep_tokens(kept)
    lm_head = target.get_output_embeddings()
    if config.init == "lm_head" and lm_head is not None:
        weight = lm_head.weight if kept is None else lm_head.weight[kept.to(lm_head.weight.device)]
        if weight.shape == drafter.last_layer.weight.shape:
            drafter.last_layer.weight.data.copy_(weight)
    return drafter


def most_used_tokens(rows: TextRows, vocab_size: int, kept: int) -> tuple[Tensor, float]:
    """The tokens that the target used most.

    Args:
        rows: the text.
        vocab_size: of the target.
        kept: how many.

    Returns:
        ([kept] int64 in ascending order, the share of the target's tokens that they cover).

    Raises:
        ConfigError: more are asked for than there are.
    """
    if kept > vocab_size:
        raise ConfigError(
            f"training: draft_vocab_size {kept} exceeds the target's vocabulary of {vocab_size}; "
            "leave it out to rank all tokens"
        )
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for row in _each(rows):
        counts += torch.bincount(row.tokens[row.generated], minlength=vocab_size)
    best = counts.sort(descending=True, stable=True).indices[:kept].sort().values
    return best, float(counts[best].sum() / counts.sum().clamp(min=1))


def _each(rows: TextRows) -> Iterator[TextRow]:
    return (rows[index] for index in range(len(rows)))
