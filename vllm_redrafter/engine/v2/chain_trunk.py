# SPDX-License-Identifier: Apache-2.0
"""vLLM's own drafters as a trunk: their chain, with each depth's runner-ups as leaves.

Such a drafter has a KV cache. In every step it reads the target's rows again, as text, of which
those that were rejected are the last; then it decodes L - 1 tokens more. So the accepted path's
rows become its tree's first ones, and attention sees no trees, before vLLM's `propose`.
"""

from copy import copy
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator
from vllm.v1.worker.gpu.states import RequestState

from vllm_redrafter.engine.v2.attention import TreeAttentionMetadata
from vllm_redrafter.engine.v2.model_state import VerifyingState
from vllm_redrafter.engine.v2.speculator import TreeSpeculator
from vllm_redrafter.engine.v2.trunk import Trunk
from vllm_redrafter.engine.v2.verification import Verification
from vllm_redrafter.tree.beam_search import ExploredNodes
from vllm_redrafter.triton_kernels.compact_kv import gather_path
from vllm_redrafter.triton_kernels.grow_beams import BeamBuffers, grow_beams
from vllm_redrafter.triton_kernels.top_candidates import TopTokens, top_candidates
from vllm_redrafter.utils.patching import patched


class _Chain(DraftModelSpeculator):
    """vLLM's drafter, of whose tokens at each depth the best ones are kept, not one alone.

    Attributes:
        reads_states: it reads positions and hidden states of the step, and not tokens alone.
        tops: by depth, [L, R, W] twice and [L, R], each as in `TopTokens`; made before models
            load, as vLLM loses what is made during it in sleep level 2.
        max_rows: that a step of the target has for a request with a tree.
    """

    reads_states = True
    num_speculative_steps: int
    tops: TopTokens
    max_rows: int

    def sample_draft(self, hidden_states: Tensor, *others: Any, **named: Any) -> Tensor:
        """[rows] int64, the best token of each; the depth is on the device, as in graphs."""
        _, _, _, _, draft_step, *_ = others
        logits = self.compute_draft_logits(hidden_states, 0)
        top = top_candidates(logits, self.tops.tokens.shape[2])
        for kept, new in zip(self.tops, top, strict=True):
            kept[:, : len(logits)].index_copy_(0, draft_step.view(1), new[None])
        return top.tokens[:, 0].long()  # a copy: vLLM reads it without a stride


class _DraftModelChain(_Chain, StandaloneARSpeculator):
    reads_states = False

    def _build_attn_metadata(self, *args: Any, **kwargs: Any) -> dict[str, Any] | None:
        """As vLLM does; where a GPU has trimmed a step, the host knows only the sum of its rows."""
        metadata = super()._build_attn_metadata(*args, **kwargs)
        if kwargs["step"] == 0:
            for each in (metadata or {}).values():
                each.max_query_len = max(each.max_query_len, self.max_rows + 1)
        return metadata


class _DependentChain(_Chain, MTPSpeculator):
    """An EAGLE head's too: vLLM's classes differ in what some MTP layers share alone."""

    model_state: VerifyingState

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """As vLLM does; its first pass has the target's rows."""
        with patched(self, num_speculative_steps=self.max_rows - 1):
            super().init_cudagraph_manager(cudagraph_mode)

    def capture(self) -> None:
        """As vLLM does, without trees, and in one part: no graph can follow another choice."""
        state = self.model_state

        def linear(*args: Any, **kwargs: Any) -> dict[str, Any]:
            metadata: dict[str, Any] = super(VerifyingState, state).prepare_attn(*args, **kwargs)
            for each in metadata.values():
                each.max_num_splits = 1
            return metadata

        with patched(state, prepare_attn=linear):
            super().capture()


KINDS: dict[str, type[_Chain]] = {
    "draft_model": _DraftModelChain,
    "eagle": _DependentChain,
    "eagle3": _DependentChain,
    "mtp": _DependentChain,
}
"""By vLLM's name of the method."""


class ChainTrunk(Trunk):
    """vLLM's drafter reads every step's rows, and drafts where the step ends with a draft."""

    chain: _Chain

    def __init__(self, *args: Any, vllm_config: VllmConfig, verification: Verification) -> None:
        super().__init__(*args)
        width, self._length = self.shapes[max(self.shapes)]
        device, self._verification = self.inputs.roots.device, verification
        shape = self._length, len(self.inputs.roots), width
        self._beams = BeamBuffers(shape[1], self._length, width, device)
        # It drafts L tokens, where vLLM is told that there are K; layers register in one context.
        config, speculative = copy(vllm_config), copy(vllm_config.speculative_config)
        assert speculative is not None and speculative.method is not None
        object.__setattr__(speculative, "num_speculative_tokens", self._length)
        object.__setattr__(speculative, "num_speculative_tokens_per_batch_size", None)
        object.__setattr__(config, "speculative_config", speculative)
        self.chain = KINDS[speculative.method](config, device)
        self.chain.max_rows = 1 + vllm_config.num_speculative_tokens
        self.chain.tops = TopTokens(
            torch.zeros(shape, device=device),
            torch.zeros(shape, dtype=torch.int32, device=device),
            torch.zeros(shape[:2], device=device),
        )

    def follow(self, drafts: bool, verified: int, *step: Any) -> None:
        """Without drafts, the drafter still reads the rows, since the next ones attend to them."""
        batch, attn_metadata, _, last_hidden_states, aux_hidden_states, *_ = step
        for metadata in {id(m): m for m in (attn_metadata or {}).values()}.values():
            if isinstance(metadata, TreeAttentionMetadata):  # The rows are linear from here on.
                metadata.set_trees(None)
        if verified:
            rows, staged = [batch.input_ids], self._verification.staged
            if self.chain.reads_states:
                rows += [batch.positions, *(aux_hidden_states or [last_hidden_states])]
            gather_path(self._verification.path[:verified], staged.row_start, rows)
        # For this step alone: vLLM prepares and captures by it, too.
        with patched(self.chain, num_speculative_steps=self._length if drafts else 1):
            self.chain.propose(*step)

    def _explore(self, requests: int, length: int) -> tuple[ExploredNodes, Tensor | None]:
        for level in range(length):
            top = TopTokens(*(kept[level] for kept in self.chain.tops))
            grow_beams(top, level, requests, self._beams, survival=self.survival, beams=1)
        *nodes, log_odds = self._beams.explored(requests, self.survival is not None)
        return ExploredNodes(*nodes), log_odds


class ChainSpeculator(TreeSpeculator):
    """One of vLLM's DraftModelSpeculators, so that vLLM loads the drafter and gives it a cache.

    What the model runner asks of these alone, the drafter itself answers.
    """

    trunk: ChainTrunk

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState
    ) -> None:
        super().__init__(vllm_config, device, req_states)
        self.num_query_per_req = self.trunk.chain.num_query_per_req
        self.num_extra_query_per_req = self.trunk.chain.num_extra_query_per_req

    def __getattr__(self, name: str) -> Any:
        if "trunk" not in vars(self):
            raise AttributeError(name)
        return getattr(self.trunk.chain, name)

    def _make_trunk(self, *given: Any) -> ChainTrunk:
        return ChainTrunk(*given, vllm_config=self.vllm_config, verification=self.verification)


DraftModelSpeculator.register(ChainSpeculator)
