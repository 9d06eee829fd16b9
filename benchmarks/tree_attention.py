# SPDX-License-Identifier: Apache-2.0
"""Tree attention's time against memory's: how near the kernel is to reading K and V once.

    python benchmarks/tree_attention.py --output results.json
    python benchmarks/tree_attention.py --batches 8 --contexts 4096 --nodes 1 32 --repeats 20

A case is R requests with a context of n keys and a tree of so many nodes each, bf16, K and V in
scattered blocks of 16. One node is plain decoding by the same kernel.

Launches are replayed from a CUDA graph with the L2 cache flushed before, so that K and V come from
memory; times are medians. The floor: K and V of context and tree once per KV head, queries and
output, block table, bit sets, over the bandwidth of a large copy in the same run, bytes read and
written. (Not counted: lengths, and the partial results of split keys, which are the kernel's own.)
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from shared_parts import launches
from shared_parts.arguments import integer, positive, results_file, script_parser
from shared_parts.gpu import Gpu
from shared_parts.launches import Timed

from vllm_redrafter.config import MAX_NODES
from vllm_redrafter.tree.token_tree import TokenTree
from vllm_redrafter.triton_kernels.tree_attention import tree_attention

BLOCK_SIZE = 16
MEMORY = 0.8
"""The part of free GPU memory that a case may take."""


HEADS = {"llama-7b": (32, 32), "llama-3-8b": (32, 8)}
"""Query heads and KV heads by the target's name, all of HEAD_DIM numbers."""
HEAD_DIM = 128


@dataclass(frozen=True)
class Case:
    """`batch` requests with `context` keys and a tree of `nodes` each."""

    target: str
    batch: int
    context: int
    nodes: int
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return f"{self.target}, {self.batch} x {self.context}, nodes {self.nodes}"

    @property
    def blocks(self) -> int:
        """Of each request."""
        return -(-(self.context + self.nodes) // BLOCK_SIZE)

    @property
    def key_bytes(self) -> int:
        """K and V of a token."""
        return 2 * HEADS[self.target][1] * HEAD_DIM * self.dtype.itemsize

    @property
    def cache_bytes(self) -> int:
        return self.batch * self.blocks * BLOCK_SIZE * self.key_bytes

    @property
    def floor_bytes(self) -> int:
        """See this script."""
        query = self.nodes * HEADS[self.target][0] * HEAD_DIM * self.dtype.itemsize
        words = self.blocks + self.nodes * -(-self.nodes // 32)
        return self.batch * ((self.context + self.nodes) * self.key_bytes + 2 * query + 4 * words)

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """`tree_attention`'s: random numbers, binary trees, blocks in no order."""
        generator = torch.Generator(device).manual_seed(0)

        def normal(*size: int) -> torch.Tensor:
            made = torch.empty(size, dtype=self.dtype, device=device)
            return made.normal_(generator=generator)

        blocks = self.batch * self.blocks
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).int()
        parents = ((torch.arange(self.nodes) - 1).clamp(min=0) // 2).expand(self.batch, -1)
        nodes = torch.full((self.batch,), self.nodes)
        ancestors = TokenTree(parents, parents, parents, nodes).ancestors
        heads, kv_heads = HEADS[self.target]
        cache = (blocks, BLOCK_SIZE, kv_heads, HEAD_DIM)
        starts = torch.arange(self.batch + 1, dtype=torch.int32) * self.nodes
        return {
            "query": normal(self.batch * self.nodes, heads, HEAD_DIM),
            "key_cache": normal(*cache),
            "value_cache": normal(*cache),
            "block_table": order.view(self.batch, -1).to(device),
            "context_lens": torch.full((self.batch,), self.context).int().to(device),
            "query_start_loc": starts.to(device),
            "ancestors": ancestors.to(device),
            "max_nodes": self.nodes,
            "max_context_len": self.context,
        }


def measured(gpu: Gpu, options: argparse.Namespace) -> Iterator[Timed]:
    """Each case that fits into memory."""
    sizes = product(HEADS, options.batches, options.contexts, options.nodes)
    for case in (Case(*size) for size in sizes):
        if case.cache_bytes > MEMORY * gpu.free_bytes:
            print(f"{case}: skipped, its KV cache takes {case.cache_bytes / 1e9:.1f} GB")
            continue
        given = case.arguments(gpu.device)
        taken = gpu.in_graph(lambda given=given: tree_attention(**given))
        yield Timed("tree attention", str(case), case.floor_bytes, taken)


def main(argv: Sequence[str] | None = None) -> None:
    command = script_parser(__doc__)
    add = command.add_argument
    add("--batches", nargs="+", type=positive, default=[1, 8, 64], help="(default 1 8 64)")
    contexts = [512, 4096, 32768]
    add("--contexts", nargs="+", type=positive, default=contexts, help="(default 512 4096 32768)")
    nodes = "of a tree, root counted (default 1 4 16 32 64)"
    add("--nodes", nargs="+", type=integer(1, MAX_NODES), default=[1, 4, 16, 32, 64], help=nodes)
    add("--repeats", type=positive, default=50, help="launches timed (default 50)")
    add("--output", type=results_file, help="write everything to this JSON file, after each case")
    launches.run(command, command.parse_args(argv), measured)


if __name__ == "__main__":
    main()
