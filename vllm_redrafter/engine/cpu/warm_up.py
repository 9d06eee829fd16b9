"""A step's compiled loops, run once before there are requests: see `drafting/warm_up.py`."""

from __future__ import annotations

import numpy as np
import torch

from vllm_redrafter.drafting import warm_up as drafting
from vllm_redrafter.drafting.walk import Walk, moves
from vllm_redrafter.engine.cpu import tree_sequences
from vllm_redrafter.engine.cpu.proposer import TreeProposer
from vllm_redrafter.engine.cpu.verification import verification_step


def warm_up(proposer: TreeProposer) -> None:
    """Draft for one request, and accept nothing of it.

    Args:
        proposer: with its weights in place.
    """
    tree = drafting.warm_up(proposer, torch.zeros(1, proposer.hidden_width, dtype=proposer.dtype))
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
    moves(walk.accepted.path, step.root_rows)
    tree_sequences.warm_up(proposer.dtype)
