# SPDX-License-Identifier: Apache-2.0
"""A gated head or a speculator of larger sizes, with a small one's logits, for `target.py`'s.

The small one's numbers come first, and zeros after them, which stay zeros. n(x) has the root of the
width before it, so that what reads it is multiplied by sqrt(H / H'), the small width over the large
one. A selector's rank is that of a new head. Tokens that the small vocabulary has not read a small
constant c alone, which the state has behind the small one's numbers:

- A gated head's state begins as the target's hidden state, [x ; c ; 0], and its gate keeps c.
- A speculator makes c at every depth, as a bias of its last norm. It keeps the levels that it was
  trained for, so that alpha grows with the root of its width, and the table's rows shrink by that.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from enlarge_parts.target import CONSTANT, Filler, vocabulary_rows
from vllm_redrafter import ConfigError, save_drafter
from vllm_redrafter.checkpoints.reading import load_drafter
from vllm_redrafter.heads.gated import GatedHead
from vllm_redrafter.heads.head import DraftHead
from vllm_redrafter.heads.registry import build_head
from vllm_redrafter.heads.selector import SelectorConfig
from vllm_redrafter.heads.speculators import LstmSpeculator, MlpSpeculator

KEEPS = 64.0
"""A gate's bias whose sigmoid is 1."""


def enlarge_drafter(
    source: Path, output: Path, targets: tuple[Any, Any], ranked: int, dtype: torch.dtype
) -> None:
    """Write the drafter, which ranks so many tokens; `targets` are what `enlarge_target` returned.

    A ConfigError where the source is no drafter, no such head of the last hidden state, or the
    larger one.
    """
    small, (its, large) = load_drafter(str(source)), targets
    known = isinstance(small, GatedHead | MlpSpeculator | LstmSpeculator)
    if not known or small.config.target_layers:
        raise ConfigError(
            f"the drafter's head is a {small.config.model_type} of the target's layers "
            f"{small.config.target_layers}: expected a gated one or a speculator that reads the "
            "last hidden state"
        )
    widths = small.config.hidden_size, small.config.feature_width
    if widths[0] != its.hidden_size or widths[1] >= large.hidden_size:
        raise ConfigError(
            f"the drafter's hidden size is {widths[0]}, the target's {its.hidden_size}, and its "
            f"own width {widths[1]}: expected a pair, narrower than {large.hidden_size}"
        )
    already, ranked = small.config.num_ranked_tokens, min(ranked, large.vocab_size)
    if not already <= ranked <= (most := already + large.vocab_size - its.vocab_size):
        raise ConfigError(
            f"--draft-vocab-size {ranked}: the drafter ranks {already} tokens itself; give that "
            f"many to {most}"
        )
    with torch.no_grad():
        made = enlarged(small, large.hidden_size, large.vocab_size, ranked)
    save_drafter(made.to(dtype), output)


def enlarged(small: Any, wide: int, vocabulary: int, ranked: int) -> DraftHead:
    """The large head: of `ranked` tokens the small one's come first, then some of the new ones."""
    config = small.config
    sizes: dict[str, Any] = {"vocab_size": vocabulary, "draft_vocab_size": ranked}
    sizes |= {name: wide for name in ("hidden_size", "width") if hasattr(config, name)}
    if config.selector is not None:
        sizes["selector"] = SelectorConfig(config.selector.depths, max(1, wide // 4))
    large: Any = build_head(replace(config, **sizes))
    layers = _gated(large, small) if isinstance(small, GatedHead) else _speculator(large, small)
    for layer, its in layers:
        rows = vocabulary_rows(its.weight, ranked, wide, Filler(torch.float32))
        layer.weight.copy_(rows)
    if config.selector is not None:
        smaller = (config.feature_width / wide) ** 0.5
        place(large.selector.down, small.selector.down, smaller, config.selector.depths)
        large.selector.up.zero_()
        large.selector.up[:, : config.feature_width, : config.selector.rank] = small.selector.up
    known = small.target_tokens(torch.arange(config.num_ranked_tokens))
    further = config.vocab_size + torch.arange(ranked - len(known))
    large.keep_tokens(torch.cat([known, further]))
    return large


def _gated(large: Any, small: Any) -> Iterable[tuple[nn.Linear, nn.Linear]]:
    """Place all but the output layer, and return the pair of these."""
    hidden = small.config.hidden_size
    smaller = (hidden / large.config.hidden_size) ** 0.5
    place(large.cell, small.cell, smaller, 2, 2)
    large.cell.bias[hidden] = KEEPS
    place(large.blocks, small.blocks, smaller)
    large.scale.zero_()
    large.scale[:hidden] = small.scale * smaller
    large.scale[hidden] = 1.0
    return [(large.lm_head, small.lm_head)]


def _speculator(large: Any, small: Any) -> Iterable[tuple[nn.Linear, nn.Linear]]:
    """Place all but the output layers, and return the pairs of these."""
    its, wide = small.config, large.config.width
    smaller = (its.width / wide) ** 0.5
    place(large.emb, small.emb, its.alpha / large.config.alpha)
    place(large.proj, small.proj, 1.0, small.num_gates)
    if its.scale_input:
        large.proj[0].weight *= (its.hidden_size / wide) ** 0.5
    is_mlp = isinstance(small, MlpSpeculator)
    for name in ("ln",) if is_mlp else ("cell_ln", "state_ln"):
        place(getattr(large, name), getattr(small, name), smaller)
    for norm in large.ln if is_mlp else [large.state_ln]:
        norm.bias[its.width] = CONSTANT
    return zip(large.head, small.head, strict=True)


def place(large: nn.Module, small: nn.Module, factor: float = 1.0, *parts: int) -> None:
    """A small layer's numbers, its weights times a factor, in a large one, and zeros around.

    Each of so many equal `parts` of rows, and of columns, begins with the small one's.
    """
    for name, its in small.named_parameters():
        ours, numbers = (_split(t, parts) for t in (large.get_parameter(name).zero_(), its))
        by = factor if name.endswith("weight") else 1.0
        ours[tuple(map(slice, numbers.shape))] = numbers * by


def _split(tensor: Tensor, parts: Sequence[int]) -> Tensor:
    sizes = zip_longest(tensor.shape, parts[: tensor.dim()], fillvalue=1)
    return tensor.view([n for size, by in sizes for n in (by, size // by)])
