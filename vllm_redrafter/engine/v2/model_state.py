# SPDX-License-Identifier: Apache-2.0
"""The per-step state of verification, on vLLM's ModelState.

vLLM computes the step's slots from linear positions, then calls `prepare_attn`: there the trees are
staged in the batch's order, and the positions become n + depth, in the buffer that CUDA graphs read
and that the sampler keys its noise by. A chain is linear: its positions, vLLM's attention and its
accepted rows stay as they are, so any class of state can verify it (`chain_state_class`).
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import get_layers_from_vllm_config
from vllm.config.compilation import CUDAGraphMode
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.model_executor.layers.attention import Attention
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState, use_penalty
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

from vllm_redrafter.engine.refusals import REMEDY_DISABLE
from vllm_redrafter.engine.request_options import requested_nodes
from vllm_redrafter.engine.v2.attention import TreeRows
from vllm_redrafter.engine.v2.one_pass_sampler import OnePassSampler
from vllm_redrafter.engine.v2.tree_verifier import TreeVerifier
from vllm_redrafter.engine.v2.verification import TreeTable
from vllm_redrafter.triton_kernels.stage_trees import add_depths
from vllm_redrafter.utils.errors import ConfigError

TREE_PROCESSORS = (LogitBiasState, PenaltiesState, BadWordsState)
"""vLLM's own logits processors: what they need is known, and `_needs_chain` says who needs it."""


class VerifyingState(ModelState):
    """Stages drafts for the scorer, which walks them; a mixin of vLLM's states."""

    def __init__(self, *args: Any, table: TreeTable) -> None:
        super().__init__(*args)
        self.table, self.verification = table, table.verification
        self._every_request_needs_chain = False

    def custom_sampler(self, sampler: Sampler) -> tuple[Sampler, TreeVerifier]:
        """Replace both samplers; ConfigError for targets with a sampler of their own."""
        if super().custom_sampler(sampler) or self.num_new_sampled_tokens_per_step != 1:
            raise ConfigError(
                f"{type(self.model).__name__} samples by rules of its own, by which no draft can "
                f"be verified; {REMEDY_DISABLE}"
            )
        # A processor of the user's may look at the output so far, of which vLLM knows chains.
        self._every_request_needs_chain = self.table.config.tree == "chain" or not all(
            isinstance(processor, TREE_PROCESSORS) for processor in sampler.logits_processors
        )
        if sampler.logprobs_mode not in PROCESSED_LOGPROBS_MODES:
            sampler = OnePassSampler(sampler)
        return sampler, TreeVerifier(sampler, self.verification, self.table.meter)

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        super().add_request(req_index, new_req_data)
        params = new_req_data.sampling_params
        chain = self._every_request_needs_chain or (params is not None and _needs_chain(params))
        most = self.table.config.num_speculative_tokens
        options = None if params is None else params.extra_args
        samples = params is not None and params.temperature > 0
        self.table.add_request(req_index, chain, requested_nodes(options, most), samples)
        if self.table.earlier is not None:
            self.table.earlier.begin(req_index, new_req_data)

    def apply_staged_writes(self) -> None:
        super().apply_staged_writes()
        self.table.apply_staged_writes()

    @property
    def _is_profiling(self) -> bool:
        budget = self.table.budget
        return budget is not None and budget.profiled_length is not None

    def dummy_inputs_embeds(self, num_tokens: int) -> Tensor:
        """As vLLM does; of random tokens while costs are measured."""
        embeds = super().dummy_inputs_embeds(num_tokens)
        if self._is_profiling:
            vocabulary = self.model_config.get_vocab_size()
            tokens = torch.randint(vocabulary, (num_tokens,), device=self.device)
            embeds.copy_(self.model.embed_input_ids(tokens))
        return embeds

    def prepare_attn(
        self,
        input_batch: InputBatch,
        cudagraph_mode: CUDAGraphMode,
        *args: Any,
        for_capture: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        if self._is_profiling:
            # vLLM marks a dummy run's rows as padding, which no expert computes.
            input_batch.is_padding.fill_(False)
        graph = for_capture or cudagraph_mode == CUDAGraphMode.FULL
        if graph or input_batch.num_draft_tokens:
            requests = input_batch.num_reqs_after_padding if graph else input_batch.num_reqs
            self.verification.stage(self.table.trees, input_batch, requests)
        metadata: dict[str, Any] = super().prepare_attn(
            input_batch, cudagraph_mode, *args, for_capture=for_capture, **kwargs
        )
        self._attach_trees(metadata, input_batch, graph, for_capture)
        return metadata

    def _attach_trees(
        self, metadata: dict[str, Any], input_batch: InputBatch, graph: bool, dummy: bool
    ) -> None:
        """Hand the staged trees to the attention layers; a chain needs none."""

    def mixed_obstacles(self) -> Iterator[str]:
        """Why no full CUDA graph can hold a step that reads a prompt, if so."""
        yield "chains are verified"


class TreeModelState(VerifyingState, DefaultModelState):
    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, block_tables: BlockTables
    ) -> None:
        super().initialize_kv_cache(kv_cache_config, block_tables)
        layers = self.vllm_config.compilation_config.static_forward_context
        self.verification.use_caches(
            block_tables.slot_mappings,
            [
                # A drafter's cache is written anew, in the order of the text.
                [
                    layers[name].kv_cache
                    for name in group.layer_names
                    if not getattr(layers[name], "is_draft_layer", False)
                ]
                for group in kv_cache_config.kv_cache_groups
            ],
        )

    def mixed_obstacles(self) -> Iterator[str]:
        layers: Any = get_layers_from_vllm_config(self.vllm_config, Attention).values()
        kernels = (layer.impl.flash_attention for layer in layers)
        # Of other versions it was not found out whether lists of rows may begin beyond the first.
        if any(getattr(kernel, "vllm_flash_attn_version", 0) != 3 for kernel in kernels):
            yield "not all layers read prompts by FlashAttention 3"
        if self.supports_mm_inputs:  # Some keep images' features until their next Python call.
            yield "the target reads images"
        if self.vllm_config.lora_config is not None:
            yield "there are LoRA adapters"

    def _attach_trees(
        self, metadata: dict[str, Any], input_batch: InputBatch, graph: bool, dummy: bool
    ) -> None:
        mixed = (input_batch.max_query_len or 0) > self.verification.staged.tokens.shape[1]
        if graph and not (mixed or dummy):
            return  # A graph of decoding steps sends all rows through tree attention.
        if graph:  # A dummy step does not say whether its graph is a mixed one.
            _, rows = self._leading(input_batch)
            self.verification.split_rows(input_batch.query_start_loc, rows)
        trees = self._graph_rows(input_batch, mixed) if graph else self._leading_rows(input_batch)
        # By identity: layers of one group share their metadata.
        for each in {id(m): m for m in metadata.values()}.values():
            each.set_trees(trees)

    def prepare_inputs(
        self, input_batch: InputBatch, req_states: RequestState
    ) -> dict[str, Tensor | None]:
        """As vLLM does; M-RoPE positions of tree rows become n + delta + depth."""
        inputs = super().prepare_inputs(input_batch, req_states)
        if self.rope_state is not None and input_batch.num_draft_tokens:
            staged, positions = self.verification.staged, self.rope_state.positions
            add_depths(staged, input_batch.cu_num_logits, positions)
        return inputs

    def _graph_rows(self, input_batch: InputBatch, mixed: bool) -> TreeRows:
        """All rows, as if all were trees': of equal sizes, or of up to `max_query_len` rows."""
        requests = input_batch.num_reqs_after_padding
        rows, staged = input_batch.num_tokens_after_padding, self.verification.staged
        most = min(rows, input_batch.max_query_len or rows // requests, staged.tokens.shape[1])
        fewest = min(requests, -(-rows // most))
        starts, rest = self.verification.starts[:, : requests + 1] if mixed else (None, None)
        return TreeRows(staged, requests, rows, most, fewest, rest, starts)

    def _leading_rows(self, input_batch: InputBatch) -> TreeRows | None:
        requests, rows = self._leading(input_batch)
        if not requests:
            return None
        rest = None
        if requests < input_batch.num_reqs:
            rest = input_batch.query_start_loc[requests : input_batch.num_reqs + 1] - rows
        staged = self.verification.staged
        return TreeRows(staged, requests, rows, staged.tokens.shape[1], requests, rest)

    def _leading(self, input_batch: InputBatch) -> tuple[int, int]:
        """The requests with draft tokens, which vLLM sorts to the front, and their rows.

        After trimming, the host knows their sum, not each request's rows.
        """
        drafted = input_batch.num_draft_tokens_per_req
        if not input_batch.num_draft_tokens or drafted is None:
            return 0, 0
        requests = int(np.count_nonzero(drafted))
        assert drafted[:requests].all(), "vLLM no longer sorts verified requests to the front"
        return requests, int(input_batch.query_start_loc_np[requests])


def chain_state_class(base: type[ModelState]) -> type[VerifyingState]:
    """For chains, on the state that vLLM would give the target."""
    return type(f"Chain{base.__name__}", (VerifyingState, base), {})


def _needs_chain(params: SamplingParams) -> bool:
    """Does vLLM apply something along the request's draft tokens, which must then be a chain?"""
    return bool(
        params.structured_outputs is not None
        or use_penalty(params)
        or params.bad_words_token_ids
        or params.thinking_token_budget is not None
    )
