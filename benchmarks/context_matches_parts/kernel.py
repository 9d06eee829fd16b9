"""What the search of texts costs on a GPU, beside reading them once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.table import Table
from shared_parts.stopwatch import Stopwatch
from torch import Tensor

from context_matches_parts.texts import VOCAB_SIZE, Kind, texts
from vllm_redrafter.tree import context_matches as reference
from vllm_redrafter.triton_kernels.find_matches import MatchBuffers, find_matches


@dataclass(frozen=True)
class KernelCost:
    """Of texts of one kind and length.

    Attributes:
        text: the kind.
        tokens: of each request.
        requests: in the batch.
        time: microseconds, the median.
        floor: microseconds, to read all tokens once at the bandwidth of a copy.
    """

    text: Kind
    tokens: int
    requests: int
    time: float
    floor: float


def measure(
    stopwatch: Stopwatch,
    case: tuple[Kind, int, int],
    room: int,
    paths: int,
    path_length: int,
    copy_gb_per_s: float,
) -> KernelCost:
    """Time one size.

    Args:
        stopwatch: of the GPU.
        case: kind, tokens and requests.
        room: tokens that each row of the table of texts has room for.
        paths, path_length: what is searched for.
        copy_gb_per_s: the bandwidth.
    """
    kind, tokens, requests = case
    text = torch.zeros(requests, room, dtype=torch.int32, device=stopwatch.device)
    text[:, :tokens] = torch.from_numpy(texts(kind, requests, tokens))
    num_tokens = torch.full((requests,), tokens, dtype=torch.int32, device=text.device)
    entries = torch.arange(requests, device=text.device)
    found = MatchBuffers(requests, paths, path_length, room, text.device)

    def launch() -> None:
        find_matches(text, num_tokens, entries, VOCAB_SIZE, found)

    launch()
    _check(found, text, num_tokens, case)
    floor = requests * tokens * text.itemsize / copy_gb_per_s / 1000
    return KernelCost(*case, stopwatch.in_graph(launch), floor)


def _check(
    found: MatchBuffers, text: Tensor, num_tokens: Tensor, case: tuple[Kind, int, int]
) -> None:
    """What is wrong is not timed."""
    sizes = found.tokens.shape[1:]
    expected = reference.find_matches(text, num_tokens, *sizes, VOCAB_SIZE)
    is_same = found.tokens.equal(expected.tokens) and found.lengths.long().equal(expected.lengths)
    if not is_same:
        kind, tokens, requests = case
        sys.exit(f"matches of {requests} texts ({kind}, {tokens} tokens) are not the reference's")


def table(costs: Sequence[KernelCost], copy_gb_per_s: float) -> Table:
    """The figures, for a person."""
    made = Table("text", title=f"The search of texts on a GPU; a copy: {copy_gb_per_s:.0f} GB/s")
    for column in ("tokens", "requests", "time, µs", "floor, µs", "time / floor"):
        made.add_column(column, justify="right")
    for cost in costs:
        made.add_row(
            cost.text,
            f"{cost.tokens:,}",
            str(cost.requests),
            f"{cost.time:.1f}",
            f"{cost.floor:.2f}",
            f"{cost.time / cost.floor:.1f}",
        )
    return made
