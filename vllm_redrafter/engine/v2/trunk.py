# SPDX-License-Identifier: Apache-2.0
"""What explores the nodes of a draft, besides matches in texts: a drafter of a kind, or nothing."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.communication_op import tensor_model_parallel_all_gather
from vllm.distributed.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_redrafter.checkpoints.reading import Checkpoint
from vllm_redrafter.engine.embedding import lookup_table, shared_embedding
from vllm_redrafter.engine.speculation import Settings
from vllm_redrafter.engine.v2.draft_search import DraftSearch
from vllm_redrafter.heads.head import DraftHead
from vllm_redrafter.heads.shortlist import affordable
from vllm_redrafter.tree.beam_search import ExploredNodes
from vllm_redrafter.tree.policy import SearchShape
from vllm_redrafter.tree.sharding import VocabularyShard
from vllm_redrafter.triton_kernels.load_drafts import DraftInputs


class Trunk:
    """By itself nothing: drafts have matches alone.

    Attributes:
        checkpoint: what another one can replace, by `replacement`; None where nothing can.
        chain: vLLM's drafter, if it is one.
        shapes: beams and levels of its nodes, by the levels of a draft, ascending; 0 for none.
        survival: ranks nodes, see `NodeConfidence.parameters`; None: log-probability does.
        inputs: what a draft starts from, of the largest batch.
    """

    chain: DraftModelSpeculator | None = None
    replacement: Callable[[Checkpoint], Callable[[], object]]

    def __init__(
        self,
        settings: Settings,
        shapes: Mapping[int, SearchShape],
        survival: tuple[Tensor, Tensor, Tensor] | None,
        inputs: DraftInputs,
    ) -> None:
        self.checkpoint, self._candidates = settings.checkpoint(), settings.config.candidates
        self.shapes, self.survival, self.inputs = shapes, survival, inputs

    def follow(self, drafts: bool, verified: int, *step: Any) -> None:
        """Read a step's rows, where the next ones attend to them.

        Args:
            drafts: the step ends with a draft.
            verified: how many requests' trees were walked: all or none.
            step: `propose`'s arguments but the last, in order.
        """

    def explore(self, requests: int, length: int) -> tuple[ExploredNodes, Tensor | None]:
        """`length` levels below the first inputs; can be captured. See `DraftSearch.explore`."""
        if length:
            return self._explore(requests, length)
        tokens = self.inputs.roots.new_empty(requests, 0, 0)
        scores = tokens.new_empty(tokens.shape, dtype=torch.float32)
        return ExploredNodes(tokens, tokens, scores), None if self.survival is None else scores

    def _explore(self, requests: int, length: int) -> tuple[ExploredNodes, Tensor | None]:
        raise NotImplementedError


class RecurrentTrunk(Trunk):
    """A ReDrafter, or a published speculator: searches from one hidden state, without a cache.

    Attributes:
        shard: this rank's part of the draft vocabulary; None without tensor parallelism.
        searches: by length, from 1 on.
    """

    checkpoint: Checkpoint
    shard: VocabularyShard | None = None
    searches: Mapping[int, DraftSearch]

    def load_model(self, target: nn.Module) -> None:
        """Read the drafter; the loaded target's embedding is shared."""
        self.drafter = self._read_checkpoint(self.checkpoint, self.inputs.hidden.device)
        embed = shared_embedding(target)
        self.searches = {
            length: DraftSearch(
                self.drafter,
                embed,
                lookup_table(target, embed),
                shape,
                len(self.inputs.hidden),
                self.shard,
                self.survival,
                partial(self._candidates_for, length=length),
            )
            for length, shape in self.shapes.items()
            if length
        }

    def replacement(self, checkpoint: Checkpoint) -> Callable[[], object]:
        """Read another one; returns what copies it to where CUDA graphs read the drafter."""
        tensors = self._read_checkpoint(checkpoint, None).state_dict()
        return partial(self.drafter.load_state_dict, tensors)

    def _read_checkpoint(self, checkpoint: Checkpoint, device: torch.device | None) -> DraftHead:
        drafter = checkpoint.load(self.inputs.hidden.dtype, device)
        ranks = get_tensor_model_parallel_world_size()
        if ranks > 1:
            self.shard = VocabularyShard(
                drafter.config.num_ranked_tokens,
                get_tensor_model_parallel_rank(),
                ranks,
                tensor_model_parallel_all_gather,
            )
            self.shard.cut(drafter)
        return drafter

    def _explore(self, requests: int, length: int) -> tuple[ExploredNodes, Tensor | None]:
        hidden, roots = self.inputs.hidden[:requests], self.inputs.roots[:requests]
        return self.searches[length].explore(hidden, roots)

    def _candidates_for(self, requests: int, length: int) -> int:
        """How many tokens nodes choose from; 0 for all."""
        all_of_them = self.drafter.config.num_ranked_tokens
        here = all_of_them if self.shard is None else self.shard.most_rows
        return affordable(self._candidates, requests, length, here)
