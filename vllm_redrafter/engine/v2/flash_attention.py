# SPDX-License-Identifier: Apache-2.0
"""FlashAttention for rows outside of trees: chunks of prompts, and decodes without a draft.

vLLM chooses one attention backend for a layer, and trees need ours, on vLLM's Triton backend. Both
have the same cache layout, [blocks, KV heads, block size, K and V of a head].
"""

from collections.abc import Iterator

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.platforms import current_platform
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

from vllm_redrafter.engine.log import logger

LARGEST_HEAD = 256
"""Of FlashAttention's versions 2 and 3."""


def flash_attention(layer: TritonAttentionImpl) -> FlashAttentionImpl | None:
    """FlashAttention for such a layer; None, and a line in the log, where it cannot serve it.

    Call it while the target is made, when torch's default dtype is the layer's.
    """
    reason = next(obstacles(layer, torch.get_default_dtype()), None)
    if reason is None:
        made = FlashAttentionImpl(
            layer.num_heads,
            layer.head_size,
            layer.scale,
            layer.num_kv_heads,
            alibi_slopes=None,  # refused by ours
            sliding_window=layer.sliding_window[0] + 1 or None,
            kv_cache_dtype=layer.kv_cache_dtype,
            logits_soft_cap=layer.logits_soft_cap,
            attn_type=layer.attn_type,
            sinks=layer.sinks,
        )
        if not made.fa4_hd256:
            logger.info_once("Prompts, and steps without drafts, are read by FlashAttention")
            config = get_current_vllm_config_or_none()
            if config is not None and config.model_config.is_mm_prefix_lm:
                logger.info_once(
                    "Prompts with images are read by vLLM's Triton attention, not by "
                    "FlashAttention: an image's tokens see one another (PrefixLM)"
                )
            return made
        reason = "on this GPU its kernel for head size 256 wants cache blocks of 128 tokens"
    logger.info_once(
        "Prompts, and steps without drafts, are read by vLLM's Triton attention, not by "
        "FlashAttention: %s",
        reason,
    )
    return None


def obstacles(layer: TritonAttentionImpl, dtype: torch.dtype) -> Iterator[str]:
    """Why FlashAttention cannot read this layer's cache, or not as tree attention does."""
    capability = current_platform.get_device_capability()
    if not current_platform.is_cuda() or capability is None:
        yield "it needs a GPU"
        return
    if layer.head_size > LARGEST_HEAD:
        yield (
            f"beyond head size {LARGEST_HEAD} (this layer's is {layer.head_size}) only its version "
            "4 has a kernel, on some GPUs, untested beside trees"
        )
    if layer.kv_cache_dtype.startswith("fp8"):
        yield "with an fp8 cache it takes queries in fp8 as well, and trees' are not quantised"
    yield from FlashAttentionBackend.validate_configuration(
        head_size=layer.head_size,
        dtype=dtype,
        kv_cache_dtype=layer.kv_cache_dtype,
        block_size=None,  # a multiple of 16, as ours
        use_mla=False,
        has_sink=layer.sinks is not None,
        use_sparse=False,
        use_mm_prefix=False,
        use_per_head_quant_scales=False,
        device_capability=capability,
        attn_type=layer.attn_type,
        has_sliding_window=layer.sliding_window[0] >= 0,
    )
