"""Random trees, and the bytes that a case takes and moves."""

from __future__ import annotations

import pytest
from tree_attention_parts.cases import HEADS, Case, TreeShape, leaf_paths
from tree_attention_parts.problem import make_problem

from redrafter_testing.benchmarks.tree_attention_results import CPU, tiny


@pytest.mark.parametrize("nodes", ["2", "4", "32", "64", "128"])
def test_a_number_of_nodes_is_reached_by_every_tree(nodes: str) -> None:
    tree = tiny(nodes, batch=8).tree

    assert tree.num_nodes.tolist() == [int(nodes)] * 8
    assert tree.parents.shape[1] == int(nodes)


def test_trees_branch_and_differ_between_requests() -> None:
    case = tiny("32", batch=8)

    assert case.tree.depths.amax(dim=1).min() >= 3
    assert min(len(paths) for paths in case.paths) >= 5
    assert len({tuple(parents) for parents in case.tree.parents.tolist()}) > 1


def test_beams_are_as_many_and_as_long_as_asked_for() -> None:
    case = tiny("8x5", batch=16)

    assert [len(path) for paths in case.paths for path in paths] == [6] * 8 * 16
    # Dedup saves something, or there would be nothing to measure.
    assert case.tree.num_nodes.max() < 8 * 5 + 1


def test_leaf_paths_climb_to_the_root() -> None:
    case = tiny("16")

    for parents, paths in zip(case.tree.parents.tolist(), leaf_paths(case.tree), strict=True):
        assert {node for path in paths for node in path} == set(range(16))
        for path in paths:
            assert path[0] == 0
            assert [parents[node] for node in path[1:]] == path[:-1]
            assert path[-1] not in parents[1:]


def test_the_floor_counts_every_byte_once() -> None:
    keys = 2 * (20 + 4) * 2 * 2 * 64 * 2  # requests, positions, K and V, KV heads, dim, fp16
    query_and_output = 2 * (2 * 4) * 4 * 64 * 2
    block_table = 2 * 2 * 4  # two blocks of 16 for 24 positions
    bit_sets = 2 * 4 * 4  # a word per node

    assert tiny("4").floor_bytes == keys + query_and_output + block_table + bit_sets


def test_the_floor_of_llama_3() -> None:
    case = Case(HEADS["llama-3-8b"], 8, 4096, TreeShape.parse("64"))
    nodes = 8 * 64

    assert case.floor_bytes == (
        (8 * 4096 + nodes) * 4096  # 2 x 8 KV heads x 128 x 2 bytes
        + nodes * 2 * 8192  # 32 heads x 128 x 2 bytes, read and written
        + 8 * 260 * 4
        + nodes * 2 * 4
    )


def test_memory_is_that_of_the_tensors() -> None:
    case = tiny("3x2")
    problem = make_problem(case, CPU)

    assert case.cache_bytes == problem.tree.key_cache.nbytes + problem.tree.value_cache.nbytes
