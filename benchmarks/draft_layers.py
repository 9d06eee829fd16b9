r"""The layers of a draft's level on a GPU: how near they are to reading their weights once.

    python benchmarks/draft_layers.py --output layers.json
    python benchmarks/draft_layers.py --hidden 4096 --rows 4 16

A level of a draft reads weights for a few rows, so that a layer's time is their bytes over the
bandwidth, at best. Timed are, for bf16 weights of random numbers:

    cell        the gated head's cell, two norms and its gate included: one launch of ours
    its product one of as many bytes, x W^T with W [2 H, 2 H], by torch: what a library reaches
    block       a residual block of the gated head, with its norm: one launch of ours
    its product likewise, W [H, H]
    candidates  128 of each of four depths of V = 32,768, chosen from logits that are there
    gathered    the products of their rows with a request's four beams: --rows / 4 requests
    ranked      the best four of them

Every launch is replayed from a CUDA graph with the L2 cache flushed before, medians over --repeats;
TB/s are the weights' bytes alone, or those of logits where nothing else is read. Ours are compared
with references in float64 first. The copy bandwidth is that of a large copy in the same run, bytes
read and written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from shared_parts import machine, results
from shared_parts.arguments import integer, positive, results_file, script_parser
from shared_parts.stopwatch import Stopwatch
from torch import Tensor

from vllm_redrafter.config import USUAL_CANDIDATES
from vllm_redrafter.heads.norm import EPSILON
from vllm_redrafter.triton_kernels.candidates import (
    choose_candidates,
    naive_choose_candidates,
    naive_rank_candidates,
    rank_candidates,
)
from vllm_redrafter.triton_kernels.draft_layers import (
    MAX_ROWS,
    Product,
    draft_layer,
    naive_draft_layer,
)
from vllm_redrafter.triton_kernels.gated_layer import (
    Rows,
    gated_cell,
    naive_gated_cell,
)
from vllm_redrafter.triton_kernels.gather_dot import gather_dot, naive_gather_dot

BEAMS, LENGTH = 4, 5
VOCABULARY = 32_768
TOLERANCE = 2e-2
"""Of a bf16 result, relative to the largest number of the reference's."""


@dataclass(frozen=True)
class Layer:
    """What was timed.

    Attributes:
        name: see this script.
        hidden, rows: sizes.
        weight_bytes: that have to be read.
        microseconds: the median.
    """

    name: str
    hidden: int
    rows: int
    weight_bytes: int
    microseconds: float

    @property
    def terabytes_per_second(self) -> float:
        return self.weight_bytes / self.microseconds / 1e6


def main(argv: Sequence[str] | None = None) -> None:
    command = script_parser(__doc__)
    add = command.add_argument
    add("--hidden", nargs="+", type=positive, default=[2048, 4096], help="(default 2048 4096)")
    add(
        "--rows",
        nargs="+",
        type=integer(1, MAX_ROWS),
        default=[4, 16, 64],
        help="at most 64 (default 4 16 64)",
    )
    add("--repeats", type=positive, default=30, help="of each launch (default 30)")
    add("--output", type=results_file, help="write all figures to this JSON file")
    options = command.parse_args(argv)
    if not torch.cuda.is_available():
        command.error("torch finds no GPU, and nothing is timed without one")
    from shared_parts.gpu import Gpu

    gpu = Gpu(options.repeats)
    report = {**machine.describe(gpu.name), **gpu.describe()}
    run(gpu, options, report, results.wide_console())


def run(
    stopwatch: Stopwatch, options: argparse.Namespace, report: dict[str, Any], console: Console
) -> None:
    """Time everything that is asked for; the file has what was timed so far."""
    report["copy_tb_per_s"] = stopwatch.copy_bandwidth() / 1000
    report["layers"] = []
    for hidden, rows in product(options.hidden, options.rows):
        of_root = [*of_candidates(stopwatch, hidden, max(1, rows // BEAMS))]
        made = [*layers(stopwatch, hidden, rows), *of_root]
        report["layers"] += [asdict(layer) for layer in made]
        results.write(options.output, report)
        print_layers(made, report["copy_tb_per_s"], console)


def layers(stopwatch: Stopwatch, hidden: int, rows: int) -> Iterator[Layer]:
    """The cell, the block, and products of as many bytes."""
    x, weight, bias, out = tensors(stopwatch.device, hidden, rows)
    cell = cell_launch(x, weight, bias, out)
    cell()
    check(out, expected_cell(x, weight, bias), "the cell")
    yield Layer("cell", hidden, rows, weight.nbytes, stopwatch.in_graph(cell))
    joined = torch.cat([x, x], dim=1)
    yield library_product(stopwatch, joined, weight)
    small = weight[:hidden, :hidden].contiguous()
    given = {"bias": bias[:hidden], "silu": True, "residual": x, "epsilon": EPSILON}

    def block() -> None:
        draft_layer(Product(x, small), out, **given)

    block()
    check(out, naive_draft_layer(Product(x, small), rows, **given), "the block")
    yield Layer("block", hidden, rows, small.nbytes, stopwatch.in_graph(block))
    yield library_product(stopwatch, x, small)


def of_candidates(stopwatch: Stopwatch, hidden: int, requests: int) -> Iterator[Layer]:
    """The choice of candidates, and a level below the root."""
    rows, count = requests * BEAMS, USUAL_CANDIDATES
    generator = torch.Generator(stopwatch.device).manual_seed(1)
    made = {"generator": generator, "device": stopwatch.device}
    logits = torch.randn(LENGTH * requests, VOCABULARY, **made).to(torch.bfloat16)

    def choose() -> None:
        choose_candidates(logits, requests, count, BEAMS)

    _, chosen = choose_candidates(logits, requests, count, BEAMS)
    _, expected = naive_choose_candidates(logits, requests, count, BEAMS)
    check(chosen.sort().values, expected.double(), "the candidates")
    yield Layer("candidates", hidden, rows, logits.nbytes, stopwatch.in_graph(choose))
    x, scale, tokens = *tensors(stopwatch.device, hidden, rows)[::2], chosen[0]
    weight = torch.randn(VOCABULARY, hidden, **made).to(torch.bfloat16)
    scale = scale[:hidden]

    def gather() -> Tensor:
        return gather_dot(x, weight, tokens, scale=scale, epsilon=EPSILON)

    of_tokens = gather()
    expected = naive_gather_dot(x, weight, tokens, scale, EPSILON)
    check(of_tokens, expected, "what is gathered")
    read = tokens.numel() * hidden * weight.element_size()
    yield Layer("gathered", hidden, rows, read, stopwatch.in_graph(gather))

    def rank() -> Tensor:
        return rank_candidates(of_tokens, tokens, BEAMS).tokens

    expected = naive_rank_candidates(of_tokens, tokens, BEAMS).tokens.double()
    check(rank(), expected, "the ranks")
    yield Layer("ranked", hidden, rows, of_tokens.nbytes, stopwatch.in_graph(rank))


def library_product(stopwatch: Stopwatch, x: Tensor, weight: Tensor) -> Layer:
    """x W^T by torch."""
    out = x.new_empty(len(x), len(weight))
    took = stopwatch.in_graph(lambda: torch.mm(x, weight.t(), out=out))
    return Layer("its product", weight.shape[1], len(x), weight.nbytes, took)


def tensors(device: torch.device, hidden: int, rows: int) -> tuple[Tensor, ...]:
    """x [rows, H], W [2 H, 2 H], b [2 H] and an output [rows, H], bf16."""
    generator = torch.Generator(device).manual_seed(0)

    def randn(*size: int) -> Tensor:
        made = torch.randn(size, generator=generator, device=device)
        return made.to(torch.bfloat16)

    weight = randn(2 * hidden, 2 * hidden) * hidden**-0.5
    return randn(rows, hidden), weight, randn(2 * hidden), randn(rows, hidden)


def cell_launch(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor) -> Callable[[], object]:
    """Tokens and states are the same rows."""
    return lambda: gated_cell(Rows(x), Rows(x), weight, bias, out, EPSILON)


def expected_cell(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return naive_gated_cell(Rows(x), Rows(x), len(x), weight, bias, EPSILON)


def check(found: Tensor, expected: Tensor, what: str) -> None:
    """What is wrong is not timed."""
    error = (found.double() - expected).abs().max() / expected.abs().max()
    if not error <= TOLERANCE:
        sys.exit(f"{what} of {list(found.shape)} is off by {error:.1e} of the largest number")


def print_layers(made: Sequence[Layer], copy: float, console: Console) -> None:
    first = made[0]
    table = Table("layer", "µs", "TB/s", "of a copy's")
    table.title = f"H {first.hidden}, {first.rows} rows; a copy: {copy:.2f} TB/s"
    for layer in made:
        rate = layer.terabytes_per_second
        table.add_row(
            layer.name,
            f"{layer.microseconds:.1f}",
            f"{rate:.2f}",
            f"{rate / copy:.0%}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
