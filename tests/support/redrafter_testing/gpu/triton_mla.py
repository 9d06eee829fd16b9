# SPDX-License-Identifier: Apache-2.0
"""vLLM's Triton backend of MLA in place of that for CPUs, whose n-gram method is not lossless."""

from typing import Any

import torch
from torch import Tensor


def use() -> None:
    """In this process, from here on; the engine has not been made."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    choose = CpuPlatform.get_attn_backend_cls
    check = CpuPlatform.check_and_update_config.__func__

    def backend(selected_backend: Any, attn_selector_config: Any, num_heads: int | None) -> str:
        if attn_selector_config.use_mla:
            return str(AttentionBackendEnum.TRITON_MLA.get_path())
        return str(choose(selected_backend, attn_selector_config, num_heads))

    def check_config(cls: type[CpuPlatform], vllm_config: Any) -> None:
        """Keep prompts in chunks and prefix caching, which the backend for CPUs cannot do."""
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        kept = (scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens)
        caching = cache.enable_prefix_caching
        check(cls, vllm_config)
        if vllm_config.model_config.use_mla:
            scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = kept
            cache.enable_prefix_caching = caching

    CpuPlatform.get_attn_backend_cls = staticmethod(backend)
    CpuPlatform.check_and_update_config = classmethod(check_config)
    # vLLM's for CPUs takes the rows of keys, which are parts of longer rows, for whole ones.
    RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native
    _custom_ops.concat_and_cache_mla = concat_and_cache_mla
    _custom_ops.gather_and_maybe_dequant_cache = gather_cache


def concat_and_cache_mla(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    scale: Tensor,
) -> None:
    """Write a step's rows into the cache, but for negative slots. No fp8 cache is tested here."""
    rows = (slot_mapping >= 0).nonzero().squeeze(1)
    new = torch.cat([kv_c[rows], k_pe[rows]], dim=1)
    kv_cache.view(-1, kv_cache.shape[2])[slot_mapping[rows]] = new.to(kv_cache.dtype)


def gather_cache(
    cache: Tensor,
    rows: Tensor,
    block_table: Tensor,
    first_rows: Tensor,
    request_of_row: Tensor,
    num_rows: int,
    kv_cache_dtype: str,
    scale: Tensor,
    starts: Tensor | None = None,
) -> None:
    """Read a part of each request's cached rows, from row `starts` on or the first."""
    request = request_of_row[:num_rows].long()
    at = torch.arange(num_rows) - first_rows[request]
    if starts is not None:
        at = at + starts[request]
    size = cache.shape[1]
    rows[:num_rows] = cache[block_table[request, at // size].long(), at % size]
