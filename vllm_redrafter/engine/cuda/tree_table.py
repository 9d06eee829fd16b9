# SPDX-License-Identifier: Apache-2.0
"""The trees drafted last, by request slot, and what verifies them: on every stage of a pipeline.

Trees wait here until the scheduler runs the request again, which need not be in the next step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor

from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.engine.cuda.stats import StepTimer
from vllm_redrafter.engine.cuda.verification import Verification
from vllm_redrafter.triton_kernels.build_tree import ScoredTrees

if TYPE_CHECKING:
    from vllm_redrafter.engine.cuda.budget import TreeBudget


class TreeTable:
    """What a step reads of the drafts before it.

    Attributes:
        config: how to draft and verify; replaced before anything is drafted, if at all.
        trees: by request slot, the tree drafted last; one entry more than there are slots, which
            takes what padding rows draft.
        chains: [slots] int32 on the device, 1 for requests that get a chain.
        limits: [slots] int32 on the device, the most nodes that each request wants.
        wants_nodes: [slots] bool, the host's: is that any?
        verification: of these trees; tells which row each next draft starts from.
        meter: the step's statistics, all parts' of it.
        budget: whether to draft, and how many nodes to verify; None where every step does, and
            all.
    """

    def __init__(self, config: ReDrafterConfig, slots: int, device: torch.device) -> None:
        """Every request has its root alone.

        Args:
            config: with K.
            slots: of requests.
            device: of all tensors.
        """
        self.config = config
        nodes = config.num_speculative_tokens
        self.trees = ScoredTrees(slots + 1, nodes, device)
        self.trees.clear()
        self.chains = StagedWriteTensor(slots, dtype=torch.int32, device=device)
        self.limits = StagedWriteTensor(slots, dtype=torch.int32, device=device)
        self.wants_nodes = np.zeros(slots, dtype=np.bool_)
        # New requests' trees: one launch for all that a step admits.
        self._num_nodes = StagedWriteTensor(slots + 1, dtype=torch.int32, device=device)
        self._num_nodes.gpu = self.trees.num_nodes
        self.verification = Verification(slots, nodes, device)
        self.meter = StepTimer(device)
        self.budget: TreeBudget | None = None

    def add_request(self, slot: int, chain: bool, limit: int) -> None:
        """A new request takes the slot: it has no tree yet, only the root.

        vLLM may verify it nonetheless, with padding for draft tokens, to keep steps uniform.

        Args:
            slot: the request's.
            chain: verify a chain: see docs/architecture.md, "Per-request fallback to a chain".
            limit: the most nodes that the request wants, the root not counted.
        """
        self._num_nodes.stage_write_elem(slot, 1)
        self.chains.stage_write_elem(slot, int(chain))
        self.limits.stage_write_elem(slot, limit)
        self.wants_nodes[slot] = limit > 0

    def apply_staged_writes(self) -> None:
        self._num_nodes.apply_write()
        self.chains.apply_write()
        self.limits.apply_write()
