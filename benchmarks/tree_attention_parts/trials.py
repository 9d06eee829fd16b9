"""Candidates of --tune: compared with the reference, and timed.

Both go through the seam by which a launch finds what a GPU's table says.

Imports the kernels: whether Triton's interpreter runs them has to be settled before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from shared_parts.timing import Timing
from torch import Tensor
from torch.nn.functional import pad

from tree_attention_parts.cases import Case
from tree_attention_parts.check import TOLERANCE, relative_error
from tree_attention_parts.measure import Settings, Stopwatch, allocate_problem, attempt
from tree_attention_parts.problem import Inputs
from tree_attention_parts.report import Cell, Missing
from tree_attention_parts.search import Times
from vllm_redrafter.triton_kernels import tree_attention as kernels
from vllm_redrafter.triton_kernels.tree_attention_tuning import Tuning

C = TypeVar("C")


def planned_for(inputs: Inputs, context: int) -> Inputs:
    """As if contexts could become so long: launch and block table have room for it."""
    block_size = inputs.key_cache.shape[1]
    blocks = -(-(context + inputs.max_nodes) // block_size)
    table = pad(inputs.block_table, (0, max(0, blocks - inputs.block_table.shape[1])))
    return inputs._replace(block_table=table, max_context_len=context)


def one_long(inputs: Inputs, others: int) -> Inputs:
    """All but the first request's contexts shortened."""
    lengths = torch.full_like(inputs.context_lens, others)
    lengths[0] = inputs.context_lens[0]
    return inputs._replace(context_lens=lengths)


@contextmanager
def using(tuning: Tuning) -> Iterator[None]:
    """Launches in here are planned as on a GPU whose table says so."""
    before = kernels.tuning_of
    kernels.tuning_of = lambda device: tuning
    try:
        yield
    finally:
        kernels.tuning_of = before


def wrong(inputs: Inputs, expected: Tensor, tuning: Tuning, parts: int | None = None) -> str | None:
    """What a launch finds, beside the reference: None if they agree."""
    error = torch.inf

    def launch() -> Cell:
        nonlocal error
        with using(tuning):
            error = relative_error(kernels.tree_attention(*inputs, num_parts=parts), expected)
        return Timing([])

    failure = attempt(launch)
    if isinstance(failure, Missing):
        return failure.reason
    if error <= TOLERANCE[inputs.query.dtype]:
        return None
    return f"wrong: differs from the reference by {error:.0%} of its largest number"


def timed(
    stopwatch: Stopwatch,
    cases: Sequence[Case],
    settings: Settings,
    skipped: list[str],
    tunings: dict[C, Tuning],
    changed: Callable[[Inputs], Inputs] = lambda inputs: inputs,
) -> Times[C]:
    """Each candidate's times in CUDA graphs; one case's tensors after another.

    Args:
        skipped: gets the cases that do not fit into memory.
        tunings: by candidate.
        changed: makes a case's tensors into those that are timed.
    """
    found = {}
    for case in cases if tunings else ():
        cells = _timed_case(stopwatch, case, settings, tunings, changed)
        if isinstance(cells, Missing):
            reason = f"{case}: {cells.reason}"
            if reason not in skipped:
                skipped.append(reason)
        else:
            found[str(case)] = cells
    return found


def _timed_case(
    stopwatch: Stopwatch,
    case: Case,
    settings: Settings,
    tunings: dict[C, Tuning],
    changed: Callable[[Inputs], Inputs],
) -> dict[C, Cell] | Missing:
    problem = allocate_problem(stopwatch, case, settings)
    if isinstance(problem, Missing):
        return problem
    inputs = changed(problem.tree)

    def time(tuning: Tuning) -> Cell:
        with using(tuning):
            return stopwatch.in_graph(lambda: kernels.tree_attention(*inputs))

    return {
        candidate: attempt(lambda tuning=tuning: time(tuning))
        for candidate, tuning in tunings.items()
    }
