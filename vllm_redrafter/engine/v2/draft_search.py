# SPDX-License-Identifier: Apache-2.0
"""Beam search over the draft head in few launches, for a GPU: `beam_search`, on kernels.

At few requests a draft's time is its launches: some 90 of torch's for 4 beams of 5 tokens, where
this search needs seven per level. Where the head selects candidates at the root
(`heads/shortlist.py`), levels below have no product with the vocabulary-wide layer, but one launch
that gathers the candidates' rows and one that ranks them.

Above the beams that a fused form takes, and for heads without one, the small layers are the head's
own.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from vllm_redrafter.engine.v2.heads.forms import fused_form
from vllm_redrafter.engine.v2.heads.selector import finished
from vllm_redrafter.heads.fused_head import Features, FusedHead, Level
from vllm_redrafter.heads.head import DraftHead
from vllm_redrafter.heads.norm import EPSILON
from vllm_redrafter.tree.beam_search import ExploredNodes, log_softmax_of_top
from vllm_redrafter.tree.policy import SearchShape
from vllm_redrafter.tree.sharding import VocabularyShard
from vllm_redrafter.triton_kernels.candidates import choose_candidates, rank_candidates
from vllm_redrafter.triton_kernels.gather_dot import gather_dot
from vllm_redrafter.triton_kernels.grow_beams import BeamBuffers, grow_beams
from vllm_redrafter.triton_kernels.top_candidates import TopTokens, top_candidates


class DraftSearch:
    """Searches of one shape for up to `max_requests`; buffers are allocated once.

    A search reads nothing there that it has not written: vLLM loses it in sleep level 2.
    `beams` is what the last search found, `table` the embedding that kernels read themselves.
    """

    def __init__(
        self,
        drafter: DraftHead,
        embed: Callable[[Tensor], Tensor],
        table: nn.Module | None,
        shape: SearchShape,
        max_requests: int,
        shard: VocabularyShard | None = None,
        survival: tuple[Tensor, Tensor, Tensor] | None = None,
        candidates: Callable[[int], int] | None = None,
    ) -> None:
        """Weights are read where the drafter has them at each search.

        Args:
            drafter, embed: on the device; the target's embedding, tokens [...] -> [..., H].
            table: the layer whose `weight` rows `embed` returns as they are; None: it does more.
            shape, max_requests: of the searches.
            shard: the drafter's part of the draft vocabulary; None: all of it.
            survival: ranks nodes by their survival, see `grow_beams`; None: by log-probability.
            candidates: from R to how many tokens nodes below the first level choose from; 0: all.
        """
        self._drafter, self._embed = drafter, embed
        self._candidates = candidates
        self.table = table
        weight = drafter.vocabulary_layer.weight
        width, length = shape
        self._width, self._shard = width, shard
        self.beams = BeamBuffers(max_requests, length, width, weight.device)
        self._survival = survival
        config = drafter.config
        self._to_target = drafter.d2t if config.draft_vocab_size is not None else None
        self._launches = fused_form(drafter, max_requests * width, length)

    @torch.inference_mode()
    def explore(self, hidden: Tensor, root_tokens: Tensor) -> tuple[ExploredNodes, Tensor | None]:
        """Search the L tokens after the root, for all requests at once.

        Args:
            hidden: [R, (1 + n) H], see `DraftHead.condition`.
            root_tokens: [R] int64, the last sampled token.

        Returns:
            The nodes, in memory that the next search overwrites. With `survival`, their log
            survival replaces the log-probabilities; their log-odds [R, L, W] are second, or None.
        """
        requests = root_tokens.shape[0]
        _, length, width = self.beams.tokens.shape
        condition = self._drafter.condition(hidden)
        count = 0 if self._candidates is None else self._candidates(requests)
        candidates: Tensor | None = None
        state: Tensor | None = None
        tokens = root_tokens
        for level in range(length):
            layer = self._drafter.layer_of(level)
            state = self._step(condition, state, tokens, level)
            if candidates is not None:
                features = self._features_of(condition, state)
                among = candidates[level - 1]
                top = self._among(among, features, layer.weight)
            elif count:
                logits = layer(self._base_features_of(condition, state).flatten(0, 1))
                top, candidates = self._choose(logits, requests, count)
            else:
                features = self._features_of(condition, state)
                logits = layer(finished(features))
                top = self._among_all(logits)
            grow_beams(
                top, level, requests, self.beams, to_target=self._to_target, survival=self._survival
            )
            tokens = self.beams.last_tokens[: requests * width]
        *nodes, log_odds = self.beams.explored(requests, self._survival is not None)
        return ExploredNodes(*nodes), log_odds

    def _step(self, condition: Tensor, state: Tensor | None, tokens: Tensor, depth: int) -> Tensor:
        """States [rows, S] after `tokens`, each of which continues a beam of the level above."""
        rows = tokens.shape[0]
        parents = self.beams.parents[:rows]
        head, fused = self._drafter, self._fused_for(rows)
        table = head.embedding_of(self.table, depth)
        if fused is not None and table is not None:
            return fused.step(Level(condition, state, (table.weight, tokens), parents, depth))
        embedded = head.embedding_of(self._embed, depth)(tokens)
        if fused is not None:
            return fused.step(Level(condition, state, (embedded, None), parents, depth))
        if state is None:
            return head.start(condition, embedded)
        return head.advance(state.index_select(0, parents), embedded, depth)

    def _fused_for(self, rows: int) -> FusedHead | None:
        form = self._launches
        return form if form is not None and rows <= form.max_rows else None

    def _features_of(self, condition: Tensor, state: Tensor) -> Features:
        """`DraftHead.features` of [R * beams, S]."""
        if (fused := self._fused_for(len(state))) is not None:
            return fused.features(condition, state)
        by_request = state.view(condition.shape[0], -1, state.shape[-1])
        read = self._drafter.features(condition.unsqueeze(1), by_request)
        return Features(read.flatten(0, 1))

    def _base_features_of(self, condition: Tensor, state: Tensor) -> Tensor:
        """`DraftHead.base_features` of the roots: [L, R, E]."""
        head = self._fused_for(len(state))
        if head is not None and head.selector is not None:
            return head.selector(finished(head.features(condition, state)))
        length = self.beams.tokens.shape[1]
        return self._drafter.base_features(condition, state, length).transpose(0, 1)

    def _among_all(self, logits: Tensor) -> TopTokens:
        """The W best of each row of logits [rows, V]."""
        if self._shard is None:
            return top_candidates(logits, self._width)
        return self._among_shards(logits)

    def _choose(self, logits: Tensor, requests: int, count: int) -> tuple[TopTokens, Tensor]:
        """The W best of the roots, of logits [L * R, V]; candidates [L-1, R, C] int32 below."""
        top, candidates = choose_candidates(logits, requests, count, self._width)
        return top if self._shard is None else self._among_shards(logits[:requests]), candidates

    def _among(self, candidates: Tensor, features: Features, weight: Tensor) -> TopTokens:
        """The W best of the candidates [R, C] int32, for each node of a level."""
        logits = gather_dot(features.x, weight, candidates, scale=features.scale, epsilon=EPSILON)
        if self._shard is None:
            return rank_candidates(logits, candidates, self._width)
        by_row = candidates.repeat_interleave(len(logits) // len(candidates), dim=0)
        return self._among_shards(logits, by_row.long())

    def _among_shards(self, logits: Tensor, candidates: Tensor | None = None) -> TopTokens:
        """`log_softmax_of_top` of a shard; its log-probabilities are normalised already."""
        log_probs, tokens = log_softmax_of_top(logits, self._width, self._shard, candidates)
        # Made each time: what is made while models load is lost in sleep level 2.
        normalised = log_probs.new_zeros(len(logits))
        return TopTokens(log_probs.contiguous(), tokens.int().contiguous(), normalised)
