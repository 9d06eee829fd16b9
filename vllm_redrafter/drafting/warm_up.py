# SPDX-License-Identifier: Apache-2.0
"""The compiled loops of drafting, run once before there are requests.

numba compiles at the first call. Without a folder to keep what it compiled in, and on a new
machine, the first requests would wait for it, and the budget would learn from their steps.
"""

from __future__ import annotations

import numpy as np
import torch

from vllm_redrafter.drafting.acceptance_model import FIRST_REFIT, AcceptanceModel
from vllm_redrafter.drafting.context_index import ContextIndex
from vllm_redrafter.drafting.proposer import Proposer, States
from vllm_redrafter.drafting.walk import accepted_nodes, judged_nodes
from vllm_redrafter.tree.acceptance import accept_path
from vllm_redrafter.tree.token_tree import TokenTree


def warm_up(proposer: Proposer[States], states: States) -> TokenTree:
    """Draft for one request, and accept nothing of it.

    Args:
        proposer: ready to explore.
        states: of one request, for `Proposer.explore`.

    Returns:
        What was drafted.
    """
    most = proposer.config.num_speculative_tokens
    root = torch.zeros(1, dtype=torch.int64)
    greedy = np.zeros(1, dtype=np.bool_)
    all_nodes = np.full(1, most)
    shape = proposer.shape(most)
    index = ContextIndex(1, max(proposer.config.context_matches, 1), proposer.config.path_length, 1)
    matches = index.matches(["0"], np.zeros((1, 2), np.int32), np.zeros(1, np.int64), np.array([2]))
    tree = proposer.propose(states, root, None, all_nodes, greedy, shape, None, matches).tree
    accepted = accept_path(tree, torch.full_like(tree.tokens, -1))
    accepted_nodes(greedy, np.zeros((1, most + 1), dtype=np.float32), tree, tree, accepted)
    sources = np.zeros((1, 2, most + 1), dtype=np.float32)
    _, log_odds, _, *judged = judged_nodes(tree, accepted.path, sources)
    acceptance = AcceptanceModel(proposer.config.beam_length)
    for _ in range(FIRST_REFIT):
        acceptance.observe(np.zeros(len(log_odds), dtype=np.bool_), log_odds, *judged)
    return tree
