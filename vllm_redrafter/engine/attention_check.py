"""What neither engine can run; each has a list of its own besides.

Most of it shows in the configuration (`common_refusals`), the rest in the layers of the
loaded target (`check_attention`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm_redrafter.utils.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend

WITHOUT = "leave the speculative config out to run it"
"""The remedy where the target itself is the obstacle."""

RAY = (
    "Ray's workers are not supported: on a CPU vLLM has none, and nobody has run this engine in "
    "them on GPUs; leave --distributed-executor-backend and --data-parallel-backend out, for "
    "several machines too (--nnodes)"
)


def common_refusals(vllm_config: VllmConfig) -> Iterator[str]:
    """Why no engine of ours can run this configuration: what it is, and what to do."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if model.runner_type == "pooling":
        yield "it is a pooling model, which does not generate; leave the speculative config out"
    if model.is_encoder_decoder:
        yield f"encoder-decoder models are not supported; {WITHOUT}"
    if model.use_mla:
        yield f"multi-head latent attention (MLA) is not supported; {WITHOUT}"
    if model.is_hybrid or model.is_attention_free:
        yield (
            "models with Mamba or linear-attention layers keep a state that no tree can share; "
            f"{WITHOUT}"
        )
    if model.attention_chunk_size is not None:
        yield (
            f"its attention is local to chunks of {model.attention_chunk_size} tokens, which vLLM "
            f"reads as requests of their own; {WITHOUT}"
        )
    if vllm_config.kv_transfer_config is not None:
        # vLLM makes the one of the other.
        offloads = vllm_config.cache_config.kv_offloading_size is not None
        yield (
            "a KV connector would ship the cache before accepted rows are compacted; leave "
            f"{'--kv-offloading-size' if offloads else '--kv-transfer-config'} out"
        )
    if vllm_config.cache_config.kv_sharing_fast_prefill:
        yield "KV-sharing fast prefill is not supported; leave --kv-sharing-fast-prefill out"
    if parallel.use_ray or parallel.data_parallel_backend == "ray":
        yield RAY
    for name in (
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
    ):
        if (size := getattr(parallel, name, 1)) > 1:
            yield f"{name} is {size}, it must be 1"


def check_attention(vllm_config: VllmConfig, backend: type[AttentionBackend]) -> None:
    """Refuse a target that has a layer in which trees cannot be verified.

    A tree needs layers whose state is a plain paged KV cache that our attention reads. A layer of
    another backend keeps or reads its state in another way, and so may a layer whose backend is
    derived from ours.

    Args:
        vllm_config: the target's layers have been made.
        backend: ours.

    Raises:
        ConfigError: there are such layers.
    """
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    others: dict[str, list[str]] = {}
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    for name, layer in layers.items():
        spec, its_backend = layer.get_kv_cache_spec(vllm_config), layer.get_attn_backend()
        is_paged = type(spec) in (FullAttentionSpec, SlidingWindowSpec)
        if spec is not None and not (is_paged and its_backend is backend):
            kind = f"{type(layer).__name__} on {its_backend.__name__}"
            others.setdefault(kind, []).append(name)
    if others:
        found = ", ".join(
            f"{len(names)} {kind} ({names[0]!r} the first)" for kind, names in others.items()
        )
        raise ConfigError(
            f"ReDrafter cannot speculate for {vllm_config.model_config.model!r}: trees need vLLM's "
            f"plain attention in every layer, and this target has {found}; {WITHOUT}"
        )
