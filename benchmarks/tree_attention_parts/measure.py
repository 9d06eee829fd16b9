"""What is timed in a case.

Imports the kernels: whether Triton's interpreter runs them has to be settled before.
"""

from __future__ import annotations

from shared_parts.stopwatch import Stopwatch

from tree_attention_parts.cases import Case
from tree_attention_parts.problem import Inputs, make_problem
from tree_attention_parts.report import AttentionResult
from vllm_redrafter.triton_kernels.tree_attention import tree_attention

MEMORY = 0.8
"""The part of free GPU memory that a case may take."""


class TooLargeError(RuntimeError):
    """A case's caches do not fit."""


def measure_attention(stopwatch: Stopwatch, case: Case) -> AttentionResult:
    """All figures of a case.

    Raises:
        TooLargeError: there is too little memory for it.
    """
    free = stopwatch.free_bytes
    if case.cache_bytes > MEMORY * free:
        raise TooLargeError(
            f"skipped: the KV cache would take {case.cache_bytes / 1e9:.2f} GB, more than "
            f"{MEMORY:.0%} of the {free / 1e9:.2f} GB of GPU memory that are free"
        )
    problem = make_problem(case, stopwatch.device)

    def timed(inputs: Inputs) -> float:
        return stopwatch.in_graph(lambda: tree_attention(*inputs))

    return AttentionResult(
        heads=case.heads.name,
        batch=case.batch,
        context=case.context,
        nodes=case.shape.label,
        rows=int(case.tree.num_nodes.sum()),
        leaves=sum(len(paths) for paths in case.paths),
        floor_bytes=case.floor_bytes,
        tree=timed(problem.tree),
        one_node=timed(problem.plain),
        beams=timed(problem.beams),
    )
