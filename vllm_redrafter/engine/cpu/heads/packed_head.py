# SPDX-License-Identifier: Apache-2.0
"""What packed heads have in common: the vocabulary-wide layer, and what it tells."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from vllm_redrafter.engine.cpu.heads.selector import PackedSelector
from vllm_redrafter.engine.cpu.heads.shortlist import CompiledShortlist
from vllm_redrafter.heads.head import DraftHead, HeadConfig, Pack
from vllm_redrafter.heads.shortlist import Shortlist


class PackedHead(ABC):
    """Keeps of the head's tensors `d2t` alone: its weights are freed with the head.

    A head that tells candidates keeps the vocabulary-wide layer as well, whose rows are gathered:
    V E numbers beside the packed ones.

    Args:
        head: with one vocabulary-wide layer.
        pack: makes the products.
    """

    config: HeadConfig

    def __init__(self, head: DraftHead, pack: Pack) -> None:
        self.config = head.config
        self._d2t = None if head.config.draft_vocab_size is None else head.d2t
        (layer,) = head.vocabulary_layers
        self._vocabulary_layer = pack(layer.weight, None)
        self._rows = layer.weight.detach() if head.config.selected_depths else None
        self._selector = None if head.selector is None else PackedSelector(head.selector, pack)

    @abstractmethod
    def features(self, condition: Tensor, state: Tensor, depth: int) -> Tensor:
        """See `DraftHead.features`."""

    def logits(self, condition: Tensor, state: Tensor, depth: int) -> Tensor:
        """See `DraftHead.logits`."""
        return self._vocabulary_layer(self.features(condition, state, depth))

    def base_features(self, condition: Tensor, state: Tensor, length: int) -> Tensor:
        """See `DraftHead.base_features`."""
        assert self._selector is not None
        return self._selector(self.features(condition, state, 0), length)

    def shortlist(self, condition: Tensor, state: Tensor, length: int, count: int) -> Shortlist:
        """See `DraftHead.shortlist`."""
        assert self._rows is not None
        features = self.base_features(condition, state, length).squeeze(1)
        return CompiledShortlist.of(self._vocabulary_layer(features), self._rows, count)

    def target_tokens(self, draft_tokens: Tensor) -> Tensor:
        """See `DraftHead.target_tokens`."""
        return draft_tokens if self._d2t is None else draft_tokens + self._d2t[draft_tokens]
