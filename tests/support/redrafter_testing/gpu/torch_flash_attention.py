# SPDX-License-Identifier: Apache-2.0
"""FlashAttention in plain torch, for where there is no GPU; what vLLM does around it is real."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

calls: Counter[str] = Counter()
"""How often it was asked, by whether any request brought more than one query: prompts, decodes."""


def flash_attn_varlen_func(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    seqused_k: Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: list[int],
    block_table: Tensor,
    softcap: float,
    s_aux: Tensor | None,
    **others: Any,
) -> None:
    """On a paged cache [blocks, block size, KV heads, head size]; as strict about shapes as C++."""
    requests = cu_seqlens_q.shape[0] - 1
    assert seqused_k.shape == (requests,) and block_table.shape[0] == requests
    assert cu_seqlens_q.dtype == seqused_k.dtype == block_table.dtype == torch.int32
    assert q.shape == out.shape and causal and not others["alibi_slopes"]
    starts, lengths = cu_seqlens_q.tolist(), seqused_k.tolist()
    assert starts[0] >= 0 and starts[-1] <= q.shape[0]
    assert max(lengths) <= max_seqlen_k
    calls["prompts" if max_seqlen_q > 1 else "decodes"] += 1
    for request, length in enumerate(lengths):
        own = slice(starts[request], starts[request + 1])
        count = own.stop - own.start
        assert count <= max_seqlen_q
        keys, values = (rows_in_cache(cache, block_table[request], length, q) for cache in (k, v))
        scores = torch.einsum("qhd,phd->hqp", q[own].double(), keys) * softmax_scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        distance = torch.arange(length - count, length)[:, None] - torch.arange(length)
        hidden = distance < 0
        if window_size[0] >= 0:
            hidden |= distance > window_size[0]
        scores = scores.masked_fill(hidden, -torch.inf)
        if s_aux is not None:
            sinks = s_aux.double()[:, None, None].expand(-1, count, 1)
            scores = torch.cat([scores, sinks], dim=2)
        weights = scores.softmax(dim=2)[:, :, :length]
        out[own] = torch.einsum("hqp,phd->qhd", weights, values).to(out.dtype)


def rows_in_cache(cache: Tensor, blocks: Tensor, length: int, query: Tensor) -> Tensor:
    """A request's K or V, [length, query heads, head size] in float64."""
    used = blocks[: -(-length // cache.shape[1])].long()
    rows = cache[used].flatten(0, 1)[:length].double()
    return rows.repeat_interleave(query.shape[1] // cache.shape[2], dim=1)


def use(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Layers made from here on find FlashAttention, whatever the dtype and the platform."""
    from vllm.v1.attention.backends import flash_attn

    from redrafter_testing.gpu import replaced_parts
    from vllm_redrafter.engine.v2 import flash_attention

    # vLLM imports these on GPUs only.
    put(flash_attn, "flash_attn_varlen_func", flash_attn_varlen_func)
    put(flash_attn, "reshape_and_cache_flash", replaced_parts.reshape_and_cache_flash)
    put(flash_attn, "get_flash_attn_version", lambda **_: 3)
    put(flash_attn, "flash_attn_supports_sinks", lambda: True)
    put(flash_attention, "obstacles", lambda layer, dtype: iter(()))


def how_often_called(worker: Any) -> dict[str, int]:
    """For `Engine.rpc`."""
    return dict(calls)
