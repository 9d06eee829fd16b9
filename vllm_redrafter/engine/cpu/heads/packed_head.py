# SPDX-License-Identifier: Apache-2.0
"""What packed heads have in common: the vocabulary-wide layer, and candidates by it."""

import torch
from torch import Tensor
from torch.nn import functional as F

from vllm_redrafter.engine.cpu.heads.shortlist import CompiledShortlist
from vllm_redrafter.heads.head import DraftHead, Pack, SearchHead
from vllm_redrafter.heads.norm import normed
from vllm_redrafter.heads.selector import Selector
from vllm_redrafter.heads.shortlist import Shortlist


class PackedHead(SearchHead):
    """A head with one vocabulary-wide layer, as a search calls it; methods as `DraftHead`'s.

    Keeps of the head's tensors `d2t`, and for candidates the vocabulary-wide layer.
    """

    def __init__(self, head: DraftHead, pack: Pack) -> None:
        self.config = head.config
        self._d2t = None if head.config.draft_vocab_size is None else head.d2t
        layer = head.vocabulary_layer
        self._vocabulary_layer = pack(layer.weight, None)
        self._rows = layer.weight.detach() if head.config.selected_depths else None
        self._selector = None if head.selector is None else _PackedSelector(head.selector, pack)

    def logits(self, condition: Tensor, state: Tensor, depth: int) -> Tensor:
        return self._vocabulary_layer(self.features(condition, state))

    def shortlist(self, condition: Tensor, state: Tensor, length: int, count: int) -> Shortlist:
        assert self._rows is not None and self._selector is not None
        features = self._selector(self.features(condition, state), length).squeeze(1)
        return CompiledShortlist.of(self._vocabulary_layer(features), self._rows, count)

    def target_tokens(self, draft_tokens: Tensor) -> Tensor:
        return draft_tokens if self._d2t is None else draft_tokens + self._d2t[draft_tokens]


class _PackedSelector:
    """See `Selector`, of which it keeps no tensor."""

    def __init__(self, selector: Selector, pack: Pack) -> None:
        self._depths, self._dtype = selector.sizes.depths, selector.up.dtype
        self._down = pack(selector.down.weight, selector.down.bias)
        self._ups = [pack(up, None) for up in selector.up]

    def __call__(self, x: Tensor, length: int) -> Tensor:
        """See `Selector.forward`; x may be wider than the products' dtype."""
        inner = F.silu(self._down(normed(x).to(self._dtype)))
        parts = inner.chunk(self._depths, dim=-1)[: length - 1]
        below = [x + up(part) for up, part in zip(self._ups, parts, strict=False)]
        return torch.stack([x, *below], dim=-2)
