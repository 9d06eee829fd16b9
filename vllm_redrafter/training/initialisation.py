# SPDX-License-Identifier: Apache-2.0
"""The drafter before its first step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllm_redrafter.checkpoints.reading import load_drafter
from vllm_redrafter.data.rows import TextRows
from vllm_redrafter.heads.head import DraftHead, HeadConfig
from vllm_redrafter.heads.registry import build_head
from vllm_redrafter.utils.errors import ConfigError


def new_drafter(
    sizes: HeadConfig, lm_head: Any = None, kept: Tensor | None = None, seed: int = 0
) -> DraftHead:
    """A new drafter, its weights drawn by the seed.

    Args:
        sizes: its own.
        lm_head: the target's output layer, as which its last layers begin where they are of the
            same shape; None to draw them, too.
        kept: [draft tokens] int64, the draft vocabulary; None for all tokens.
        seed: of the weights.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        drafter = build_head(sizes)
    if kept is not None:
        drafter.keep_tokens(kept)
    if lm_head is not None:
        weight = lm_head.weight if kept is None else lm_head.weight[kept.to(lm_head.weight.device)]
        for layer in drafter.vocabulary_layers:
            if weight.shape == layer.weight.shape:
                layer.weight.data.copy_(weight)
    return drafter


def continued_drafter(
    initial: str, sizes: HeadConfig, trains_selector: bool = False, seed: int = 0
) -> DraftHead:
    """A drafter that was trained before, to be trained on: float32, its draft vocabulary with it.

    Args:
        initial: a folder or a hub id.
        sizes: its own from now on: those of the checkpoint but for `target_layers` and `selector`.
            Where it read no layers, it drafts as before, for now.
        trains_selector: everything else stays as it is.
        seed: of a new selector's weights.

    Raises:
        ConfigError: no such drafter.
    """
    return grown(load_drafter(initial), sizes, seed, trains_selector)


def grown(found: DraftHead, sizes: HeadConfig, seed: int, trains_selector: bool) -> DraftHead:
    """A trained head with further layers: see `continued_drafter`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        drafter = build_head(sizes)
    drafter.load_state_dict(found.state_dict(), strict=False)
    if trains_selector:
        assert drafter.selector is not None
        drafter.requires_grad_(False)
        drafter.selector.requires_grad_(True)
    return drafter.train()


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
    for index in range(len(rows)):
        row = rows[index]
        counts += torch.bincount(row.tokens[row.generated], minlength=vocab_size)
    best = counts.sort(descending=True, stable=True).indices[:kept].sort().values
    return best, float(counts[best].sum() / counts.sum().clamp(min=1))
