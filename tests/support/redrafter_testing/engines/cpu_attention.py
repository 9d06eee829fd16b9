# SPDX-License-Identifier: Apache-2.0
"""vLLM's attention kernel for CPUs, and trees in it, without an engine."""

from dataclasses import dataclass

from torch import Tensor
from vllm import _custom_ops as ops

from vllm_redrafter.engine.cpu.cache_layout import cache_layout
from vllm_redrafter.engine.cpu.tree_sequences import CopiedUnits, tree_parts
from vllm_redrafter.tree.token_tree import TokenTree


@dataclass(frozen=True)
class AttentionVariant:
    """How scores are changed: -1 is no window, 0 is no cap."""

    scale: float
    sliding_window: int = -1
    soft_cap: float = 0.0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None


def attend(
    query: Tensor,
    kv_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    variant: AttentionVariant,
    output: Tensor,
) -> None:
    """Causal attention of sequences, as `CPUAttentionBackendImpl.forward` asks for it."""
    blocks, kv_heads, block_size, both = kv_cache.shape
    keys, values = kv_cache.view(blocks, kv_heads, 2 * block_size, both // 2).chunk(2, dim=2)
    schedule = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(seq_lens),
        num_heads=query.shape[1],
        num_kv_heads=kv_heads,
        head_dim=both // 2,
        seq_lens=seq_lens,
        dtype=query.dtype,
        query_start_loc=query_start_loc,
        causal=True,
        sliding_window_size=variant.sliding_window,
        isa="vec",
        enable_kv_split=True,
    )
    ops.cpu_attention_with_kv_cache(
        query=query,
        key_cache=keys,
        value_cache=values,
        output=output,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        scale=variant.scale,
        causal=True,
        alibi_slopes=variant.alibi_slopes,
        sliding_window=variant.sliding_window,
        block_table=block_table,
        softcap=variant.soft_cap,
        scheduler_metadata=schedule,
        s_aux=variant.sinks,
    )


def attend_to_trees(
    query: Tensor,
    kv_cache: Tensor,
    tree: TokenTree,
    root_rows: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    variant: AttentionVariant,
    output: Tensor,
) -> None:
    """Attention of all trees' nodes, whose rows of `output` are written: see `tree_parts`."""
    block_size, both = kv_cache.shape[2:]
    window = variant.sliding_window
    bytes_of_token = kv_cache[0, :, 0].nbytes
    copied = CopiedUnits(cache_layout("vec", both // 2, block_size, kv_cache.dtype))
    for sequences, copies in tree_parts(
        tree, root_rows, context_lens, block_table, block_size, window, bytes_of_token
    ):
        attend(query, copied.write(copies, kv_cache), *sequences, variant, output)
