"""Trees of what a beam search in MLX found."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllm_redrafter.drafting.proposer import Proposer
from vllm_redrafter.mlx.beam_search import Explored
from vllm_redrafter.tree.beam_search import ExploredNodes
from vllm_redrafter.tree.policy import SearchShape


class ExploredProposer(Proposer[Explored]):
    """For one request, whose search is made and evaluated before it is proposed."""

    def explore(self, states: Explored, root_tokens: Tensor, shape: SearchShape) -> ExploredNodes:
        """The same nodes on the host, [1, L, W]; they are of this root and this search."""
        tokens, back_pointers = (
            torch.from_numpy(np.array(part, dtype=np.int64))[None]
            for part in (states.tokens, states.back_pointers)
        )
        log_probs = torch.from_numpy(np.array(states.log_probs, dtype=np.float32))[None]
        return ExploredNodes(tokens, back_pointers, log_probs)
