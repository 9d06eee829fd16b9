# SPDX-License-Identifier: Apache-2.0
"""A gated head of larger sizes with the logits of a small one, for `target.py`'s target.

Its state begins as the target's hidden state, [x ; c ; 0]: a small constant c after the small one's
numbers. n(x) has sqrt(H) before it, so that what reads it is multiplied by sqrt(H / H'), the small
hidden size over the large one. The gate keeps the constant as it is, and tokens that the small
vocabulary has not read it alone. A selector's rank is that of a new
head, the further numbers zeros.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from enlarge_parts.target import EnlargeError, Filler, vocabulary_rows
from vllm_redrafter import save_drafter
from vllm_redrafter.checkpoints.reading import load_drafter
from vllm_redrafter.heads.gated import GatedConfig, GatedHead
from vllm_redrafter.heads.selector import Selector, SelectorConfig

KEEPS = 64.0
"""A gate's bias whose sigmoid is 1."""


def enlarge_drafter(
    source: Path, output: Path, targets: tuple[Any, Any], ranked: int, dtype: torch.dtype
) -> None:
    """Write the drafter.

    Args:
        source: the small drafter's folder.
        output: the large one's.
        targets: the configs of the small target and of the large one.
        ranked: tokens that it ranks.
        dtype: of the weights.

    Raises:
        EnlargeError: the source is no such head of the last hidden state, or the larger one.
        ConfigError: the source is no drafter.
    """
    small, (its, large) = load_drafter(str(source)), targets
    if not isinstance(small, GatedHead) or small.config.target_layers:
        raise EnlargeError(
            f"the drafter's head is a {small.config.model_type} of the target's layers "
            f"{small.config.target_layers}: expected a gated one that reads the last hidden state"
        )
    if small.config.hidden_size != its.hidden_size:
        raise EnlargeError(
            f"the drafter's hidden size is {small.config.hidden_size}, the target's "
            f"{its.hidden_size}: expected a pair"
        )
    already, ranked = small.config.num_ranked_tokens, min(ranked, large.vocab_size)
    if not already <= ranked <= already + large.vocab_size - its.vocab_size:
        raise EnlargeError(
            f"--draft-vocab-size {ranked}: the drafter ranks {already} tokens itself"
        )
    with torch.no_grad():
        made = enlarged(small, large.hidden_size, large.vocab_size, ranked)
    save_drafter(made.to(dtype), output)


def enlarged(small: GatedHead, wide: int, vocabulary: int, ranked: int) -> GatedHead:
    """The large head: of `ranked` tokens the small one's come first, then some of the new ones."""
    config, hidden = small.config, small.config.hidden_size
    selector = config.selector and SelectorConfig(config.selector.depths, max(1, wide // 4))
    sizes: dict[str, Any] = {"draft_vocab_size": ranked, "selector": selector}
    layers = config.num_draft_layers
    large = GatedHead(GatedConfig(vocabulary, wide, num_draft_layers=layers, **sizes))
    smaller = (hidden / wide) ** 0.5
    at = torch.arange(hidden)
    both = torch.cat([at, at + wide])
    place(large.cell, both, both, small.cell, smaller)
    large.cell.bias[hidden] = KEEPS
    for block, its in zip(large.blocks, small.blocks, strict=True):
        place(block, at, at, its, smaller)
    if small.selector is not None and large.selector is not None:
        _place_selector(large.selector, small.selector, smaller)
    large.scale[at] = small.scale * smaller
    large.scale[hidden] = 1.0
    rows = vocabulary_rows(small.lm_head.weight, ranked, wide, Filler(torch.float32))
    large.lm_head.weight.copy_(rows)
    known = small.target_tokens(torch.arange(config.num_ranked_tokens))
    further = config.vocab_size + torch.arange(ranked - len(known))
    large.keep_tokens(torch.cat([known, further]))
    return large


def _place_selector(large: Selector, small: Selector, smaller: float) -> None:
    depths, rank, wide = small.sizes.depths, small.sizes.rank, large.sizes.rank
    width = small.up.shape[1]
    of_rank = torch.arange(rank)
    rows = (torch.arange(depths)[:, None] * wide + of_rank).flatten()
    place(large.down, rows, torch.arange(width), small.down, smaller)
    large.up.zero_()
    large.up[:, :width, :rank] = small.up


def place(large: Any, rows: Tensor, columns: Tensor, small: Any, factor: float = 1.0) -> None:
    """A small layer's numbers, its weights times a factor, in a large one, and zeros around."""
    large.weight.zero_()
    large.weight[rows[:, None], columns] = small.weight * factor
    large.bias.zero_()
    large.bias[rows] = small.bias
