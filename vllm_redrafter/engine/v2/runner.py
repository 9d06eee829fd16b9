# SPDX-License-Identifier: Apache-2.0
"""vLLM's Model Runner V2 with a tree speculator and a tree model state. A step:

1. `VerifyingState.prepare_attn`: stage the trees of the batch, give their rows the positions
   n + depth, hand the trees to the attention layers.
2. The target's forward pass, tree rows through `TreeAttentionImpl`.
3. `TreeVerifier`, in place of the rejection sampler: vLLM's sampler draws at every node, the walk
   accepts a path, compaction moves its KV rows into the linear slots.
4. `TreeSpeculator.propose`: beam search from the last accepted node's hidden state.

Before each step, vLLM's adaptive verification, as `TreeBudget`, decides how many nodes of the whole
batch are verified, and whether the step drafts.
"""

from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.attention import Attention
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.utils.mem_utils import DeviceMemoryProfiler
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder
from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadataBuilder
from vllm.v1.attention.backends.short_conv_attn import (
    PleShortConvAttentionMetadataBuilder,
    ShortConvAttentionMetadataBuilder,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.attn_utils import (
    get_query_lens_mismatch_unsupported_backend,
    get_varlen_cudagraph_unsupported_backend,
)
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.lora_utils import LoraState
from vllm.v1.worker.gpu.model_runner import BatchReqState
from vllm.v1.worker.gpu.model_states import resolve_model_state_cls
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import set_eagle3_aux_hidden_state_layers
from vllm.v1.worker.gpu.states import RequestState
from vllm.v1.worker.utils import AttentionGroup

from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.engine.chains import (
    ANNOUNCEMENT,
    as_chain,
    layers_without_trees,
    recurrent_refusals,
)
from vllm_redrafter.engine.log import logger
from vllm_redrafter.engine.replacement import of_all_ranks, read_replacement
from vllm_redrafter.engine.speculation import Settings
from vllm_redrafter.engine.target_layers import enable_aux_hidden_states
from vllm_redrafter.engine.v2.attention import TreeAttentionBackend, TreeAttentionImpl
from vllm_redrafter.engine.v2.budget import TreeBudget
from vllm_redrafter.engine.v2.chain_trunk import ChainSpeculator
from vllm_redrafter.engine.v2.first_stage_embedding import FirstStageEmbedding
from vllm_redrafter.engine.v2.graph_manager import TreeGraphManager, is_mixed
from vllm_redrafter.engine.v2.model_state import TreeModelState, VerifyingState, chain_state_class
from vllm_redrafter.engine.v2.pipeline import UNREAD_STEPS, TreePPHandler, hand_on_aux_hidden_states
from vllm_redrafter.engine.v2.refusals import state_obstacles
from vllm_redrafter.engine.v2.schedule import max_admitted_rows, max_step_rows
from vllm_redrafter.engine.v2.scheduler import PendingOutput
from vllm_redrafter.engine.v2.speculator import WITHOUT_BUDGET, TreeSpeculator
from vllm_redrafter.engine.v2.trunk import RecurrentTrunk
from vllm_redrafter.engine.v2.verification import TreeTable
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.patching import patched

RECURRENT_BUILDERS = (
    GDNAttentionMetadataBuilder,
    Mamba2AttentionMetadataBuilder,
    PleShortConvAttentionMetadataBuilder,
    ShortConvAttentionMetadataBuilder,
)
"""Those which vLLM's `MambaHybridModelState` tells how many tokens were accepted."""


class _VerifiedAdapters(LoraState):
    """vLLM's table of LoRA adapters, which assumes one row of logits per request.

    `logits` [R] are each request's rows of logits in the step, set before `make_lora_inputs`.
    """

    logits: npt.NDArray[np.int32]

    def make_lora_inputs(
        self, req_ids: list[str], idx_mapping: npt.NDArray[np.int32], *args: Any
    ) -> tuple[tuple[int, ...], tuple[int, ...], set[LoRARequest]]:
        """(the adapter of each row of logits, that of each row, the adapters in use)."""
        _, of_rows, in_use = super().make_lora_inputs(req_ids, idx_mapping, *args)
        return tuple(self.lora_ids[idx_mapping].repeat(self.logits)), of_rows, in_use


class GPUTreeModelRunner(model_runner.GPUModelRunner):
    """Verifies token trees; everything else is vLLM's."""

    speculator: TreeSpeculator | None  # None on all stages of a pipeline but the last
    pp_handler: TreePPHandler | None
    adaptive_verification: TreeBudget | None
    lora_state: _VerifiedAdapters
    model_state: VerifyingState

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        states = partial(_request_states, Settings.of(vllm_config).config)
        with patched(
            model_runner,
            init_speculator=_make_speculator,
            RequestState=states,
            LoraState=_VerifiedAdapters,
            PPHandler=TreePPHandler,
        ):
            super().__init__(vllm_config, device)
        self.settings = Settings.of(vllm_config)
        self.trunk = None
        if self.speculator is not None:
            self.table, self.trunk = self.speculator.table, self.speculator.trunk
        else:
            self.table = TreeTable(self.settings.config, self.max_num_reqs, device)
        if self.pp_handler is not None:
            self.pp_handler.table = self.table
        # Where the drafter reads more than the last hidden state, the target returns more: from
        # graphs as well.
        self.use_aux_hidden_state_outputs |= bool(self.settings.target_layers)
        self._embedding: FirstStageEmbedding | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        with patched(
            model_runner,
            init_model_state=self._make_model_state,
            set_eagle3_aux_hidden_state_layers=self._enable_aux_states,
        ):
            super().load_model(*args, **kwargs)
        with DeviceMemoryProfiler() as memory:
            if self.use_pp and self.settings.model is not None:
                self._embedding = FirstStageEmbedding(self.model, self.vllm_config, self.device)
                self._embedding.copy()
            if isinstance(self.trunk, RecurrentTrunk):
                self.trunk.load_model(self.model)
        self.model_memory_usage += memory.consumed_memory

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        with patched(
            model_runner,
            maybe_create_adaptive_verification_manager=self._make_budget,
            ModelCudaGraphManager=self._make_graph_manager,
        ):
            super().initialize_kv_cache(*args, **kwargs)
        self.table.budget = self.adaptive_verification

    def _make_budget(
        self,
        *,
        enable_adaptive_verification: bool,
        attn_groups: list[list[AttentionGroup]],
        num_bonus_tokens: int,
        vllm_config: VllmConfig,
        **kwargs: Any,
    ) -> TreeBudget | None:
        """As vLLM does; without trimming where the attention reads no trimmed batches."""
        if not enable_adaptive_verification:
            return None
        if reason := _without_graphs(attn_groups, vllm_config):
            logger.warning(WITHOUT_BUDGET, self.num_speculative_steps, reason)
            return None
        rows = self.num_speculative_steps + num_bonus_tokens
        speculator = self.speculator
        assert speculator is not None
        return TreeBudget(
            kwargs["req_states"],
            kwargs["query_start_loc"],
            num_bonus_tokens,
            max_total_logits=kwargs["max_total_logits"],
            meter=speculator.meter,
            lengths=speculator.lengths,
            trees=speculator.trees,
            samples=self.table.samples,
            recorded=speculator.recorded,
            paths=(speculator.config.context_matches, speculator.config.path_length),
            is_chain=speculator.config.tree == "chain",
            follows=self.settings.draft is not None,
            trims=get_query_lens_mismatch_unsupported_backend(attn_groups) is None
            and get_varlen_cudagraph_unsupported_backend(attn_groups, vllm_config, rows) is None,
        )

    def _make_graph_manager(
        self, *args: Any, varlen_decode: bool, **kwargs: Any
    ) -> TreeGraphManager:
        trims = varlen_decode and not self._verifies_all_or_nothing
        # vLLM's Mamba backends let a graph hold steps with drafts alone.
        plain_steps = self._verifies_all_or_nothing and not any(
            isinstance(group.get_metadata_builder(0), BaseMambaAttentionMetadataBuilder)
            for group in chain.from_iterable(self.attn_groups)
        )
        kwargs |= {"varlen_decode": trims, "plain_steps": plain_steps}
        # Stages hand on as many rows as a graph has, so all have the same graphs.
        obstacles = of_all_ranks(list(self.model_state.mixed_obstacles()))
        return TreeGraphManager(*args, mixed_obstacles=obstacles, **kwargs)

    def finish_requests(self, scheduler_output: SchedulerOutput) -> None:
        """As vLLM does; first, answers are entered of slots that become free."""
        if self.table.earlier is not None:
            self.table.earlier.finish(scheduler_output.finished_req_ids)
        super().finish_requests(scheduler_output)

    def gather_batch_req_state(
        self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> tuple[BatchReqState | None, int | None]:
        """As vLLM does; a row per request in steps that verify nothing of what is scheduled.

        The budget plans steps without draft tokens as well: they may end with a draft.
        """
        state, rows = super().gather_batch_req_state(scheduler_output, *args, **kwargs)
        budget = self.adaptive_verification
        if budget is not None and state is not None and state.num_draft_tokens_np is None:
            budget.get_num_tokens(scheduler_output.num_scheduled_tokens, {})
        if state is not None and state.decode_graph_eligible and self._verifies_all_or_nothing:
            rows = 1 if state.num_tokens == len(state.req_ids) else rows
        return state, rows

    def prepare_inputs(self, *args: Any) -> InputBatch:
        """As vLLM does, with the rows of logits, and the query length after all-or-nothing, or of a
        mixed graph, which is all its rows, as at its capture.
        """
        batch, graph = super().prepare_inputs(*args), args[2]
        self.lora_state.logits = np.diff(batch.cu_num_logits_np)
        if self._verifies_all_or_nothing:
            batch.max_query_len = int(np.diff(batch.query_start_loc_np[: batch.num_reqs + 1]).max())
        if is_mixed(graph):
            batch.max_query_len = graph.num_tokens
        return batch

    @property
    def _verifies_all_or_nothing(self) -> bool:
        return self.adaptive_verification is not None and not self.adaptive_verification.trims

    def _dummy_sampler_run(self, hidden_states: Tensor) -> None:
        """Profile the logits of all nodes of a step; vLLM profiles one row per request."""
        rows = min(max_step_rows(self.vllm_config), self.max_num_tokens)
        if self.speculator is not None and self.speculator.enable_adaptive_verification:
            rows = min(rows, max_admitted_rows(self.vllm_config))
        some = torch.arange(rows, device=self.device) % hidden_states.shape[0]
        logits = self.model.compute_logits(hidden_states[some])
        super()._dummy_sampler_run(hidden_states)
        del logits  # until here, as in the step

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        if self.pp_handler is not None:
            self.pp_handler.unread_steps = getattr(scheduler_output, UNREAD_STEPS, None)
        with self.table.meter.measure("forward"):
            return super().execute_model(scheduler_output, *args, **kwargs)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM does; the output also says what was verified."""
        step = self.execute_model_state
        output = super().sample_tokens(*args, **kwargs)
        if step is None:
            return output
        batch = step.input_batch
        if self.pp_handler is not None:
            self.pp_handler.exchange_trees(batch)
        if not isinstance(output, AsyncModelRunnerOutput):
            return output
        if batch.num_draft_tokens_per_req is None and self.adaptive_verification is None:
            return output
        num_nodes = self.table.verification.num_nodes_on_host if batch.num_draft_tokens else None
        return PendingOutput(output, batch, num_nodes, self.adaptive_verification)

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Reload the target as vLLM does; from its own files, reload the drafter as well.

        Raises ConfigError before any reload where the drafter's checkpoint does not fit any more;
        and where a reloaded fp8 cache has other scales than CUDA graphs hold.
        """
        from_files = not (args or kwargs)
        replace_drafter = read_replacement(self.trunk if from_files else None)
        if replace_drafter is None:
            return
        scales = self._cache_scales()
        super().reload_weights(*args, **kwargs)
        if self._embedding is not None:
            self._embedding.copy()
        replace_drafter()
        graphs = self.cudagraph_manager.graphs if self.cudagraph_manager else None
        if graphs and self._cache_scales() != scales:
            raise ConfigError(
                "the reloaded target has other K and V scales than the one that CUDA graphs were "
                "captured with; restart the engine, its output is wrong from here on"
            )

    def _cache_scales(self) -> dict[str, tuple[float, float]]:
        """The K and V scales of each attention layer with an fp8 cache."""
        layers = self.compilation_config.static_forward_context
        return {
            name: (layer._k_scale_float, layer._v_scale_float)
            for name, layer in layers.items()
            if getattr(layer, "kv_cache_dtype", "").startswith("fp8")
        }

    def _enable_aux_states(self, target: nn.Module, *given: Any) -> None:
        if self.settings.draft is not None:
            return set_eagle3_aux_hidden_state_layers(target, *given)
        enable_aux_hidden_states(target, self.settings.target_layers)
        if self.use_pp:
            hand_on_aux_hidden_states(target)

    def _make_model_state(
        self, vllm_config: VllmConfig, model: nn.Module, *args: Any
    ) -> VerifyingState:
        for reason in recurrent_refusals(vllm_config, RECURRENT_BUILDERS):
            raise ConfigError(f"ReDrafter cannot speculate for this target: {reason}")
        if self.table.config.tree != "chain":
            of_this_stage = [
                *layers_without_trees(vllm_config, TreeAttentionBackend),
                *state_obstacles(vllm_config, model),
            ]
            reasons = of_all_ranks(of_this_stage)
            if not reasons:
                return TreeModelState(vllm_config, model, *args, table=self.table)
            logger.info(ANNOUNCEMENT, "; ".join(reasons))
            self.table.config = as_chain(self.table.config)
            for layer in get_layers_from_vllm_config(vllm_config, Attention).values():
                if isinstance(layer.impl, TreeAttentionImpl):
                    # A target that verifies chains reads all rows by vLLM's Triton kernel.
                    layer.impl.flash_attention = None
        state_class = chain_state_class(resolve_model_state_cls(vllm_config, model))
        return state_class(vllm_config, model, *args, table=self.table)


def _without_graphs(attn_groups: list[list[AttentionGroup]], vllm_config: VllmConfig) -> str | None:
    """The first attention backend whose full CUDA graphs cannot hold drafts, in words."""
    for group in chain.from_iterable(attn_groups):
        builder = group.get_metadata_builder(0)
        support = builder.get_cudagraph_support(vllm_config, group.kv_cache_spec)
        if support.value < AttentionCGSupport.UNIFORM_BATCH.value:
            return (
                f"{group.backend.__name__} does not let a full CUDA graph hold a step with drafts"
            )
    return None


def _request_states(config: ReDrafterConfig, *args: Any, **kwargs: Any) -> RequestState:
    """vLLM's, with the texts on the device where drafts look for matches in them."""
    kwargs["use_dense_all_token_ids"] = config.context_matches > 0
    return RequestState(*args, **kwargs)


def _make_speculator(
    vllm_config: VllmConfig, device: torch.device, req_states: RequestState
) -> TreeSpeculator:
    assert vllm_config.speculative_config is not None
    if Settings.of(vllm_config).draft is not None:
        return ChainSpeculator(vllm_config, device, req_states)
    cls: type[TreeSpeculator] = resolve_obj_by_qualname(vllm_config.speculative_config.model)
    return cls(vllm_config, device, req_states)
