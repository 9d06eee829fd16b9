# SPDX-License-Identifier: Apache-2.0
"""The best tokens that may follow the nodes of a level, on kernels: of all, or of candidates."""

from __future__ import annotations

from torch import Tensor

from vllm_redrafter.heads.fused_head import Features
from vllm_redrafter.heads.norm import EPSILON
from vllm_redrafter.tree.beam_search import log_softmax_of_top
from vllm_redrafter.tree.sharding import VocabularyShard
from vllm_redrafter.triton_kernels.candidates import choose_candidates, rank_candidates
from vllm_redrafter.triton_kernels.gather_dot import gather_dot
from vllm_redrafter.triton_kernels.top_candidates import TopTokens, top_candidates


class DraftRanking:
    """For W beams; where ranks share the vocabulary, they rank it as `beam_search` does."""

    def __init__(self, width: int, shard: VocabularyShard | None) -> None:
        self._width, self._shard = width, shard

    def among_all(self, logits: Tensor) -> TopTokens:
        """The W best of each row of logits [rows, V]."""
        if self._shard is None:
            return top_candidates(logits, self._width)
        return self._shared(logits)

    def choose(self, logits: Tensor, requests: int, count: int) -> tuple[TopTokens, Tensor]:
        """The roots' W best tokens, and the candidates [L-1, R, C] int32 of the depths below.

        Args:
            logits: [L * R, V], of the roots first; see `choose_candidates`.
            requests: R.
            count: C.
        """
        top, candidates = choose_candidates(logits, requests, count, self._width)
        return top if self._shard is None else self._shared(logits[:requests]), candidates

    def among(self, candidates: Tensor, features: Features, weight: Tensor) -> TopTokens:
        """The W best of the candidates [R, C], for each of a level's nodes.

        Args:
            candidates: int32.
            features: of [R * beams] rows.
            weight: [V, E], the vocabulary-wide layer's.
        """
        logits = gather_dot(features.x, weight, candidates, scale=features.scale, epsilon=EPSILON)
        if self._shard is None:
            return rank_candidates(logits, candidates, self._width)
        by_row = candidates.repeat_interleave(len(logits) // len(candidates), dim=0)
        return self._shared(logits, by_row.long())

    def _shared(self, logits: Tensor, candidates: Tensor | None = None) -> TopTokens:
        """`log_softmax_of_top` of a shard, whose log-probabilities are normalised already."""
        log_probs, tokens = log_softmax_of_top(logits, self._width, self._shard, candidates)
        # Made each time: what is made while models load is lost in sleep level 2.
        normalised = log_probs.new_zeros(len(logits))
        return TopTokens(log_probs.contiguous(), tokens.int().contiguous(), normalised)
