# SPDX-License-Identifier: Apache-2.0
"""The drafter before its first step."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vllm_redrafter.data.rows import TextRows
from vllm_redrafter.heads.head import DraftHead, HeadConfig
from vllm_redrafter.heads.registry import build_head
from vllm_redrafter.heads.selector import SelectorConfig
from vllm_redrafter.utils.errors import ConfigError


def new_drafter(
    sizes: HeadConfig, lm_head: Any = None, kept: Tensor | None = None, seed: int = 0
) -> DraftHead:
    """A new drafter with random weights.

    Args:
        lm_head: the target's output layer, copied into its last one where the shapes agree.
        kept: [draft tokens] int64, the draft vocabulary; None for all tokens.
    """
    drafter = _seeded(sizes, seed)
    if kept is not None:
        drafter.keep_tokens(kept)
    if lm_head is not None:
        weight = lm_head.weight if kept is None else lm_head.weight[kept.to(lm_head.weight.device)]
        own = drafter.vocabulary_layer.weight
        if weight.shape == own.shape:
            own.data.copy_(weight)
    return drafter


def continued_drafter(
    initial: DraftHead, sizes: HeadConfig, trains_selector: bool = False, seed: int = 0
) -> DraftHead:
    """A copy of a trained float32 drafter to be trained on, or only its new selector.

    The sizes are its own but for `target_layers` and `selector`. Where it read no layers, it drafts
    as before at first. The seed is that of a new selector's weights.
    """
    drafter = _seeded(sizes, seed)
    drafter.load_state_dict(initial.state_dict(), strict=False)
    if trains_selector:
        assert drafter.selector is not None
        drafter.requires_grad_(False)
        drafter.selector.requires_grad_(True)
    return drafter.train()


def _seeded(sizes: HeadConfig, seed: int) -> DraftHead:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build_head(sizes)


def with_selector(head: HeadConfig, num_steps: int) -> HeadConfig:
    """The sizes of a head with a new selector for drafts of so many tokens."""
    selector = SelectorConfig(num_steps - 1, max(1, head.feature_width // 4))
    return replace(head, selector=selector)


def most_used_tokens(rows: TextRows, vocab_size: int, kept: int) -> tuple[Tensor, float]:
    """The `kept` tokens that the target wrote most often in these rows, int64 in ascending order,
    and the share of the target's tokens that they cover."""
    if kept > vocab_size:
        raise ConfigError(
            f"draft_vocab_size {kept} exceeds the target's vocabulary of {vocab_size}; "
            "leave it out to rank all tokens"
        )
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for index in range(len(rows)):
        row = rows[index]
        counts += torch.bincount(row.tokens[row.generated], minlength=vocab_size)
    best = counts.sort(descending=True, stable=True).indices[:kept].sort().values
    return best, float(counts[best].sum() / counts.sum().clamp(min=1))
