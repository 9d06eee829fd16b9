"""vLLM's Model Runner V2 with a tree speculator and a tree model state.

Both have base classes in vllm/v1/worker/gpu made for this; what vLLM lacks is a way to name ours.
The rest of the step is vLLM's own:

1. `TreeModelState.prepare_attn`: stage the trees of the batch, give their rows the positions
   n + depth, hand the trees to the attention layers.
2. The target's forward pass, tree rows through `TreeAttentionImpl`.
3. `TreeVerifier`, in place of the rejection sampler: vLLM's sampler draws at every node, the walk
   accepts a path, compaction moves its KV rows into the linear slots.
4. `TreeSpeculator.propose`: beam search from the last accepted node's hidden state.

Before each step, vLLM's adaptive verification, as `TreeBudget`, decides how many nodes of the whole
batch are verified, and whether the step drafts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.utils.mem_utils import DeviceMemoryProfiler
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
from vllm.v1.worker.gpu.spec_decode import adaptive_verification
from vllm.v1.worker.gpu.states import RequestState

from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.engine.attention_check import WITHOUT, check_attention
from vllm_redrafter.engine.cuda.attention import TreeAttentionBackend
from vllm_redrafter.engine.cuda.budget import TreeBudget
from vllm_redrafter.engine.cuda.graph_manager import TreeGraphManager
from vllm_redrafter.engine.cuda.model_state import TreeModelState
from vllm_redrafter.engine.cuda.refusals import state_refusals
from vllm_redrafter.engine.cuda.schedule import most_at_once, most_rows
from vllm_redrafter.engine.cuda.speculator import TreeSpeculator
from vllm_redrafter.engine.cuda.verified_output import PendingOutput
from vllm_redrafter.engine.speculation import Settings
from vllm_redrafter.engine.target_layers import enable_aux_hidden_states
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.patching import patched


class GPUTreeModelRunner(model_runner.GPUModelRunner):
    """Verifies token trees; everything else is vLLM's."""

    speculator: TreeSpeculator
    adaptive_verification: TreeBudget | None

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        states = partial(_request_states, Settings.of(vllm_config).config)
        with (
            patched(model_runner, "init_speculator", _make_speculator),
            patched(model_runner, "RequestState", states),
        ):
            super().__init__(vllm_config, device)
        # Where the drafter reads more than the last hidden state, the target returns more: from
        # graphs as well.
        self.use_aux_hidden_state_outputs = bool(self.speculator.target_layers)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        with (
            patched(model_runner, "init_model_state", self._make_model_state),
            patched(model_runner, "set_eagle3_aux_hidden_state_layers", self._enable_aux_states),
        ):
            super().load_model(*args, **kwargs)
        with DeviceMemoryProfiler() as memory:
            self.speculator.load_model(self.model)
        self.model_memory_usage += memory.consumed_memory

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        speculator = self.speculator
        budget = partial(
            TreeBudget,
            meter=speculator.meter,
            lengths=speculator.lengths,
            depths=speculator.trees.depths[:-1, 1:],
            recorded=speculator.recorded,
            paths=(speculator.config.context_matches, speculator.config.path_length),
        )
        with (
            patched(adaptive_verification, "AdaptiveVerificationManager", budget),
            patched(model_runner, "ModelCudaGraphManager", TreeGraphManager),
        ):
            super().initialize_kv_cache(*args, **kwargs)
        speculator.budget = self.adaptive_verification

    def _dummy_sampler_run(self, hidden_states: Tensor) -> None:
        """Let vLLM profile its memory with the logits of a step that verifies: of all its nodes,
        where vLLM knows of one row per request."""
        rows = min(most_rows(self.vllm_config), self.max_num_tokens)
        if self.speculator.enable_adaptive_verification:
            rows = min(rows, most_at_once(self.vllm_config))
        some = torch.arange(rows, device=self.device) % hidden_states.shape[0]
        logits = self.model.compute_logits(hidden_states[some])
        super()._dummy_sampler_run(hidden_states)
        del logits  # until here, as in the step

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        with self.speculator.meter.measure("forward"):
            return super().execute_model(*args, **kwargs)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM does; the output says as well what was verified."""
        step = self.execute_model_state
        output = super().sample_tokens(*args, **kwargs)
        if step is None or not isinstance(output, AsyncModelRunnerOutput):
            return output
        batch = step.input_batch
        if batch.num_draft_tokens_per_req is None:
            return output
        num_nodes = self.speculator.verification.num_nodes_on_host
        return PendingOutput(output, batch, num_nodes if batch.num_draft_tokens else None)

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Reload the target as vLLM does; from its own files, reload the drafter as well.

        Sleep level 2 discards both models' weights: see `WakingWorker` for the drafter's.

        Raises:
            ConfigError: the drafter's checkpoint does not fit any more; nothing is reloaded then.
                Or the target's fp8 cache came with other scales than CUDA graphs hold.
        """
        from_files = not (args or kwargs)
        tensors = self.speculator.read_again() if from_files else {}
        scales = self._cache_scales()
        super().reload_weights(*args, **kwargs)
        if from_files:
            self.speculator.replace_weights(tensors)
        graphs = self.cudagraph_manager.graphs if self.cudagraph_manager else None
        if graphs and self._cache_scales() != scales:
            raise ConfigError(
                "the reloaded target has other K and V scales than the one that CUDA graphs were "
                "captured with; restart the engine, its output is wrong from here on"
            )

    def _cache_scales(self) -> dict[str, tuple[float, float]]:
        """By attention layer with an fp8 cache, what its K and V are multiplied with."""
        layers = self.compilation_config.static_forward_context
        return {
            name: (layer._k_scale_float, layer._v_scale_float)
            for name, layer in layers.items()
            if getattr(layer, "kv_cache_dtype", "").startswith("fp8")
        }

    def _enable_aux_states(self, target: nn.Module, *_: Any) -> None:
        enable_aux_hidden_states(target, self.speculator.target_layers)

    def _make_model_state(
        self,
        vllm_config: VllmConfig,
        model: nn.Module,
        encoder_cache: EncoderCache | None,
        device: torch.device,
    ) -> TreeModelState:
        check_attention(vllm_config, TreeAttentionBackend)
        for reason in state_refusals(vllm_config, model):
            raise ConfigError(f"ReDrafter cannot speculate for this target: {reason}; {WITHOUT}")
        return TreeModelState(vllm_config, model, encoder_cache, device, self.speculator)


def _request_states(config: ReDrafterConfig, *args: Any, **kwargs: Any) -> RequestState:
    """vLLM's, whose texts lie on the device where drafts look for continuations in them."""
    kwargs["use_dense_all_token_ids"] = config.context_matches > 0
    return RequestState(*args, **kwargs)


def _make_speculator(
    vllm_config: VllmConfig, device: torch.device, req_states: RequestState
) -> TreeSpeculator:
    assert vllm_config.speculative_config is not None
    cls: type[TreeSpeculator] = resolve_obj_by_qualname(vllm_config.speculative_config.model)
    return cls(vllm_config, device, req_states)
