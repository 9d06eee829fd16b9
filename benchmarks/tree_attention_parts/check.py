"""The kernels against their references, before anything is timed.

Imports the kernels: whether Triton's interpreter runs them has to be settled before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tree_attention_parts.cases import Case, Heads, TreeShape
from tree_attention_parts.problem import Inputs, contiguous, make_problem, tree_mask
from tree_attention_parts.report import Check
from tree_attention_parts.steps import make_build, make_walk
from vllm_redrafter.triton_kernels.accept_path import naive_accept_path
from vllm_redrafter.triton_kernels.build_tree import naive_build_tree
from vllm_redrafter.triton_kernels.compact_kv import naive_compact_kv
from vllm_redrafter.triton_kernels.tree_attention import naive_tree_attention, tree_attention

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""The largest difference allowed, as a share of the reference's largest number."""

CONTEXT = 150
"""Long enough for three tiles of keys; it ends within a block."""


def check_kernels(
    heads: Sequence[Heads],
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[TreeShape],
    device: torch.device,
) -> Iterator[Check]:
    """Attention with every head shape, dtype and tree shape; the other kernels with one of each."""
    for dtype in dtypes:
        for some_heads in heads:
            for shape in shapes:
                yield from check_attention(Case(some_heads, 2, CONTEXT, shape, dtype), device)
    for shape in shapes:
        yield from check_steps(Case(heads[0], 3, CONTEXT, shape, dtypes[0]), device)


def check_attention(case: Case, device: torch.device) -> Iterator[Check]:
    """Every launch that is timed, against the float64 reference."""
    problem = make_problem(case, device)
    expected = reference(problem.tree)
    label = f"{case}, {str(case.dtype).removeprefix('torch.')}"
    tolerance = TOLERANCE[case.dtype]

    def check(name: str, actual: Tensor, expected: Tensor) -> Check:
        return Check(name, label, relative_error(actual, expected), tolerance)

    yield check("tree", tree_attention(*problem.tree), expected)
    yield check("tree, 3 parts", tree_attention(*problem.tree, num_parts=3), expected)
    yield check("one node", tree_attention(*problem.plain), reference(problem.plain))
    yield check("beams apart", tree_attention(*problem.beams), expected[problem.beam_rows.cpu()])
    # The same construction as the timed one; there it is compiled.
    yield check("flex_attention's mask", _masked_attention(case, problem.tree), expected)


def reference(inputs: Inputs) -> Tensor:
    """[rows, heads, head_dim] float64, on the CPU."""
    return naive_tree_attention(*inputs[:7])[0]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference as a share of the largest number expected; NaN counts as infinite."""
    difference = (actual.to(expected) - expected).abs().max() / expected.abs().max()
    return torch.nan_to_num(difference, nan=torch.inf).item()


def _masked_attention(case: Case, inputs: Inputs) -> Tensor:
    """Attention over contiguous K and V under `tree_mask`, evaluated key by key."""
    query, keys, values = (x.cpu().double() for x in contiguous(inputs, case.tree))
    requests, nodes, num_keys = query.shape[0], query.shape[2], keys.shape[2]
    visible = tree_mask(case.context, case.tree.ancestor_mask)(
        torch.arange(requests).view(-1, 1, 1, 1),
        torch.zeros(1, 1, 1, 1, dtype=torch.int64),
        torch.arange(nodes).view(-1, 1),
        torch.arange(num_keys),
    )
    out = torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=visible, enable_gqa=True
    )
    return out.transpose(1, 2)[case.tree.is_node]


def check_steps(case: Case, device: torch.device) -> Iterator[Check]:
    """Exact, as they move words and integers."""
    layers = 2
    walk = make_walk(case, layers, device)
    expected_caches = [cache.cpu().clone() for cache in walk.caches]
    walk.accept_and_compact()
    wrong = 0
    for request, start in enumerate(walk.row_start.tolist()):
        count = int(walk.num_nodes[request])
        path, output = naive_accept_path(
            walk.tokens[request, :count].tolist(),
            walk.parents[request, :count].tolist(),
            walk.sampled[start : start + count].tolist(),
        )
        found = int(walk.num_sampled[request])
        wrong += walk.path[request, :found].tolist() != path
        wrong += walk.output_tokens[request, :found].tolist() != output
        wrong += int(walk.last_row[request]) != start + path[-1]
    yield Check("accept_path", str(case), wrong, 0)

    naive_compact_kv(
        expected_caches,
        walk.path.cpu(),
        walk.num_sampled.cpu(),
        walk.row_start.cpu(),
        walk.slot_mapping.cpu(),
    )
    pairs = zip(walk.caches, expected_caches, strict=True)
    wrong = sum(not torch.equal(cache.cpu(), expected) for cache, expected in pairs)
    yield Check("compact_kv", str(case), wrong, 0)

    build = make_build(case, device)
    build.build()
    trees = naive_build_tree(
        build.root_tokens, build.tokens, build.back_pointers, build.log_probs, case.shape.nodes - 1
    )
    wrong = 0
    for request, tree in enumerate(trees):
        count = len(tree["tokens"])
        wrong += int(build.out.num_nodes[request]) != count
        wrong += build.out.tokens[request, :count].tolist() != tree["tokens"]
        wrong += build.out.parents[request, :count].tolist() != tree["parents"]
        wrong += build.out.depths[request, :count].tolist() != tree["depths"]
        words = build.out.ancestors[request, :count].tolist()
        sets = [sum((word % 2**32) << 32 * i for i, word in enumerate(node)) for node in words]
        wrong += sets != tree["ancestors"]
    yield Check("build_tree", str(case), wrong, 0)
