"""The kernels against their references, before anything is timed.

Imports the kernels: whether Triton's interpreter runs them has to be settled before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tree_attention_parts.cases import Case, Heads, TreeShape
from tree_attention_parts.problem import Inputs, make_problem
from tree_attention_parts.report import Check
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
    """Attention with every head shape, dtype and tree shape."""
    for dtype in dtypes:
        for some_heads in heads:
            for shape in shapes:
                yield from check_attention(Case(some_heads, 2, CONTEXT, shape, dtype), device)


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


def reference(inputs: Inputs) -> Tensor:
    """[rows, heads, head_dim] float64, on the CPU."""
    return naive_tree_attention(*inputs[:7])[0]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference as a share of the largest number expected; NaN counts as infinite."""
    difference = (actual.to(expected) - expected).abs().max() / expected.abs().max()
    return torch.nan_to_num(difference, nan=torch.inf).item()
