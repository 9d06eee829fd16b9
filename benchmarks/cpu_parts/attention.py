"""What tree attention costs in all layers of a step, beside vLLM's kernel and beside its bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from rich.table import Table
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from cpu_parts import timing
from vllm_redrafter.engine.cpu.cache_layout import cache_layout
from vllm_redrafter.engine.cpu.path_copies import CopiedUnits
from vllm_redrafter.engine.cpu.tree_sequences import tree_parts
from vllm_redrafter.tree.token_tree import TokenTree

BLOCK_SIZE = 128  # vLLM's default on a CPU


@dataclass(frozen=True)
class Layers:
    """A target's attention; the default is SmolLM2-135M's.

    Attributes:
        count: how many layers, each with a cache of its own.
        heads: query heads.
        kv_heads: K and V heads.
        head_size: of all heads.
        dtype: of queries and cache.
    """

    count: int = 30
    heads: int = 9
    kv_heads: int = 3
    head_size: int = 64
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class AttentionCost:
    """All layers of a step; milliseconds, medians of the repeats.

    Attributes:
        dtype: of queries and cache.
        requests: trees in the batch.
        context: tokens before each tree.
        nodes: of each tree, and tokens of each chain.
        threads: of torch and of vLLM's kernel.
        repeats: how often each was timed.
        tree, chain, bytes: see step_parts.py.
    """

    dtype: str
    requests: int
    context: int
    nodes: int
    threads: int
    repeats: int
    tree: float
    chain: float
    bytes: float

    def as_json(self) -> dict[str, float | int | str]:
        return {**asdict(self), "tree_over_chain": self.tree / self.chain}


class Attention:
    """Random queries and caches of a batch whose requests lie in blocks in no order."""

    def __init__(self, layers: Layers, requests: int, context: int, nodes: int) -> None:
        torch.manual_seed(0)
        self.layers, self.requests, self.context, self.nodes = layers, requests, context, nodes
        per_request = -(-(context + nodes) // BLOCK_SIZE)
        # vLLM keeps block 0 for itself.
        self.block_table = 1 + torch.randperm(requests * per_request).int().view(requests, -1)
        blocks = 1 + requests * per_request
        shape = (blocks, layers.kv_heads, BLOCK_SIZE, 2 * layers.head_size)
        self.caches = [torch.randn(shape).to(layers.dtype) for _ in range(layers.count)]
        query = torch.randn(requests * nodes, layers.heads, layers.head_size)
        self.query = query.to(layers.dtype)
        self.output = torch.empty_like(self.query)
        # The numbers are random: they are K and V in any layout.
        self.isa = _get_attn_isa(layers.dtype, BLOCK_SIZE, layers.head_size)
        layout = cache_layout(self.isa, layers.head_size, BLOCK_SIZE, layers.dtype)
        self.copied = CopiedUnits(layout)

    def trees(self) -> TokenTree:
        """Binary trees, in node order."""
        node = torch.arange(self.nodes, dtype=torch.int32)
        parents = ((node - 1).clamp(min=0) // 2).expand(self.requests, -1)
        depths = (node + 1).float().log2().int().expand(self.requests, -1)
        num_nodes = torch.full((self.requests,), self.nodes, dtype=torch.int32)
        return TokenTree(torch.zeros_like(parents), parents, depths, num_nodes)

    def tree(self) -> Tensor:
        """A step of tree attention, its plan included."""
        layers = self.layers
        parts = [
            (self._plan(part.query_start_loc, part.seq_lens), part)
            for part in tree_parts(
                self.trees(),
                torch.arange(self.requests) * self.nodes,
                torch.full((self.requests,), self.context),
                self.block_table,
                BLOCK_SIZE,
                window=-1,
                bytes_of_token=2 * layers.kv_heads * layers.head_size * layers.dtype.itemsize,
            )
        ]
        for cache in self.caches:
            for plan, part in parts:
                copied = self.copied.write(part.copies, cache)
                self._attend(copied, part.query_start_loc, part.seq_lens, part.block_table, plan)
        return self.output

    def chain(self) -> Tensor:
        """The same rows as chains, where their K and V lie, the plan included."""
        starts = torch.arange(self.requests + 1, dtype=torch.int32) * self.nodes
        ends = torch.full((self.requests,), self.context + self.nodes, dtype=torch.int32)
        plan = self._plan(starts, ends)
        for cache in self.caches:
            self._attend(cache, starts, ends, self.block_table, plan)
        return self.output

    def _plan(self, starts: Tensor, ends: Tensor) -> Tensor:
        layers = self.layers
        plan: Tensor = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(ends),
            num_heads=layers.heads,
            num_kv_heads=layers.kv_heads,
            head_dim=layers.head_size,
            seq_lens=ends,
            dtype=layers.dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=self.isa,
            enable_kv_split=True,
        )
        return plan

    def _attend(
        self, cache: Tensor, starts: Tensor, ends: Tensor, block_table: Tensor, plan: Tensor
    ) -> None:
        halves = cache.view(*cache.shape[:2], 2 * cache.shape[2], -1).chunk(2, dim=2)
        ops.cpu_attention_with_kv_cache(
            query=self.query,
            key_cache=halves[0],
            value_cache=halves[1],
            output=self.output,
            query_start_loc=starts,
            seq_lens=ends,
            scale=self.layers.head_size**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=block_table,
            softcap=0.0,
            scheduler_metadata=plan,
            s_aux=None,
        )

    def num_bytes(self) -> int:
        """K and V of all contexts and nodes, in all layers."""
        layers = self.layers
        per_token = 2 * layers.kv_heads * layers.head_size * layers.dtype.itemsize
        return layers.count * self.requests * (self.context + self.nodes) * per_token


@torch.inference_mode()
def measure(layers: Layers, requests: int, context: int, nodes: int, repeats: int) -> AttentionCost:
    """Time one size."""
    torch.cpu._init_amx()  # which Linux lets a process use that asks; in an engine, oneDNN does
    attention = Attention(layers, requests, context, nodes)
    parts: dict[str, Callable[[], Tensor]] = {"tree": attention.tree, "chain": attention.chain}
    bandwidth = timing.read_bandwidth()
    found = timing.medians(parts, repeats)
    return AttentionCost(
        dtype=str(layers.dtype).removeprefix("torch."),
        requests=requests,
        context=context,
        nodes=nodes,
        threads=torch.get_num_threads(),
        repeats=repeats,
        **found,
        bytes=1000 * attention.num_bytes() / bandwidth,
    )


def table(costs: Sequence[AttentionCost]) -> Table:
    """The figures, for a person."""
    made = Table(title="Tree attention of all layers, milliseconds")
    for column in ("dtype", "requests", "context", "tree", "chain", "bytes", "tree / chain"):
        made.add_column(column, justify="right")
    for cost in costs:
        made.add_row(
            cost.dtype,
            str(cost.requests),
            str(cost.context),
            *(f"{x:.2f}" for x in (cost.tree, cost.chain, cost.bytes)),
            f"{cost.tree / cost.chain:.2f}",
        )
    return made
