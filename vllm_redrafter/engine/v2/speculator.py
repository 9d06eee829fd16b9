# SPDX-License-Identifier: Apache-2.0
"""Drafting: from hidden states to the next step's trees, on the device alone.

Shapes are fixed, so that a draft (search, matches, tree build) is one CUDA graph per batch size and
length.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator
from vllm.v1.worker.gpu.states import RequestState

from vllm_redrafter.checkpoints.acceptance import NOTHING_RECORDED
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.engine.log import logger
from vllm_redrafter.engine.speculation import Settings
from vllm_redrafter.engine.v2.context_matching import ContextMatching, ScoredNodes
from vllm_redrafter.engine.v2.graph_manager import DraftGraphManager
from vllm_redrafter.engine.v2.node_confidence import NodeConfidence
from vllm_redrafter.engine.v2.refusals import adaptive_obstacles
from vllm_redrafter.engine.v2.schedule import length_for, lengths_of_drafts
from vllm_redrafter.engine.v2.trunk import RecurrentTrunk, Trunk
from vllm_redrafter.engine.v2.verification import TreeTable
from vllm_redrafter.tree.policy import SearchShape, candidate_log_probs, search_shape
from vllm_redrafter.triton_kernels.build_tree import NodeLimits, build_tree
from vllm_redrafter.triton_kernels.load_drafts import DraftInputs, StepEnd, load_drafts

WITHOUT_BUDGET = (
    "Every step verifies num_speculative_tokens=%d nodes per request, or as many as its batch size "
    'gives, whether that pays or not: %s. With "adaptive": false in the speculative config this '
    "is not said."
)


class TreeSpeculator(BaseSpeculator):
    """vLLM's speculator for ReDrafter.

    Attributes:
        inputs: what the last draft started from, of the target's last layer and n others.
        drafts: [slots, K] int64, its draft tokens.
        trunk: explores the nodes that matches are joined to.
        confidence: of the drafted nodes; None without a batch's budget.
        matching: finds prompt-lookup matches; None without them.
        lengths: the levels that drafts search, ascending; 0 for matches only, no search.
    """

    # What the model runner asks of any speculator, besides BaseSpeculator.
    supports_mm_inputs = False
    draft_logits = None

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState
    ) -> None:
        settings = Settings.of(vllm_config)
        self.vllm_config = vllm_config
        self.device = device
        self.max_num_reqs = req_states.max_num_reqs
        self.graphs: DraftGraphManager | None = None
        self.table = table = TreeTable(settings.config, self.max_num_reqs, device)
        self.trees, self.verification, self.meter = table.trees, table.verification, table.meter

        slots, k = self.max_num_reqs, self.config.num_speculative_tokens
        hidden_size = vllm_config.model_config.get_hidden_size()
        # A draft's inputs and output, in batch order.
        width = (1 + len(settings.target_layers)) * hidden_size
        self.inputs = DraftInputs(
            hidden=torch.zeros(slots, width, dtype=vllm_config.model_config.dtype, device=device),
            roots=torch.zeros(slots, dtype=torch.int64, device=device),
            slots=torch.full((slots,), slots, dtype=torch.int64, device=device),
            num_verified=self.verification.num_verified,
            temperatures=self.verification.temperatures,
        )
        self.drafts = torch.zeros(slots, k, dtype=torch.int64, device=device)

        self.confidence: NodeConfidence | None = None
        if _can_adapt(vllm_config, self.config):
            length = self.config.beam_length
            self.confidence = NodeConfidence(self.trees, self.verification, length)
        # Both are read by vLLM; it passes the latter to the manager, which knows it.
        self.enable_adaptive_verification = self.confidence is not None
        self.draft_token_confidence_probs = self.trees.probs
        matches, is_fixed = self.config.context_matches > 0, self.confidence is None
        # Once: buffers have its width, and a target that turns out to verify chains keeps them.
        # Shorter drafts are as wide, since a level's weights are read once.
        shape = search_shape(self.config, k)
        self.lengths = lengths_of_drafts(vllm_config, shape, is_fixed, matches)
        if settings.draft is not None:
            self.lengths = tuple(n for n in self.lengths if n in (0, shape.beam_length))
        elif settings.model is None:
            self.lengths = (0,)
        shapes = {n: SearchShape(shape.beam_width if n else 0, n) for n in self.lengths}
        survival = None if self.confidence is None else self.confidence.parameters
        self.trunk = self._make_trunk(settings, shapes, survival, self.inputs)
        self.recorded = getattr(self.trunk.checkpoint, "acceptance", NOTHING_RECORDED)
        if self.confidence is not None:
            self.confidence.estimator.start_from(self.recorded)
        self.matching: ContextMatching | None = None
        if matches:
            totals = self.meter.counts[3:]
            self.matching = ContextMatching(self.table, req_states, shapes, totals)
            self.table.earlier = self.matching.earlier

    def _make_trunk(self, settings: Settings, *given: Any) -> Trunk:
        return (Trunk if settings.model is None else RecurrentTrunk)(settings, *given)

    @property
    def config(self) -> ReDrafterConfig:
        return self.table.config

    # CUDA graphs

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """What joins and ranks has no attention, so any mode but NONE allows full graphs."""
        mode = CUDAGraphMode.FULL_DECODE_ONLY if cudagraph_mode else CUDAGraphMode.NONE
        self.graphs = DraftGraphManager(self.vllm_config, self.device, mode, lengths=self.lengths)
        if self.trunk.chain is not None:
            self.trunk.chain.init_cudagraph_manager(cudagraph_mode)

    def capture(self) -> None:
        assert self.graphs is not None
        if self.trunk.chain is not None:
            self.trunk.chain.capture()
        if not self.graphs.needs_capture():
            return
        self.inputs.slots.fill_(self.max_num_reqs)

        def create_forward_fn(
            desc: BatchExecutionDescriptor, warmup: bool
        ) -> Callable[[CUDAGraphMode], None]:
            return lambda mode: self.draft(desc.num_tokens, desc.uniform_token_count)

        self.graphs.capture(create_forward_fn, "Capturing draft CUDA graphs")

    # Drafting

    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, Tensor] | None,
        last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        next_prefill_tokens: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> Tensor:
        """Draft for all requests of the batch; vLLM's arguments, of which few are needed.

        A request in its prompt gets a draft of stale tokens, which nothing verifies.

        Args:
            last_hidden_states, aux_hidden_states: [rows, H] of the step; None: no further layers.
            last_sampled: [slots, 1] int64, each request's next root.
            temperature: [slots] float32, above 0 for requests that sample.
            num_speculative_tokens: how many the scheduler asks for; None for K.

        Returns:
            [R, K] int64, the trees' nodes in order; 0 in unused places, which vLLM embeds as well.
        """
        requests = input_batch.num_reqs
        verified = requests if input_batch.num_draft_tokens and not dummy_run else 0
        if verified and self.confidence is not None:
            self.confidence.count_step()
        drafts = dummy_run or self._drafts_now(input_batch, num_speculative_tokens)
        length = self._length(num_speculative_tokens, dummy_run) if drafts else 0
        drafts &= length in self.lengths  # What following costs is measured without a draft.
        read = input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states
        ends = num_sampled, num_rejected, last_sampled, next_prefill_tokens, temperature, seeds
        flags = dp_sync_state, dummy_run, skip_attn_for_dummy_run, mm_inputs, is_profile
        if self.trunk.chain is not None:
            with self.meter.measure("draft"):
                self.trunk.follow(length > 0, verified, *read, *ends, *flags)
        if not drafts:
            return self._no_draft(input_batch, temperature, verified)
        padded = requests
        desc = None
        if self.graphs is not None and not is_profile:
            desc = self.graphs.dispatch(requests, requests, length, num_active_loras=0)
            padded = desc.num_tokens
        if dummy_run:
            self.inputs.slots[:padded].fill_(self.max_num_reqs)
            self.inputs.num_verified[:padded].zero_()
        else:
            step = StepEnd(
                input_batch.idx_mapping,
                self.verification.last_rows,
                input_batch.query_start_loc,
                self.verification.staged.num_nodes,
                last_sampled.view(-1),
                temperature,
            )
            own = self.trunk.chain is None  # vLLM's drafter has read its states.
            states = [last_hidden_states, *((own and aux_hidden_states) or ())]
            load_drafts(step, states, self.inputs, verified, padded)
        with self.meter.measure("draft"):
            if desc is not None and desc.cg_mode == CUDAGraphMode.FULL:
                assert self.graphs is not None
                self.graphs.run_fullgraph(desc)
            else:
                self.draft(padded, length)
        return self.drafts[:requests]

    def _drafts_now(self, input_batch: InputBatch, num_speculative_tokens: int | None) -> bool:
        table, possible = self.table, num_speculative_tokens != 0
        drafts = possible and bool(table.wants_nodes[input_batch.idx_mapping_np].any())
        if table.budget is not None:
            drafts = table.budget.drafts_now(drafts)
        if possible and not drafts:
            self.meter.stats.undrafted_steps += 1
        return drafts

    def _length(self, num_speculative_tokens: int | None, dummy_run: bool) -> int:
        """How many levels to search: none deeper than the next step can verify."""
        budget = self.table.budget
        if dummy_run:
            profiled = None if budget is None else budget.profiled_length
            return self.lengths[-1] if profiled is None else profiled
        nodes = num_speculative_tokens or self.config.num_speculative_tokens
        most = length_for(self.lengths, nodes)
        return most if budget is None else budget.next_length(most)

    def _no_draft(self, input_batch: InputBatch, temperature: Tensor, verified: int) -> Tensor:
        """Reset the batch's trees to their roots: they are of earlier steps."""
        slots = input_batch.idx_mapping
        if verified:
            # As `load_drafts` does before a draft.
            self.inputs.num_verified[:verified].copy_(self.verification.staged.num_nodes[:verified])
            torch.index_select(temperature, 0, slots, out=self.inputs.temperatures[:verified])
            self._learn(slots)
        self.trees.num_nodes.index_fill_(0, slots, 1)
        return self.drafts[: input_batch.num_reqs].zero_()

    def _learn(self, slots: Tensor) -> None:
        if self.confidence is not None:
            self.confidence.learn(slots)
        if self.matching is not None:
            self.matching.learn(slots)

    @torch.inference_mode()
    def draft(self, requests: int, length: int) -> None:
        """From the first `requests` inputs to their trees and draft tokens; can be captured.

        The trees that it overwrites are learned from first.
        """
        roots, slots = self.inputs.roots[:requests], self.inputs.slots[:requests]
        self._learn(slots)
        explored, log_odds = self.trunk.explore(requests, length)
        if length:
            allowed = candidate_log_probs(explored, self.config.tree)
            explored = replace(explored, log_probs=allowed)
        found = ScoredNodes(explored, log_odds)
        if self.matching is not None:
            found = self.matching.join(length, found, slots)
        build_tree(
            roots,
            found.nodes.tokens,
            found.nodes.back_pointers,
            found.nodes.log_probs,
            out=self.trees,
            entries=slots,
            log_odds=found.log_odds,
            node_limits=NodeLimits(*self.table.of_requests.gpu[:2]),
            drafts=self.drafts[:requests],
            match_classes=found.match_classes,
        )


def _can_adapt(vllm_config: VllmConfig, config: ReDrafterConfig) -> bool:
    """May the number of verified nodes follow the load? Obstacles are logged."""
    if not config.adaptive:
        return False
    obstacles = list(adaptive_obstacles(vllm_config))
    for obstacle in obstacles:
        logger.warning(WITHOUT_BUDGET, config.num_speculative_tokens, obstacle)
    return not obstacles
