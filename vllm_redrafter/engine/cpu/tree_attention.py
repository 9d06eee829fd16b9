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

from vllm_redrafter.engine.cpu.tree_gather import LayerShape, Workspace
from vllm_redrafter.engine.cpu.tree_parts import Products, TreePart, Trees, split_requests
from vllm_redrafter.engine.cpu.tree_plan import SLOT_MULTIPLE, block_ranges
from vllm_redrafter.engine.cpu.tree_tiles import TileProducts, rehearse_tiles
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
        amx: the cache is laid out for AMX, see `kv_cache.key_value_views`.
    """

    tree: TokenTree
    rows: Tensor
    context_lens: Tensor
    block_table: Tensor
    block_size: int
    amx: bool = False
    _products: dict[tuple[LayerShape, int], list[Products]] = field(default_factory=dict)
    _tiles: dict[tuple[LayerShape, int], list[TileProducts]] = field(default_factory=dict)

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

    def tiles(
        self, shape: LayerShape, sliding_window: int, workspace: Workspace
    ) -> list[TileProducts]:
        """As `products`, in bfloat16 tiles."""
        key = shape, sliding_window
        if key not in self._tiles:
            self._tiles[key] = [
                TileProducts(part, shape, workspace) for part in self.parts(shape, sliding_window)
            ]
        return self._tiles[key]

    def parts(self, shape: LayerShape, sliding_window: int) -> list[TreePart]:
        """The trees, split so that each part's K and V are gathered at once."""
        trees, size, window = self._trees, self.block_size, sliding_window
        first, count = block_ranges(trees.num_nodes, trees.context_lens, size, window)
        requests = split_requests(count, 4 * shape.kv_heads * 2 * shape.head_size * size)
        if len(requests) == 1:
            return [TreePart.planned(trees, first, count, size, window)]
        return [
            TreePart.planned(trees.select(chosen), first[chosen], count[chosen], size, window)
            for chosen in requests
        ]

    @property
    def _trees(self) -> Trees:
        """Nothing is copied where the types are those of a step."""
        return Trees(
            num_nodes=np.ascontiguousarray(self.tree.num_nodes.numpy(), dtype=np.int32),
            parents=np.ascontiguousarray(self.tree.parents.numpy(), dtype=np.int32),
            depths=np.ascontiguousarray(self.tree.depths.numpy(), dtype=np.int32),
            rows=np.ascontiguousarray(self.rows.numpy(), dtype=np.int64),
            context_lens=np.ascontiguousarray(self.context_lens.numpy(), dtype=np.int64),
            block_table=np.ascontiguousarray(self.block_table.numpy(), dtype=np.int32),
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

    @property
    def is_fusable(self) -> bool:
        """Torch's fused attention scales and masks the scores, and bends them no further."""
        return self.soft_cap <= 0 and self.alibi_slopes is None and self.sinks is None


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
        kv_cache: [blocks, KV heads, block size, 2 * head size] in the queries' layout, contiguous;
            the rows of the trees are in it already.
        queries: the step's trees.
        variant: the layer's scores.
        output: as `query`; only the nodes' rows are written.
        workspace: memory for what is gathered and computed on the way.
    """
    kv_heads, head_size = kv_cache.shape[1], query.shape[2]
    group, amx = query.shape[1] // kv_heads, queries.amx
    shape = LayerShape(kv_heads, group, head_size, kv_cache.dtype, amx)
    if amx and variant.is_fusable:
        for tiles in queries.tiles(shape, variant.sliding_window, workspace):
            tiles.attend(query, kv_cache, variant.scale, output)
        return
    for products in queries.products(shape, variant.sliding_window, workspace):
        matrices = products.matrices
        products.read(query)
        _score(products, kv_cache, variant)
        torch.softmax(matrices.scores, dim=-1, out=matrices.weights)
        products.attend(kv_cache)
        if variant.sinks is not None:
            _let_sinks_share(products, variant.sinks)
        products.write(output)


def _score(products: Products, kv_cache: Tensor, variant: AttentionVariant) -> None:
    shape, matrices = products.shape, products.matrices
    scale = variant.scale / variant.soft_cap if variant.soft_cap > 0 else variant.scale
    products.score(kv_cache, scale)
    if variant.soft_cap > 0:
        matrices.scores.tanh_().mul_(variant.soft_cap)
    if variant.alibi_slopes is not None:
        slopes = variant.alibi_slopes.float().view(shape.kv_heads, shape.group, 1, 1)
        matrices.grouped_scores.addcmul_(slopes, products.part.float_distances)
    products.maskable_scores.add_(products.part.bias)


def _let_sinks_share(products: Products, sinks: Tensor) -> None:
    """Scale by sum(e^score) / (sum(e^score) + e^sink), what a softmax with the sink gives."""
    shape, attended = products.shape, products.matrices.attended
    total = products.matrices.grouped_scores.logsumexp(dim=-1)
    share = (total - sinks.float().view(shape.kv_heads, shape.group, 1)).sigmoid()
    attended.mul_(share.view(*attended.shape[:2], 1))


def rehearse() -> None:
    """Let numba compile the planning now, and not in the first step."""
    root = torch.zeros(1, 1, dtype=torch.int32)
    tree = TokenTree(root, root, root, num_nodes=torch.ones(1, dtype=torch.int32))
    queries = TreeQueries(
        tree=tree,
        rows=torch.zeros(1, 1, dtype=torch.int64),
        context_lens=torch.zeros(1, dtype=torch.int64),
        block_table=root,
        block_size=SLOT_MULTIPLE,
    )
    shape = LayerShape(kv_heads=1, group=1, head_size=1, dtype=torch.float32)
    queries.products(shape, sliding_window=-1, workspace=Workspace())
    rehearse_tiles()
