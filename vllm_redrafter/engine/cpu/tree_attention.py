"""What a verified tree may attend to, as seen from a paged KV cache. Torch only.

A tree's K+1 rows lie in the linear slots n .. n+K of their request, in node order, where n is the
context length. Node i sees every slot of the context, and among the tree's slots those of its
ancestors and its own. Its position is n + depth(i), which is what RoPE, sliding windows and ALiBi
must see instead of the slot.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

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
    _bias: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        nodes = self.tree.num_nodes
        used = -(-(self.context_lens + nodes) // self.block_size)
        self.num_blocks = int(used.max())
        index = torch.arange(self.num_blocks, device=used.device)
        table = self.block_table[:, : self.num_blocks].long()
        # Beyond a request's own blocks the table holds stale numbers: read block 0 there.
        self.block_ids = table.masked_fill(index >= used.unsqueeze(1), 0)
        self._nodes = self.tree.is_node.flatten().nonzero().squeeze(1)
        self._node_rows = self.rows.flatten()[self._nodes]
        # The common case of decoding: trees of one size, and nothing else in the batch.
        self._in_order = torch.equal(self._node_rows, torch.arange(self.rows.numel()))

    def gather(self, query: Tensor) -> Tensor:
        """[tokens, ...] of the whole batch -> [R, T, ...] of the trees' nodes."""
        if self._in_order:
            nodes = query[: self.rows.numel()]
            return nodes.view(*self.rows.shape, *query.shape[1:])
        return query[self.rows]

    def scatter(self, attended: Tensor, output: Tensor) -> None:
        """Write [R, T, ...] into the nodes' rows of `output`, [tokens, ...]."""
        attended = attended.flatten(0, 1).to(output.dtype)
        if self._in_order:
            output[: attended.shape[0]] = attended
        else:
            output[self._node_rows] = attended[self._nodes]

    def bias(self, sliding_window: int) -> Tensor:
        """`visible` as what is added to scores: [R, T, S] float32, 0 or -inf."""
        if sliding_window not in self._bias:
            hidden = ~self.visible(sliding_window)
            self._bias[sliding_window] = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        return self._bias[sliding_window]

    def key_positions(self) -> Tensor:
        """[R, S] int64: the position of each slot's key; S = num_blocks * block_size."""
        slot = torch.arange(self.num_blocks * self.block_size, device=self.rows.device)
        in_tree = self._tree_index(slot)
        depth = self.tree.depths.long().gather(1, in_tree)
        context = self.context_lens.unsqueeze(1)
        return torch.where(slot < context, slot, context + depth)

    def query_positions(self) -> Tensor:
        """[R, T] int64: n + depth."""
        return self.context_lens.unsqueeze(1) + self.tree.depths

    def visible(self, sliding_window: int = -1) -> Tensor:
        """[R, T, S] bool: which slots each node attends to.

        Args:
            sliding_window: keys at least this many positions back are hidden; -1 for none.
        """
        slot = torch.arange(self.num_blocks * self.block_size, device=self.rows.device)
        nodes = self.tree.tokens.shape[1]
        in_context = slot < self.context_lens.unsqueeze(1)
        index = self._tree_index(slot).unsqueeze(1).expand(-1, nodes, -1)
        end = (self.context_lens + self.tree.num_nodes).unsqueeze(1)
        in_tree = (~in_context & (slot < end)).unsqueeze(1)
        seen = in_context.unsqueeze(1) | (in_tree & self.tree.ancestor_mask.gather(2, index))
        if sliding_window > 0:
            distance = self.query_positions().unsqueeze(2) - self.key_positions().unsqueeze(1)
            seen &= distance < sliding_window
        return seen

    def _tree_index(self, slot: Tensor) -> Tensor:
        """[R, S]: the node whose row lies in each slot, where it is a tree's slot."""
        last = self.tree.tokens.shape[1] - 1
        return (slot - self.context_lens.unsqueeze(1)).clamp(0, last)


@dataclass(frozen=True)
class AttentionVariant:
    """How a model bends its attention scores.

    Attributes:
        scale: multiplies q.k.
        sliding_window: see `TreeQueries.visible`.
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
    query: Tensor, keys: Tensor, values: Tensor, queries: TreeQueries, variant: AttentionVariant
) -> Tensor:
    """Attention of all trees' nodes, for the whole batch at once.

    Each block's K and V multiply all nodes and all query heads of a group in one product, and
    one softmax runs over context and tree together: tree rows are in the cache already.

    Args:
        query: [R, T, query heads, head size].
        keys: [R, blocks, KV heads, head size, block size], K of the blocks in use, transposed.
        values: [R, blocks, KV heads, block size, head size].
        queries: the step's trees.
        variant: the layer's scores.

    Returns:
        [R, T, query heads, head size], in the keys' dtype; unused node slots hold no meaning.
    """
    requests, nodes, heads, size = query.shape
    blocks, kv_heads, block_size = keys.shape[1], keys.shape[2], keys.shape[4]
    group = heads // kv_heads
    per_block = (requests, blocks, kv_heads, group * nodes)
    # Rows of one product: the group's query heads times the nodes.
    q = query.to(keys.dtype).view(requests, nodes, kv_heads, group, size)
    q = (q.permute(0, 2, 3, 1, 4) * variant.scale).reshape(requests, 1, kv_heads, -1, size)
    q = q.expand(*per_block, size).reshape(-1, group * nodes, size)
    scores = torch.bmm(q, keys.reshape(-1, size, block_size)).view(*per_block, block_size)
    scores = scores.permute(0, 2, 3, 1, 4).reshape(
        requests, kv_heads, group, nodes, blocks * block_size
    )
    scores = _bend_scores(scores, queries, variant)
    scores += queries.bias(variant.sliding_window)[:, None, None]
    weights = _softmax(scores, variant.sinks)
    weights = weights.view(requests, kv_heads, group * nodes, blocks, block_size)
    weights = weights.permute(0, 3, 1, 2, 4).reshape(-1, group * nodes, block_size)
    output = torch.bmm(weights, values.reshape(-1, block_size, size)).view(*per_block, size)
    return output.sum(dim=1).view(requests, heads, nodes, size).transpose(1, 2)


def _bend_scores(scores: Tensor, queries: TreeQueries, variant: AttentionVariant) -> Tensor:
    if variant.soft_cap > 0:
        scores = variant.soft_cap * torch.tanh(scores / variant.soft_cap)
    if variant.alibi_slopes is not None:
        distance = queries.key_positions().unsqueeze(1) - queries.query_positions().unsqueeze(2)
        slopes = variant.alibi_slopes.view(scores.shape[1], scores.shape[2], 1, 1)
        scores = scores + slopes * distance[:, None, None]
    return scores


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is None:
        return scores.softmax(dim=-1)
    sink = sinks.to(scores.dtype).view(scores.shape[1], scores.shape[2], 1, 1)
    sink = sink.expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
