# SPDX-License-Identifier: Apache-2.0
"""What is drafted for a step; whether it is verified exactly is test_parity.py's."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from vllm_redrafter import save_drafter
from vllm_redrafter.budget.choice import verify_everything
from vllm_redrafter.config import TreeKind
from vllm_redrafter.engine.cpu.v1.proposer import TreeProposer
from vllm_redrafter.heads.recurrent import RecurrentConfig, RecurrentHead
from vllm_redrafter.tree import policy
from vllm_redrafter.tree.beam_search import ExploredNodes
from vllm_redrafter.tree.policy import search_shape
from vllm_redrafter.tree.token_tree import TokenTree

R, V, H = 5, 40, 8


def test_a_policy_decides_alike_with_a_budget_without_one_and_in_evaluate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that CONTRIBUTING's recipe adds: here, the first two levels."""
    torch.manual_seed(0)
    save_drafter(RecurrentHead(RecurrentConfig(V, H, exit_dim=H)), tmp_path)
    settings = {"model": str(tmp_path), "num_speculative_tokens": 12, "beam_width": 4}
    proposer = TreeProposer(
        SimpleNamespace(  # type: ignore[arg-type]
            additional_config={"redrafter": {**settings, "beam_length": 5, "tree": "explored"}},
            model_config=SimpleNamespace(dtype=torch.float32),
        )
    )
    proposer.load_model(nn.ModuleDict({"embed_input_ids": nn.Embedding(V, H)}))

    def shallow(explored: ExploredNodes, tree: TreeKind) -> Tensor:
        level = torch.arange(explored.log_probs.shape[1])[:, None]
        return (level < 2).expand_as(explored.log_probs)

    hidden, roots, most = torch.randn(R, H), torch.arange(R), np.full(R, 12)
    greedy, verify_costs = np.zeros(R, dtype=np.bool_), verify_everything(R * 13)
    shape = search_shape(proposer.config, 12)

    def trees() -> list[TokenTree]:
        explored = proposer.explore(hidden, roots, shape)
        return [
            proposer.propose(hidden, roots, None, most, greedy, shape).tree,
            proposer.propose(hidden, roots, None, most, greedy, shape, verify_costs).tree,
            TokenTree.from_explored(roots, explored, max_nodes=12),
        ]

    assert all(tree.depths.max() > 2 for tree in trees())
    monkeypatch.setattr(policy, "allowed_nodes", shallow)
    for tree in trees():
        # All that the policy allows: two levels of four beams.
        assert tree.depths.max() == 2
        assert (tree.num_nodes == 9).all()
