"""A step's compiled loops, run once before there are requests.

numba compiles at the first call. Without a folder to keep what it compiled in, and on a new
machine, the first requests would wait for it, and the budget would learn from their steps.
"""

from __future__ import annotations

import numpy as np
import torch

from vllm_redrafter.budget.acceptance_model import FIRST_REFIT, AcceptanceModel
from vllm_redrafter.budget.choice import unlimited
from vllm_redrafter.engine.cpu import tree_sequences
from vllm_redrafter.engine.cpu.proposer import TreeProposer
from vllm_redrafter.engine.cpu.verification import verification_step
from vllm_redrafter.tree.context_index import ContextIndex
from vllm_redrafter.tree.walk import Walk, accepted_nodes, judged_nodes, moves


def warm_up(proposer: TreeProposer) -> None:
    """Draft for one request, and accept nothing of it.

    Args:
        proposer: with its weights in place.
    """
    most = proposer.config.num_speculative_tokens
    hidden = torch.zeros(1, proposer.hidden_width, dtype=proposer.dtype)
    root = torch.zeros(1, dtype=torch.int64)
    greedy = np.zeros(1, dtype=np.bool_)
    all_nodes = np.full(1, most)
    shape = proposer.shape(most)
    index = ContextIndex(1, max(proposer.config.context_matches, 1), proposer.config.path_length, 1)
    matches = index.matches(["0"], np.zeros((1, 2), np.int32), np.zeros(1, np.int64), np.array([2]))
    terms = unlimited(most + 1)
    proposer.propose_best(hidden, root, None, all_nodes, greedy, shape, terms, matches)
    tree, _ = proposer.propose(hidden, root, None, all_nodes, matches)
    links = np.stack([tree.parents[0].numpy(), tree.depths[0].numpy()])
    rows = int(tree.num_nodes)
    step = verification_step(
        [links],
        [rows - 1],
        np.array([rows], dtype=np.int32),
        tree.tokens[0].numpy(),
        np.arange(rows, dtype=np.int64),
        rows,
    )
    walk = Walk(step.tree)
    walk.go_on(torch.full((1,), -1, dtype=torch.int32))
    accepted = walk.accepted
    moves(accepted.path, step.root_rows)
    survival = np.zeros((1, most + 1), dtype=np.float32)
    accepted_nodes(greedy, survival, tree, step.tree, accepted)
    sources = np.zeros((1, 2, rows), dtype=np.float32)
    _, log_odds, _, *judged = judged_nodes(step.tree, accepted.path, sources)
    acceptance = AcceptanceModel(proposer.config.beam_length)
    for _ in range(FIRST_REFIT):
        acceptance.judge(np.zeros(len(log_odds), dtype=np.bool_), log_odds, *judged)
    tree_sequences.warm_up(proposer.dtype)
