"""What tree attention is measured on: random trees, their paged caches, their byte counts.

Nothing here imports Triton, and nothing needs a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_redrafter.beam_search import ExploredNodes, log_softmax_of_top
from vllm_redrafter.config import TOP_TOKENS, TreeKind
from vllm_redrafter.token_tree import TokenTree, pack_bits

MAX_NODES = 128
BEAM_LENGTH = 5
INT_BYTES = 4

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Heads:
    """A target's attention heads: query heads, KV heads, head dimension."""

    name: str
    query: int
    kv: int
    dim: int


HEADS = {
    heads.name: heads for heads in (Heads("llama-7b", 32, 32, 128), Heads("llama-3-8b", 32, 8, 128))
}


@dataclass(frozen=True)
class TreeShape:
    """How many nodes, and from what search.

    Attributes:
        label: `32` for the 32 best nodes (root counted) of a search that explored half as many
            again; `8x5` for all nodes on 8 finished beams of 5 tokens (the paper's tree).
        nodes: at most, root counted.
        width, length: of the beam search.
        kind: see `TokenTree.from_explored`.
    """

    label: str
    nodes: int
    width: int
    length: int
    kind: TreeKind

    @classmethod
    def parse(cls, text: str) -> TreeShape:
        """From a label.

        Raises:
            ValueError: it is none, or asks for more than a tree or a beam search can have.
        """
        found = re.fullmatch(r"(\d+)(?:x(\d+))?", text)
        if found is None:
            raise ValueError(f"{text!r}: expected a number of nodes or WxL beams, like 32 or 8x5")
        first, length = int(found[1]), int(found[2] or 0)
        if found[2] is None:
            if not 2 <= first <= MAX_NODES:
                raise ValueError(f"{text!r}: a tree has 2 to {MAX_NODES} nodes, root counted")
            width = max(2, -(-3 * (first - 1) // (2 * BEAM_LENGTH)))
            return cls(text, first, width, BEAM_LENGTH, "explored")
        if not 1 <= first <= TOP_TOKENS or not 1 <= length < MAX_NODES:
            raise ValueError(
                f"{text!r}: 1 to {TOP_TOKENS} beams of 1 to {MAX_NODES - 1} tokens are possible"
            )
        return cls(text, min(first * length + 1, MAX_NODES), first, length, "beams")


def random_search(
    requests: int, width: int, length: int, generator: torch.Generator
) -> ExploredNodes:
    """A beam search whose draft head is random: the trees have the form of real ones.

    Logits over the top 50 tokens are normal with deviation 2.5, which gives the best token 43 %
    of the probability on average: trees are deep along good beams and bushy near the root.
    """

    def best(beams: int) -> tuple[Tensor, Tensor]:
        logits = 2.5 * torch.randn(requests, beams, TOP_TOKENS, generator=generator)
        return log_softmax_of_top(logits, width)

    log_probs, tokens = (x.squeeze(1) for x in best(1))
    levels = [(tokens, torch.zeros_like(tokens), log_probs)]
    for _ in range(length - 1):
        scores, candidates = best(width)
        scores = (scores + log_probs.unsqueeze(-1)).flatten(1)
        log_probs, chosen = scores.topk(width, dim=1)
        levels.append((candidates.flatten(1).gather(1, chosen), chosen // width, log_probs))
    return ExploredNodes(*(torch.stack(parts, dim=1) for parts in zip(*levels, strict=True)))


@dataclass(frozen=True)
class Case:
    """One measurement of attention: `batch` requests with `context` keys each and one tree each."""

    heads: Heads
    batch: int
    context: int
    shape: TreeShape
    dtype: torch.dtype = torch.bfloat16
    block_size: int = 16
    seed: int = 0

    def __str__(self) -> str:
        return (
            f"{self.heads.name}, batch {self.batch}, context {self.context}, "
            f"nodes {self.shape.label}"
        )

    @cached_property
    def explored(self) -> ExploredNodes:
        generator = torch.Generator().manual_seed(self.seed)
        return random_search(self.batch, self.shape.width, self.shape.length, generator)

    @cached_property
    def tree(self) -> TokenTree:
        """On the CPU."""
        roots = torch.arange(self.batch)
        return TokenTree.from_explored(
            roots, self.explored, self.shape.nodes - 1, tree=self.shape.kind
        )

    @cached_property
    def paths(self) -> list[list[list[int]]]:
        """Per request, its tree's paths from the root to each leaf."""
        return leaf_paths(self.tree)

    @property
    def blocks_per_request(self) -> int:
        return -(-(self.context + self.shape.nodes) // self.block_size)

    @property
    def own_blocks_per_beam(self) -> int:
        """What a beam as a sequence of its own does not share: from its first row's block on."""
        longest = max(len(path) for paths in self.paths for path in paths)
        return -(-(self.context % self.block_size + longest) // self.block_size)

    @property
    def num_blocks(self) -> int:
        beams = sum(len(paths) for paths in self.paths)
        return self.batch * self.blocks_per_request + beams * self.own_blocks_per_beam

    @property
    def cache_bytes(self) -> int:
        """Of the K and V caches, with the blocks that beams apart have of their own."""
        return self.num_blocks * self.block_size * self._key_bytes

    @property
    def paged_bytes(self) -> int:
        """Of the K and V caches without those."""
        return self.batch * self.blocks_per_request * self.block_size * self._key_bytes

    @property
    def contiguous_bytes(self) -> int:
        """Of K and V without pages, as flex_attention reads them."""
        return self.batch * (self.context + self.shape.nodes) * self._key_bytes

    @property
    def floor_bytes(self) -> int:
        """What any kernel has to move at least.

        K and V of context and tree once per KV head, the queries and the output, the block table
        and the nodes' bit sets. (Lengths, 8 bytes a request, are left out.)
        """
        nodes = self.tree.num_nodes.tolist()
        rows = sum(nodes)
        keys = sum(self.context + n for n in nodes)
        query = rows * self.heads.query * self.heads.dim * self.dtype.itemsize
        blocks = sum(-(-(self.context + n) // self.block_size) for n in nodes)
        words = rows * self.tree.ancestors.shape[2]
        return keys * self._key_bytes + 2 * query + (blocks + words) * INT_BYTES

    @property
    def _key_bytes(self) -> int:
        return 2 * self.heads.kv * self.heads.dim * self.dtype.itemsize


def leaf_paths(tree: TokenTree) -> list[list[list[int]]]:
    """Per request, the nodes from the root to each leaf, leaves in node order."""
    found = []
    for parents, count in zip(tree.parents.tolist(), tree.num_nodes.tolist(), strict=True):
        paths = [[0]]
        for node in range(1, count):
            paths.append([*paths[parents[node]], node])
        inner = set(parents[1:count])
        found.append([path for path in paths if path[-1] not in inner])
    return found


class Inputs(NamedTuple):
    """`tree_attention`'s arguments, in its order."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    context_lens: Tensor
    query_start_loc: Tensor
    ancestors: Tensor
    max_nodes: int
    max_context_len: int


@dataclass(frozen=True)
class Problem:
    """A case's tensors, three ways; all read the same context blocks.

    Attributes:
        tree: every request with its tree.
        plain: every request with its root alone: plain decoding.
        beams: no dedup: every leaf's path is a request of its own, with its own copy of the block
            table and its own rows in the cache, so the context is read once per beam.
        beam_rows: [rows of beams] the row of `tree` that each row of `beams` repeats.
    """

    tree: Inputs
    plain: Inputs
    beams: Inputs
    beam_rows: Tensor


def make_problem(case: Case, device: torch.device) -> Problem:
    """Normal random queries, keys and values; blocks scattered over the cache."""
    generator = torch.Generator(device).manual_seed(case.seed)
    heads, tree = case.heads, case.tree

    def normal(*size: int) -> Tensor:
        made = torch.empty(size, dtype=case.dtype, device=device)
        return made.normal_(generator=generator)

    cache_size = (case.num_blocks, case.block_size, heads.kv, heads.dim)
    keys, values = normal(*cache_size), normal(*cache_size)
    order = torch.randperm(case.num_blocks, generator=torch.Generator().manual_seed(case.seed))
    shared = case.batch * case.blocks_per_request
    table = order[:shared].view(case.batch, -1)
    starts = _starts(tree.num_nodes.tolist())
    query = normal(starts[-1], heads.query, heads.dim)

    beams = _lay_out_beams(case, table, order[shared:], starts)
    for cache in (keys, values):
        slots = cache.view(-1, heads.kv, heads.dim)
        slots[beams.to_slots.to(device)] = slots[beams.from_slots.to(device)]
    depth = max(beams.lengths)
    chain = pack_bits(torch.ones(depth, depth).tril().bool()).expand(len(beams.lengths), -1, -1)
    roots = torch.tensor(starts[:-1])

    def inputs(
        rows: Tensor, table: Tensor, starts: Sequence[int], ancestors: Tensor, max_nodes: int
    ) -> Inputs:
        def ints(values: Tensor | Sequence[int]) -> Tensor:
            return torch.as_tensor(values, dtype=torch.int32).contiguous().to(device)

        return Inputs(
            query=query[rows.to(device)],
            key_cache=keys,
            value_cache=values,
            block_table=ints(table),
            context_lens=ints([case.context] * table.shape[0]),
            query_start_loc=ints(starts),
            ancestors=ints(ancestors),
            max_nodes=max_nodes,
            max_context_len=case.context,
        )

    return Problem(
        tree=inputs(torch.arange(starts[-1]), table, starts, tree.ancestors, case.shape.nodes),
        plain=inputs(roots, table, range(case.batch + 1), tree.ancestors, 1),
        beams=inputs(beams.rows, beams.table, _starts(beams.lengths), chain, depth),
        beam_rows=beams.rows.to(device),
    )


def _starts(lengths: Sequence[int]) -> list[int]:
    return [0, *torch.tensor(lengths).cumsum(0).tolist()]


@dataclass(frozen=True)
class _Beams:
    table: Tensor
    lengths: list[int]
    rows: Tensor
    from_slots: Tensor
    to_slots: Tensor


def _lay_out_beams(case: Case, table: Tensor, spare: Tensor, starts: Sequence[int]) -> _Beams:
    """Block tables of the beams, and which rows of the cache are copied into their own blocks.

    A beam shares the context's full blocks. Its own ones begin with the keys of the context's
    last, partly filled block, followed by its path's rows in order.
    """
    size, n, own = case.block_size, case.context, case.own_blocks_per_beam
    full = n // size
    lengths: list[int] = []
    rows: list[int] = []
    tables: list[Tensor] = []
    sources: list[Tensor] = []
    targets: list[Tensor] = []
    for request, paths in enumerate(case.paths):
        for path in paths:
            mine = spare[len(tables) * own : (len(tables) + 1) * own]
            tables.append(torch.cat([table[request, :full], mine]))
            lengths.append(len(path))
            rows += [starts[request] + node for node in path]
            read = torch.tensor([*range(full * size, n), *(n + node for node in path)])
            written = torch.arange(full * size, n + len(path))
            for slots, blocks, positions in (
                (sources, table[request], read),
                (targets, tables[-1], written),
            ):
                slots.append(blocks[positions // size] * size + positions % size)
    return _Beams(
        torch.stack(tables), lengths, torch.tensor(rows), torch.cat(sources), torch.cat(targets)
    )


def contiguous(inputs: Inputs, tree: TokenTree) -> tuple[Tensor, Tensor, Tensor]:
    """Query, keys, values as flex_attention wants them: [R, heads, nodes or keys, head_dim].

    Trees of fewer nodes than the largest are padded; their last queries' results are not used.
    """
    requests, nodes = inputs.block_table.shape[0], inputs.max_nodes
    query = inputs.query.new_zeros(requests, nodes, *inputs.query.shape[1:])
    query[tree.is_node[:, :nodes].to(query.device)] = inputs.query

    def gathered(cache: Tensor) -> Tensor:
        keys = cache[inputs.block_table].flatten(1, 2)[:, : inputs.max_context_len + nodes]
        return keys.transpose(1, 2).contiguous()

    return (
        query.transpose(1, 2).contiguous(),
        gathered(inputs.key_cache),
        gathered(inputs.value_cache),
    )


def tree_mask(context: int, ancestor_mask: Tensor) -> MaskMod:
    """flex_attention's mask: a node sees the context, its ancestors and itself.

    Args:
        context: keys before the tree.
        ancestor_mask: [R, nodes, nodes] bool, see `TokenTree.ancestor_mask`.
    """
    last = ancestor_mask.shape[2] - 1

    def visible(request: Tensor, _head: Tensor, node: Tensor, key: Tensor) -> Tensor:
        key_node = (key - context).clamp(0, last)
        return (key < context) | ancestor_mask[request, node, key_node]

    return visible
