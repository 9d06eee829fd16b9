# SPDX-License-Identifier: Apache-2.0
"""Beam search over the draft head in few launches, for a GPU: `beam_search`, on kernels.

At few requests a draft's time is its launches: some 90 of torch's for 4 beams of 5 tokens, of
which a search needs seven per level. The head's small layers take few launches (`heads/`; Apple's
one each), the vocabulary-wide layer is torch's product, and its best tokens and the beams that they
make are three (`top_candidates.py`, `grow_beams.py`). Where the head tells candidates from the root
(`vllm_redrafter/heads/shortlist.py`), levels below have no product with that layer, but one launch
that gathers the candidates' rows, and one that ranks them.

Above `MAX_ROWS` beams, and for a head without such a form, the small layers are the head's
own: there, products weigh more than launches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from vllm_redrafter.engine.cuda.draft_ranking import DraftRanking
from vllm_redrafter.engine.cuda.heads.features import made
from vllm_redrafter.engine.cuda.heads.forms import fused_form
from vllm_redrafter.heads.fused_head import Features, FusedSelectorHead
from vllm_redrafter.heads.head import DraftHead
from vllm_redrafter.tree.beam_search import ExploredNodes
from vllm_redrafter.tree.policy import SearchShape
from vllm_redrafter.tree.sharding import VocabularyShard
from vllm_redrafter.triton_kernels.draft_layers import MAX_ROWS
from vllm_redrafter.triton_kernels.grow_beams import BeamBuffers, grow_beams
from vllm_redrafter.triton_kernels.top_candidates import TopTokens


class Survival(Protocol):
    """What the log-odds and the survival of nodes are predicted by: see `AcceptanceEstimator`."""

    slope: Tensor
    biases: Tensor


class DraftSearch:
    """Searches of one shape, for up to so many requests; buffers are allocated once.

    A search reads nothing there that it has not written: vLLM loses it in sleep level 2.

    Attributes:
        beams: what the last search found.
        table: the embedding that kernels read themselves, see `__init__`.
    """

    def __init__(
        self,
        drafter: DraftHead,
        embed: Callable[[Tensor], Tensor],
        table: nn.Module | None,
        shape: SearchShape,
        max_requests: int,
        shard: VocabularyShard | None = None,
        survival: Survival | None = None,
        candidates: Callable[[int], int] | None = None,
    ) -> None:
        """Read the weights where the drafter has them at each search.

        Args:
            drafter: on the device.
            embed: the target's input embedding, tokens [...] int64 -> [..., H].
            table: the layer that `embed` looks rows of `weight` up in and does nothing else; None
                where it does more.
            shape: of the searches.
            max_requests: the most that one search is for.
            shard: the part of the draft vocabulary that the drafter has; None for all of it.
            survival: ranks nodes by their survival; None ranks them by log-probability.
            candidates: from R to how many tokens the nodes below the first level choose from, 0
                for the draft vocabulary; None where it is that for any R. See `affordable`.
        """
        self._drafter, self._embed = drafter, embed
        self._candidates = candidates
        self.table = table
        weight = drafter.vocabulary_layers[0].weight
        width, length = shape
        self._ranking = DraftRanking(width, shard)
        self.beams = BeamBuffers(max_requests, length, width, weight.device)
        self._survival = None
        if survival is not None:
            self._survival = survival.slope, survival.biases[:length]
        config = drafter.config
        self._to_target = drafter.d2t if config.draft_vocab_size is not None else None
        self._launches = fused_form(drafter, table, min(MAX_ROWS, max_requests * width), length)

    @torch.inference_mode()
    def explore(self, hidden: Tensor, root_tokens: Tensor) -> tuple[ExploredNodes, Tensor | None]:
        """Search the L tokens that follow the root, for all requests at once.

        Args:
            hidden: [R, H], the target's hidden state that predicted the root token; [R, (1 + n) H]
                where the head reads further layers, see `DraftHead.condition`.
            root_tokens: [R] int64, the last sampled token.

        Returns:
            The explored nodes, in memory that the next search writes over; with `survival`, the
            log of their survival is in the place of the log-probabilities, and their log-odds
            [R, L, W] come second; else None.
        """
        requests = root_tokens.shape[0]
        _, length, width = self.beams.tokens.shape
        condition = self._drafter.condition(hidden)
        count = 0 if self._candidates is None else self._candidates(requests)
        layer = self._drafter.vocabulary_layers[0]
        candidates: Tensor | None = None
        state: Tensor | None = None
        tokens = root_tokens
        for level in range(length):
            state = self._step(condition, state, tokens)
            if candidates is not None:
                features = self._features_of(condition, state, level)
                among = candidates[level - 1]
                top = self._ranking.among(among, features, layer.weight)
            elif count:
                logits = layer(self._base_features_of(condition, state).flatten(0, 1))
                top, candidates = self._ranking.choose(logits, requests, count)
            else:
                features = self._features_of(condition, state, level)
                logits = self._drafter.vocabulary_layer(level)(made(features))
                top = self._ranking.among_all(logits)
            grow_beams(
                _for_each_beam(top, tokens.shape[0]),
                level,
                requests,
                self.beams,
                to_target=self._to_target,
                survival=self._survival,
            )
            tokens = self.beams.last_tokens[: requests * width]
        found, ranked = self.beams, self._survival is not None
        scores = found.log_survival if ranked else found.log_probs
        explored = ExploredNodes(
            found.tokens[:requests], found.back_pointers[:requests], scores[:requests]
        )
        return explored, found.log_odds[:requests] if ranked else None

    def _step(self, condition: Tensor, state: Tensor | None, tokens: Tensor) -> Tensor:
        """The states [rows, S] after `tokens`, each of which continues one of the level above."""
        rows = tokens.shape[0]
        parents = self.beams.parents[:rows]
        if self._launches is not None and rows <= MAX_ROWS:
            embedded = None if self.table is not None else self._embed(tokens)
            return self._launches.step(condition, state, tokens, parents, embedded)
        if state is None:
            return self._drafter.start(condition, self._embed(tokens))
        return self._drafter.advance(state.index_select(0, parents), self._embed(tokens))

    def _features_of(self, condition: Tensor, state: Tensor, depth: int) -> Features:
        """`DraftHead.features`: condition [R, C], state [R * beams, S], of R * beams rows.

        Of R rows from a head that sees no drafted token.
        """
        if self._launches is not None and state.shape[0] <= MAX_ROWS:
            return self._launches.features(condition, state, depth)
        by_request = state.view(condition.shape[0], -1, state.shape[-1])
        read = self._drafter.features(condition.unsqueeze(1), by_request, depth)
        return Features(read.flatten(0, 1))

    def _base_features_of(self, condition: Tensor, state: Tensor) -> Tensor:
        """`DraftHead.base_features` of the roots: condition [R, C], state [R, S] -> [L, R, E]."""
        head = self._launches
        if isinstance(head, FusedSelectorHead) and state.shape[0] <= MAX_ROWS:
            return head.base_features(condition, state)
        length = self.beams.tokens.shape[1]
        return self._drafter.base_features(condition, state, length).transpose(0, 1)


def _for_each_beam(top: TopTokens, rows: int) -> TopTokens:
    """The best tokens of each of so many rows, of those that all beams of a request may share."""
    if len(top.tokens) == rows:
        return top
    return TopTokens(*(part.repeat_interleave(rows // len(part), dim=0) for part in top))
