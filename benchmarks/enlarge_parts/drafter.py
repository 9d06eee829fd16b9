"""A gated head of larger sizes with the logits of a small one, for a target from `target.py`.

Its state begins as the target's hidden state, [x ; c ; 0]: a small constant c after the small one's
numbers. n(x) has sqrt(H) before it, so that what reads it is multiplied by sqrt(H / H'), the small
hidden size over the large one. The gate keeps the constant as it is, and tokens that the small
vocabulary has not read it alone.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from enlarge_parts.target import Enlarged, EnlargeError, Filler, vocabulary_rows
from vllm_redrafter import new_head, save_drafter
from vllm_redrafter.checkpoints.reading import load_drafter
from vllm_redrafter.heads.gated import GatedHead

KEEPS = 64.0
"""A gate's bias whose sigmoid is 1."""


def enlarge_drafter(
    source: Path, output: Path, target: Enlarged, draft_vocab_size: int, dtype: torch.dtype
) -> None:
    """Write the drafter.

    Args:
        source: the small drafter's folder.
        output: the large one's.
        target: that it drafts for.
        draft_vocab_size: tokens that it ranks.
        dtype: of the weights.

    Raises:
        EnlargeError: the source is no gated head of the last hidden state, or the larger one.
        ConfigError: the source is no drafter.
    """
    small = load_drafter(str(source))
    if not isinstance(small, GatedHead) or small.config.target_layers:
        raise EnlargeError(
            f"the drafter's head is a {small.config.model_type} of the target's layers "
            f"{small.config.target_layers}: expected a gated one that reads the last hidden state"
        )
    if small.config.hidden_size != target.small_hidden:
        raise EnlargeError(
            f"the drafter's hidden size is {small.config.hidden_size}, the target's "
            f"{target.small_hidden}: expected a pair"
        )
    ranked, rows = small.config.num_ranked_tokens, min(draft_vocab_size, target.vocabulary)
    if rows - ranked > target.vocabulary - target.small_vocabulary or rows < ranked:
        raise EnlargeError(f"--draft-vocab-size {rows}: the drafter ranks {ranked} tokens itself")
    with torch.no_grad():
        large = enlarged(small, target, rows)
    save_drafter(large.to(dtype), output)


def enlarged(small: GatedHead, target: Enlarged, rows: int) -> GatedHead:
    """The large head, which ranks `rows` tokens: the small one's, then further ones."""
    hidden, wide = target.small_hidden, target.hidden
    smaller = (hidden / wide) ** 0.5
    large = new_head(
        "gated",
        target.vocabulary,
        wide,
        draft_vocab_size=rows,
        num_draft_layers=small.config.num_draft_layers,
    )
    assert isinstance(large, GatedHead)
    at = torch.arange(hidden)
    both = torch.cat([at, at + wide])
    placed(large.cell.weight, both, both, small.cell.weight * smaller)
    large.cell.bias.zero_()
    large.cell.bias[both] = small.cell.bias
    large.cell.bias[hidden] = KEEPS
    for block, its in zip(large.blocks, small.blocks, strict=True):
        placed(block.weight, at, at, its.weight * smaller)
        block.bias.zero_()
        block.bias[at] = its.bias
    large.scale[at] = small.scale * smaller
    large.scale[hidden] = 1.0
    filler = Filler(torch.float32)
    large.lm_head.weight.copy_(vocabulary_rows(small.lm_head.weight, rows, wide, filler))
    ranked = small.config.num_ranked_tokens
    further = target.small_vocabulary + torch.arange(rows - ranked)
    large.keep_tokens(torch.cat([small.target_tokens(torch.arange(ranked)), further]))
    return large


def placed(large: Tensor, rows: Tensor, columns: Tensor, small: Tensor) -> None:
    """A small matrix's numbers in a large one, and zeros around them."""
    large.zero_()
    large[rows[:, None], columns] = small
