"""What is drafted for a step; whether it is verified exactly is test_parity.py's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from vllm_redrafter import save_drafter
from vllm_redrafter.heads.recurrent import RecurrentConfig, RecurrentHead

R, V, H = 5, 40, 8


def propose(folder: Path, max_nodes: int) -> torch.Tensor:
    """[R, K+1] parents of the trees that a step of so many nodes gets; -1 beyond their nodes."""
    from vllm_redrafter.engine.cpu.proposer import TreeProposer

    torch.manual_seed(0)
    save_drafter(RecurrentHead(RecurrentConfig(V, H, exit_dim=H)), folder)
    settings = {"model": str(folder), "num_speculative_tokens": 12, "beam_width": 4}
    proposer = TreeProposer(
        SimpleNamespace(  # type: ignore[arg-type]
            additional_config={"redrafter": {**settings, "beam_length": 5, "tree": "explored"}},
            model_config=SimpleNamespace(dtype=torch.float32),
        )
    )
    proposer.load_model(nn.ModuleDict({"embed_input_ids": nn.Embedding(V, H)}))
    tree = proposer.propose(torch.randn(R, H), torch.arange(R), None, np.full(R, max_nodes))
    assert (tree.num_nodes == max_nodes + 1).all()
    return tree.parents.masked_fill(~tree.is_node, -1)


def test_a_step_of_many_nodes_gets_trees(tmp_path: Path) -> None:
    line = torch.arange(-1, 12).clamp(min=0)
    assert (propose(tmp_path, max_nodes=12) != line).any(dim=1).all()
    assert (propose(tmp_path, max_nodes=5)[:, :6] != line[:6]).any()


def test_a_step_of_fewer_nodes_than_a_beam_gets_chains(tmp_path: Path) -> None:
    for nodes in (1, 2, 4):
        parents = propose(tmp_path, nodes)[:, : nodes + 1]
        assert torch.equal(parents, torch.arange(-1, nodes).clamp(min=0).expand(R, -1))
