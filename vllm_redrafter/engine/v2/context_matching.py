# SPDX-License-Identifier: Apache-2.0
"""Prompt-lookup (n-gram) matches in the requests' texts and in earlier answers, in their drafts.

vLLM keeps the texts on the device. Matches are found, joined to the search's nodes and learned from
in the draft's CUDA graph (`tree/context_matches.py`, `budget/match_acceptance.py`).
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from vllm.v1.worker.gpu.states import RequestState

from vllm_redrafter.budget.match_acceptance import MEMORY, PRIOR_WEIGHT, prior_acceptance
from vllm_redrafter.engine.v2.earlier_answers import EarlierAnswers
from vllm_redrafter.engine.v2.verification import TreeTable
from vllm_redrafter.tree.beam_search import ExploredNodes
from vllm_redrafter.tree.policy import SearchShape
from vllm_redrafter.triton_kernels.earlier_answers import find_earlier
from vllm_redrafter.triton_kernels.find_matches import MatchBuffers, find_matches
from vllm_redrafter.triton_kernels.join_matches import JoinedBuffers, SearchedNodes, join_matches
from vllm_redrafter.triton_kernels.observe_matches import observe_matches


class ScoredNodes(NamedTuple):
    """Candidate nodes of the trees of R requests.

    Attributes:
        nodes: [R, L', W'], their scores in the place of the log-probabilities.
        log_odds: [R, L', W'] float32 of the drafter; -inf for match nodes. None without a budget.
        match_classes: [R, L', W'] int32 of a node's match; 0 for none. None without matching.
    """

    nodes: ExploredNodes
    log_odds: Tensor | None
    match_classes: Tensor | None = None


class ContextMatching:
    """Finds matches, joins them to searches, and learns how probable their nodes are.

    Buffers are made once, as CUDA graphs hold their addresses, and before models load: vLLM loses
    what is made during loading in sleep level 2.

    Attributes:
        counts: [2, MATCH_CLASSES, D, 2] float32: nodes judged and accepted, of greedy and sampled
            requests, by class of the match and depth.
        probabilities: [2, MATCH_CLASSES, D] float32, accepted / judged.
        earlier: answers of finished requests; None where none are kept.
    """

    def __init__(
        self,
        table: TreeTable,
        states: RequestState,
        searches: Mapping[int, SearchShape],
        totals: Tensor,
    ) -> None:
        """
        Args:
            searches: beams and levels of the search, by draft length.
            totals: [4] int64, added to: nodes on paths of own text that were verified, and those
                accepted; then of earlier answers.
        """
        config, verification = table.config, table.verification
        self.trees, self.verification, self._totals = table.trees, verification, totals
        self._text, self._num_tokens = states.all_token_ids.gpu, states.total_len.gpu
        self._vocab_size = states.vocab_size
        self.earlier: EarlierAnswers | None = None
        if config.earlier_answers:
            self.earlier = EarlierAnswers(config, states, table.of_requests)
        paths = config.context_matches, config.path_length
        requests, device = states.max_num_reqs, verification.path.device
        prior = torch.tensor(prior_acceptance(config.path_length), device=device).float()
        self.probabilities = prior.repeat(2, 1, 1)
        judged = torch.full_like(self.probabilities, PRIOR_WEIGHT)
        self.counts = torch.stack([judged, PRIOR_WEIGHT * self.probabilities], dim=-1)
        self._paths = MatchBuffers(requests, *paths, self._text.shape[1], device)
        self._joined = {
            length: JoinedBuffers(requests, shape, paths, device)
            for length, shape in searches.items()
        }

    def learn(self, slots: Tensor) -> None:
        """Learn from the verified trees of `slots` [R], before others replace them."""
        trees, learned = self.verification.verified_trees(), (self.counts, self.probabilities)
        observe_matches(slots, self.trees.match_classes, trees, MEMORY, *learned, self._totals)

    def join(self, length: int, found: ScoredNodes, slots: Tensor) -> ScoredNodes:
        """A search's nodes [R, L, W] and those of matches; a slot past the last has no text."""
        temperatures = self.verification.temperatures[: slots.shape[0]]
        find_matches(self._text, self._num_tokens, slots, self._vocab_size, self._paths)
        if self.earlier is not None:
            given = self._vocab_size, self.earlier.store, self._paths
            find_earlier(slots, temperatures, self.probabilities, *given)
        explored, log_odds, out = found.nodes, found.log_odds, self._joined[length]
        search = SearchedNodes(
            explored.tokens, explored.back_pointers, explored.log_probs, log_odds
        )
        join_matches(search, self._paths, self.probabilities, temperatures, out)
        requests = slots.shape[0]
        nodes = ExploredNodes(
            out.tokens[:requests], out.back_pointers[:requests], out.scores[:requests]
        )
        kept = None if log_odds is None else out.log_odds[:requests]
        return ScoredNodes(nodes, kept, out.match_classes[:requests])
