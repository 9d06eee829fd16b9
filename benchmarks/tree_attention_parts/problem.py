"""A case's tensors: with trees, with roots alone, with beams apart.

Nothing here imports Triton, and nothing needs a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tree_attention_parts.cases import BLOCK_SIZE, SEED, Case
from vllm_redrafter.tree.token_tree import pack_bits


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
    generator = torch.Generator(device).manual_seed(SEED)
    heads, tree = case.heads, case.tree

    def normal(*size: int) -> Tensor:
        made = torch.empty(size, dtype=case.dtype, device=device)
        return made.normal_(generator=generator)

    cache_size = (case.num_blocks, BLOCK_SIZE, heads.kv, heads.dim)
    keys, values = normal(*cache_size), normal(*cache_size)
    order = torch.randperm(case.num_blocks, generator=torch.Generator().manual_seed(SEED))
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
    size, n, own = BLOCK_SIZE, case.context, case.own_blocks_per_beam
    full = n // size
    lengths: list[int] = []
    rows: list[int] = []
    tables: list[Tensor] = []
    sources: list[Tensor] = []
    destinations: list[Tensor] = []
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
                (destinations, tables[-1], written),
            ):
                slots.append(blocks[positions // size] * size + positions % size)
    return _Beams(
        torch.stack(tables),
        lengths,
        torch.tensor(rows),
        torch.cat(sources),
        torch.cat(destinations),
    )
