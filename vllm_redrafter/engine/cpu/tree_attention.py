"""Attention of verified trees over a paged KV cache, in matrix products. Torch and numpy only.

A tree's K+1 rows lie in the linear slots n .. n+K of their request, in node order, where n is the
context length. Node i sees every slot of the context, and among the tree's slots those of its
ancestors and its own. Its position is n + depth(i), which is what RoPE, sliding windows and ALiBi
must see instead of the slot.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vllm_redrafter.engine.cpu.tree_parts import (
    Indices,
    LayerShape,
    Products,
    TreePart,
    Workspace,
    split_requests,
)
from vllm_redrafter.token_tree import TokenTree


@dataclass
class TreeQueries:
    """The trees of one step, ready for attention; built once, used by every layer.

    Attributes:
        tree: R trees with T = K+1 node slots.
        rows: [R, T] int64, the flat query row of each node; unused slots repeat their root's.
        context_lens: [R] int64, n.
        block_table: [R, >= blocks in use] integers, of one KV cache group.
        block_size: tokens per block.
    """

    tree: TokenTree
    rows: Tensor
    context_lens: Tensor
    block_table: Tensor
    block_size: int
    _products: dict[tuple[LayerShape, int], list[Products]] = field(default_factory=dict)

    def products(
        self, shape: LayerShape, sliding_window: int, workspace: Workspace
    ) -> list[Products]:
        """What layers of one shape and window share; planned when the first of them asks."""
        key = shape, sliding_window
        if key not in self._products:
            self._products[key] = [
                Products(part, shape, workspace) for part in self.parts(shape, sliding_window)
            ]
        return self._products[key]

    def parts(self, shape: LayerShape, sliding_window: int) -> list[TreePart]:
        """The trees, split so that each part's K and V are gathered at once."""
        context, nodes = self.context_lens.numpy(), self.tree.num_nodes.numpy()
        end = -(-(context + nodes) // self.block_size)
        first = np.zeros_like(end)
        if sliding_window > 0:
            # The root is the first node by position: no other sees as far back.
            first = (context - sliding_window + 1).clip(0) // self.block_size
        block_bytes = 4 * shape.kv_heads * 2 * shape.head_size * self.block_size
        requests = split_requests(end - first, block_bytes)
        return [self._part(chosen, first, end, sliding_window) for chosen in requests]

    def _part(self, chosen: Indices, first: Indices, end: Indices, window: int) -> TreePart:
        """The trees of the requests `chosen`, and their blocks from `first` until before `end`."""
        num_nodes = self.tree.num_nodes.numpy()[chosen]
        slots = slice(0, num_nodes.max())
        first, end = first[chosen], end[chosen]
        blocks = first[:, None] + np.arange((end - first).max())
        table = self.block_table.numpy()
        ids = table[chosen[:, None], blocks.clip(max=table.shape[1] - 1)].astype(np.int64)
        # Beyond a request's own blocks the table holds stale numbers: read block 0 there.
        ids[blocks >= end[:, None]] = 0
        return TreePart(
            num_nodes=num_nodes,
            depths=self.tree.depths.numpy()[chosen, slots].astype(np.int64),
            ancestors=self.tree.ancestor_mask.numpy()[chosen, slots, slots],
            rows=self.rows.numpy()[chosen, slots],
            context_lens=self.context_lens.numpy()[chosen],
            first_slots=first * self.block_size,
            block_ids=ids,
            block_size=self.block_size,
            sliding_window=window,
        )


@dataclass(frozen=True)
class AttentionVariant:
    """How a model bends its attention scores.

    Attributes:
        scale: multiplies q.k.
        sliding_window: keys at least this many positions back are hidden; -1 for none.
        soft_cap: scores become cap * tanh(score / cap); 0 for none.
        alibi_slopes: [query heads] or None; slope * (key position - query position) is added.
        sinks: [query heads] or None; a further score per head whose value is zero.
    """

    scale: float
    sliding_window: int = -1
    soft_cap: float = 0.0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None


def paged_tree_attention(
    query: Tensor,
    kv_cache: Tensor,
    queries: TreeQueries,
    variant: AttentionVariant,
    output: Tensor,
    workspace: Workspace,
) -> None:
    """Attention of all trees' nodes; one softmax runs over context and tree together.

    Args:
        query: [tokens, query heads, head size], of the whole batch.
        kv_cache: [blocks, KV heads, block size, 2 * head size] in vLLM's CPU layout, contiguous;
            the rows of the trees are in it already.
        queries: the step's trees.
        variant: the layer's scores.
        output: as `query`; only the nodes' rows are written.
        workspace: memory for what is gathered and computed on the way.
    """
    kv_heads, head_size = kv_cache.shape[1], query.shape[2]
    shape = LayerShape(kv_heads, query.shape[1] // kv_heads, head_size, kv_cache.dtype)
    for products in queries.products(shape, variant.sliding_window, workspace):
        products.read(query, kv_cache)
        _score(products, variant)
        torch.softmax(products.scores, dim=-1, out=products.weights)
        torch.bmm(products.weights, products.values, out=products.attended)
        if variant.sinks is not None:
            _let_sinks_share(products, variant.sinks)
        products.write(output)


def _score(products: Products, variant: AttentionVariant) -> None:
    part, heads = products.part, (products.shape.kv_heads, products.shape.group, 1, 1)
    scale = variant.scale / variant.soft_cap if variant.soft_cap > 0 else variant.scale
    products.scores.baddbmm_(products.query, products.keys, beta=0, alpha=scale)
    if variant.soft_cap > 0:
        products.scores.tanh_().mul_(variant.soft_cap)
    if variant.alibi_slopes is not None:
        slopes = variant.alibi_slopes.float().view(heads)
        products.grouped_scores.addcmul_(slopes, part.float_distances)
    products.maskable_scores.add_(part.bias)


def _let_sinks_share(products: Products, sinks: Tensor) -> None:
    """Scale by sum(e^score) / (sum(e^score) + e^sink), what a softmax with the sink gives."""
    shape = products.shape
    total = products.grouped_scores.logsumexp(dim=-1)
    share = (total - sinks.float().view(shape.kv_heads, shape.group, 1)).sigmoid()
    products.attended.mul_(share.view(*products.attended.shape[:2], 1))
