"""Tree attention in bfloat16, of a cache that is laid out for AMX: torch's fused attention.

Products in bfloat16 tiles are several times as fast as the float32 ones of `tree_parts.py`. Scores
and sums are float32; weights are rounded to bfloat16, as by vLLM's kernel for such caches.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from vllm_redrafter.compiled import compiled
from vllm_redrafter.engine.cpu.kv_cache import AMX_LANES, AMX_PAIR, key_value_views
from vllm_redrafter.engine.cpu.tree_gather import LayerShape, Workspace
from vllm_redrafter.engine.cpu.tree_parts import TreePart
from vllm_redrafter.engine.cpu.tree_plan import Array

HIDDEN = -1e30
"""A score whose weight is zero. It is finite for rows of which a whole tile is hidden."""

COMPILED_THREADS = 3
"""Up to as many, one thread of our loop is taken for faster than all of torch's copies, of which
one thread is less than half as fast."""


class TileProducts:
    """A part's index tensors and memory for layers of one shape.

    Attributes:
        part: whose products these are.
    """

    def __init__(self, part: TreePart, shape: LayerShape, memory: Workspace) -> None:
        self.part = part
        heads, group, size, *_ = shape
        requests, nodes = part.rows.shape
        blocks, rows = part.block_ids.shape[1], group * nodes
        slots = blocks * part.block_size
        self._node_shape = requests, nodes, heads, group, size
        batch = requests * heads * size
        query = memory.take("query", batch * rows, torch.bfloat16)
        self._query = query[: batch * rows].view(requests, heads, rows, size)
        unpacked = memory.take("gathered", 2 * batch * slots, torch.bfloat16)
        self._unpacked = unpacked[: 2 * batch * slots].view(2, requests, heads, slots, size)
        self._keys, self._values = self._unpacked[..., : part.num_slots, :]
        # Its layers share it, so it is no workspace's.
        mask = torch.zeros(requests, 1, group, nodes, part.num_slots)
        mask[..., part.hidden_from :] = part.bias.clamp(min=HIDDEN)
        self._mask = mask.view(requests, 1, rows, part.num_slots)

    def attend(self, query: Tensor, kv_cache: Tensor, scale: float, output: Tensor) -> None:
        """Attention of the part's nodes.

        Args:
            query: [tokens, query heads, head size] bfloat16, of the whole batch.
            kv_cache: [blocks, KV heads, block size, 2 * head size] bfloat16.
            scale: multiplies q.k.
            output: as `query`; only the nodes' rows are written.
        """
        requests, nodes, heads, group, size = self._node_shape
        by_node = self._query.view(requests, heads, group, nodes, size).permute(0, 3, 1, 2, 4)
        by_node.copy_(self.part.nodes_of(query).view(self._node_shape))
        self._unpack(kv_cache)
        attended = scaled_dot_product_attention(
            self._query, self._keys, self._values, attn_mask=self._mask, scale=scale
        )
        by_head = attended.view(requests, heads, group, nodes, size)
        self.part.put_nodes(output, by_head.permute(0, 3, 1, 2, 4))

    def _unpack(self, kv_cache: Tensor) -> None:
        if torch.get_num_threads() > COMPILED_THREADS:
            unpack_reference(kv_cache, self.part.block_ids, self._unpacked)
            return
        unpack(
            kv_cache.view(torch.int32).numpy(),
            self.part.block_ids,
            self.part.num_slots,
            self._unpacked.view(torch.int32).numpy(),
        )


def unpack_reference(kv_cache: Tensor, block_ids: Array, unpacked: Tensor) -> None:
    """K and V of blocks, by token.

    Args:
        kv_cache: [blocks, KV heads, block size, 2 * head size] bfloat16, laid out for AMX; see
            `kv_cache.key_value_views`.
        block_ids: [R, B] int64.
        unpacked: [2, R, KV heads, B * block size, head size] bfloat16, written.
    """
    requests, blocks = block_ids.shape
    gathered = kv_cache.index_select(0, torch.from_numpy(block_ids.ravel()))
    gathered = gathered.view(requests, blocks, *gathered.shape[1:]).transpose(1, 2)
    keys, values = key_value_views(gathered, amx=True)
    # [..., blocks, B/16, D/2, 16, 2] of K; [..., blocks, D/16, B/2, 16, 2] of V.
    by_token = unpacked[0].view(*keys.shape[:4], AMX_LANES, keys.shape[4], AMX_PAIR)
    by_token.transpose(-3, -2).copy_(keys)
    entries, pairs = values.shape[3:5]
    by_pair = unpacked[1].view(*values.shape[:3], pairs, AMX_PAIR, entries, AMX_LANES)
    by_pair.permute(0, 1, 2, 5, 3, 6, 4).copy_(values)


@compiled
def unpack(kv_cache: Array, block_ids: Array, num_slots: int, unpacked: Array) -> None:
    """As `unpack_reference`, of the first slots of each request; pairs in 32 bits.

    Args:
        kv_cache: [blocks, KV heads, block size, head size] int32.
        block_ids: [R, B] int64.
        num_slots: a multiple of 16; those behind are left as they are.
        unpacked: [2, R, KV heads, B * block size, head size / 2] int32, written.
    """
    requests, blocks = block_ids.shape
    _, kv_heads, block_size, _ = kv_cache.shape
    half_size = unpacked.shape[4]
    half = block_size * half_size
    for r in range(requests):
        for head in range(kv_heads):
            for block in range(blocks):
                first = block * block_size
                slots = min(block_size, num_slots - first)
                packed = kv_cache[block_ids[r, block], head].ravel()
                keys = unpacked[0, r, head, first : first + slots]
                values = unpacked[1, r, head, first : first + slots]
                _unpack_keys(packed[:half], keys)
                _unpack_values(packed[half:], block_size // 2, values)


@compiled
def _unpack_keys(packed: Array, keys: Array) -> None:
    """[B/16, D/2, 16] to [<= B, D/2]."""
    slots, half_size = keys.shape
    for slot in range(slots):
        row, lane = keys[slot], slot % 16
        start = (slot - lane) * half_size + lane
        for pair in range(half_size):
            row[pair] = packed[start + pair * 16]


@compiled
def _unpack_values(packed: Array, pairs: int, values: Array) -> None:
    """[D/16, B/2 (`pairs`), 16] to [<= B, D/2]: a pair of tokens becomes two rows."""
    slots, half_size = values.shape
    for pair in range(slots // 2):
        even, odd = values[2 * pair], values[2 * pair + 1]
        for entries in range(half_size // 8):
            start = (entries * pairs + pair) * 16
            for entry in range(8):
                one, next_one = packed[start + 2 * entry], packed[start + 2 * entry + 1]
                even[entries * 8 + entry] = (one & 0xFFFF) | (next_one << 16)
                odd[entries * 8 + entry] = ((one >> 16) & 0xFFFF) | (next_one & -0x10000)


def rehearse_tiles() -> None:
    """Let numba compile now, and not in the first step."""
    packed, unpacked = torch.zeros(1, 1, 16, 16).int(), torch.zeros(2, 1, 1, 16, 8).int()
    unpack(packed.numpy(), torch.zeros(1, 1).long().numpy(), 16, unpacked.numpy())
