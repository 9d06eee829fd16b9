"""The three problems of a case."""

from __future__ import annotations

import pytest
import torch
from tree_attention_parts.problem import Inputs, make_problem

from redrafter_testing.benchmarks.tree_attention_results import CPU, tiny


def keys_of(inputs: Inputs, request: int, count: int) -> torch.Tensor:
    """A request's first keys and values, read through its block table."""
    size = inputs.key_cache.shape[1]
    position = torch.arange(count)
    block = inputs.block_table[request][position // size].long()
    return torch.stack(
        [cache[block, position % size] for cache in (inputs.key_cache, inputs.value_cache)]
    )


@pytest.mark.parametrize("context", [1, 20, 31, 32])
@pytest.mark.parametrize("nodes", ["8", "3x2"])
def test_beams_apart_hold_the_context_and_their_path(nodes: str, context: int) -> None:
    case = tiny(nodes, context=context)
    problem = make_problem(case, CPU)
    starts = problem.beams.query_start_loc.tolist()
    tree_starts = problem.tree.query_start_loc.tolist()

    beam = 0
    for request, paths in enumerate(case.paths):
        whole = keys_of(problem.tree, request, context + case.shape.nodes)
        for path in paths:
            expected = whole[:, [*range(context), *(context + node for node in path)]]
            assert torch.equal(keys_of(problem.beams, beam, expected.shape[1]), expected)
            rows = [tree_starts[request] + node for node in path]
            assert problem.beam_rows[starts[beam] : starts[beam + 1]].tolist() == rows
            beam += 1
    assert beam == len(starts) - 1
    assert torch.equal(problem.beams.query, problem.tree.query[problem.beam_rows])
    chain = problem.beams.ancestors[0, :, 0].tolist()
    assert chain == [2 ** (depth + 1) - 1 for depth in range(problem.beams.max_nodes)]


def test_beams_apart_share_the_context_but_no_block_that_they_write() -> None:
    case = tiny("3x2", context=40)
    problem = make_problem(case, CPU)
    full = 40 // 16
    tables = problem.beams.block_table
    shared = problem.tree.block_table

    for beam, request in enumerate([0] * 3 + [1] * 3):
        assert torch.equal(tables[beam, :full], shared[request, :full])
    own = tables[:, full:].flatten().tolist()
    assert len({*own, *shared.flatten().tolist()}) == len(own) + shared.numel()


def test_one_node_is_the_root_with_the_same_context() -> None:
    problem = make_problem(tiny("8"), CPU)

    assert problem.plain.query_start_loc.tolist() == [0, 1, 2]
    assert torch.equal(problem.plain.query, problem.tree.query[[0, 8]])
    assert problem.plain.ancestors[:, 0, 0].tolist() == [1, 1]
    assert problem.plain.key_cache is problem.tree.key_cache
    assert torch.equal(problem.plain.block_table, problem.tree.block_table)
