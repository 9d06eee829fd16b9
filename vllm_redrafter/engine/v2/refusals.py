# SPDX-License-Identifier: Apache-2.0
"""Configurations that the engine on Model Runner V2 refuses, or runs with chains only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm_redrafter.engine import chains, kv_connectors
from vllm_redrafter.engine.refusals import REMEDY_CHAIN, common_refusals

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import ModelConfig, VllmConfig

    from vllm_redrafter.config import ReDrafterConfig


_MAX_ON_ROCM = 256
"""Head size: with 512 a tile takes 97 KiB, and a gfx942 has 64."""


def refusals(vllm_config: VllmConfig) -> Iterator[str]:
    """Why this engine cannot run this configuration: what it is, and what to do."""
    from vllm_redrafter.engine.speculation import Settings

    yield from common_refusals(vllm_config)
    yield from kv_connectors.connector_refusals(vllm_config, kv_connectors.ON_CUDA)
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if not vllm_config.use_v2_model_runner:
        yield "it needs Model Runner V2; unset VLLM_USE_V2_MODEL_RUNNER"
    settings = Settings.of(vllm_config)
    config = settings.config
    if settings.draft is not None:
        yield from _refusals_of_drafts(vllm_config, settings.draft, config.tree != "chain")
    if config.tree != "chain":
        yield from (f"{reason}; {REMEDY_CHAIN}" for reason in _refusals_of_trees(vllm_config))
    yield from _search_refusals(config)
    watermarks = getattr(vllm_config, "watermark_config", None) is not None
    sharded, routed = parallel.enable_batch_sharded_sampling, vllm_config.aux_output_config.enabled
    for feature, option, applies in (
        ("dual batch overlap", "--enable-dbo", parallel.use_ubatching),
        ("elastic expert parallelism", "--enable-elastic-ep", parallel.enable_elastic_ep),
        ("batch-sharded sampling", "--enable-batch-sharded-sampling", sharded),
        ("watermarking", "--watermark-config", watermarks),
        ("trace replay", "--enable-trace-replay", model.enable_trace_replay),
        ("returning sampling masks", "--return-sampling-mask", model.return_sampling_mask),
        # They are returned by row, and accepted rows are moved.
        ("returning routed experts", "--enable-return-routed-experts", routed),
    ):
        if applies:
            yield f"{feature} is not supported; leave {option} out"
    if parallel.pipeline_parallel_size > 1:
        yield from _refusals_of_stages(vllm_config)


def _refusals_of_drafts(vllm_config: VllmConfig, method: str, trees: bool) -> Iterator[str]:
    """What was never tried with a drafter of vLLM's, and those that do not fit the target."""
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

    model, speculative = vllm_config.model_config, vllm_config.speculative_config
    assert speculative is not None
    alone = "take the draft's own method"
    if speculative.method != method:
        yield f"vLLM takes the draft for one of method {speculative.method!r}; name that one"
        return
    if speculative.use_multi_module_mtp():
        # It reads again as many rows as were rejected, and has kept those of its own chain.
        yield f"vLLM drafts with several MTP layers in its own chains alone; {alone}"
    draft = speculative.draft_model_config
    is_mtp, head = method == "mtp", draft.hf_config
    for what, applies in (
        ("pipeline stages", vllm_config.parallel_config.pipeline_parallel_size > 1),
        ("data parallelism", vllm_config.parallel_config.data_parallel_size > 1),
        ("LoRA adapters", vllm_config.lora_config is not None),
        ("a KV connector", vllm_config.kv_transfer_config is not None),
        ("a target that reads images or audio", model.is_multimodal_model),
        ("a target with recurrent layers", model.is_hybrid and not is_mtp),
        ("multi-head latent attention (MLA)", model.use_mla and not is_mtp),
        ("Gemma 4's MTP, which reads the target's cache", speculative.use_gemma4_mtp()),
        ("MTP layers that read several residuals", getattr(head, "hc_mult", 1) > 1),
        (
            "an EAGLE-3 head as another method",
            method != "eagle3" and "Eagle3" in str(head.architectures),
        ),
    ):
        if applies:
            yield (
                f"'draft' and {what} have never been tried together; leave one of them out, or "
                f"{alone}"
            )
    if trees and not is_mtp:  # Its layers get the target's attention backend.
        yield from (f"of its draft, {reason}; {REMEDY_CHAIN}" for reason in chain_reasons(draft))
    # vLLM itself checks a draft model's vocabulary, and gives heads the target's positions.
    if method == "draft_model" and (most := draft.max_model_len) < (asked := model.max_model_len):
        yield f"max_model_len is {asked}, and its draft's {most}; set --max-model-len to {most}"
    reads = getattr(head, "target_hidden_size", None) or draft.get_hidden_size()
    own = reads, draft.get_vocab_size()
    needed = model.get_hidden_size(), model.get_vocab_size()
    if method.startswith("eagle") and own != needed:
        yield f"hidden and vocabulary size are {needed}, its draft's {own}; name a head that fits"
    if method != "eagle3":
        return
    # vLLM hands out the layers that config.json lists, or three; a head reads as many as it says.
    eagle = getattr(head, "eagle_config", None) or {}
    listed = get_eagle3_aux_layers_from_config(speculative)
    given = len({*range(model.get_total_num_hidden_layers() + 1)}.intersection(listed or range(3)))
    read = getattr(head, "num_aux_hidden_states", None)
    read = read or len(eagle.get("eagle_aux_hidden_state_layer_ids") or range(3))
    if given != read and eagle.get("use_aux_hidden_state", True):
        yield (
            f"the EAGLE-3 head {speculative.model!r} reads {read} layers of the target, and vLLM "
            f"would hand it {given}: list them in its config.json, as "
            "eagle_aux_hidden_state_layer_ids beside architectures"
        )


def _refusals_of_stages(vllm_config: VllmConfig) -> Iterator[str]:
    tried = "pipeline stages and {} have never been tried together; leave one of them out"
    if vllm_config.lora_config is not None:
        yield tried.format("LoRA adapters")
    if vllm_config.kv_transfer_config is not None:
        yield tried.format("a KV connector")
    if vllm_config.scheduler_config.async_scheduling is False:
        # By vLLM 0.32, its scheduler takes one step's drafts for another's.
        yield (
            "vLLM verifies no drafts in pipeline stages without asynchronous scheduling; leave "
            "--no-async-scheduling out"
        )


def chain_reasons(model: ModelConfig) -> Iterator[str]:
    """Why a tree cannot be verified on this target, by its configuration; nothing where it can."""
    yield from chains.chain_reasons(model)
    if model.rswa_window is not None:
        yield "its attention has a reference sliding window"
    if not (model.use_mla or model.is_hybrid):
        yield from _head_size_obstacles(model.get_head_size())


def adaptive_obstacles(vllm_config: VllmConfig) -> Iterator[str]:
    """Why the number of verified nodes cannot follow the load in this configuration."""
    if not vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs():
        yield (
            "vLLM's adaptive verification needs full CUDA graphs; leave --enforce-eager out, or "
            "choose cudagraph_mode FULL_AND_PIECEWISE"
        )
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        yield (
            "vLLM's adaptive verification does not know pipeline stages; set "
            "--pipeline-parallel-size to 1"
        )
    if vllm_config.lora_config is not None:
        yield (
            "the host says which row has which LoRA adapter, before a GPU would decide which nodes "
            "are verified; leave --enable-lora out"
        )


def layer_obstacles(layer: Any) -> Iterator[str]:
    """Why tree attention cannot serve a layer, vLLM's TritonAttentionImpl; layers may differ."""
    from vllm.v1.attention.backend import AttentionType

    yield from _head_size_obstacles(layer.head_size)
    obstacles = {
        f"{layer.attn_type} attention": layer.attn_type != AttentionType.DECODER,
        "ALiBi": layer.alibi_slopes is not None,
        "chunked attention": layer.chunk_lookback > -1,
        f"a cache of dtype {layer.kv_cache_dtype!r}": (
            layer._is_per_token_head_quant or layer.kv_cache_dtype == "fp8_e5m2"
        ),
    }
    yield from (obstacle for obstacle, applies in obstacles.items() if applies)


def state_obstacles(vllm_config: VllmConfig, model: nn.Module) -> Iterator[str]:
    """Why the steps of this model's class cannot verify trees."""
    from vllm.v1.worker.gpu.model_states import resolve_model_state_cls
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    wanted = resolve_model_state_cls(vllm_config, model)
    if wanted is not DefaultModelState:
        yield f"the steps of {type(model).__name__} need vLLM's {wanted.__name__}"


def _head_size_obstacles(head_size: int) -> Iterator[str]:
    # Here, as the plugin imports this module in all of vLLM's processes, and this imports Triton.
    from vllm.platforms import current_platform

    from vllm_redrafter.triton_kernels.tree_attention_arguments import HEAD_DIMS

    if head_size not in HEAD_DIMS:
        yield f"heads of {head_size} numbers (tree attention knows {HEAD_DIMS})"
    elif head_size > _MAX_ON_ROCM and current_platform.is_rocm():
        yield f"heads of {head_size} numbers (tree attention on ROCm: at most {_MAX_ON_ROCM})"


def _search_refusals(config: ReDrafterConfig) -> Iterator[str]:
    # Here for the same reason.
    from vllm_redrafter.triton_kernels.build_tree import MAX_CANDIDATES

    matches, levels = config.context_matches, config.beam_length
    if matches:
        levels = max(levels, config.path_length)
    candidates = levels * (config.beam_width + matches)
    if candidates > MAX_CANDIDATES:
        yield (
            f"beam_width {config.beam_width}, beam_length {config.beam_length} and context_matches "
            f"{matches} make {candidates} candidates for a tree, of which the GPU ranks at most "
            f"{MAX_CANDIDATES}; choose smaller ones"
        )


def _refusals_of_trees(vllm_config: VllmConfig) -> Iterator[str]:
    from vllm import envs
    from vllm.platforms import current_platform

    if envs.VLLM_BATCH_INVARIANT:
        yield "tree attention's rounding depends on the batch; unset VLLM_BATCH_INVARIANT"
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    same = str(vllm_config.model_config.dtype).removeprefix("torch.")
    if cache_dtype not in ("auto", same, "fp8", "fp8_e4m3"):
        yield f"kv_cache_dtype is {cache_dtype!r}; use 'auto', {same!r} or 'fp8'"
    if cache_dtype.startswith("fp8") and current_platform.is_rocm():
        yield f"kv_cache_dtype is {cache_dtype!r}, whose format on ROCm is another; use 'auto'"
    older_gpu = current_platform.is_cuda() and not current_platform.has_device_capability(89)
    if cache_dtype.startswith("fp8") and older_gpu:
        capability = current_platform.get_device_capability()
        yield (
            f"kv_cache_dtype is {cache_dtype!r}, which GPUs convert from compute capability 8.9 "
            f"on, and this one has {capability.as_version_str() if capability else 'none'}; use "
            "'auto'"
        )
