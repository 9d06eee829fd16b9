"""What the Triton kernels' machine code takes of a GPU; no GPU is needed, and nothing is timed.

    python benchmarks/kernel_resources.py                        # sm_90: H100, H200
    python benchmarks/kernel_resources.py --architectures sm_80 sm_89 --output resources.json
    python benchmarks/kernel_resources.py --quick                # one shape per kernel

Triton compiles each kernel for each architecture in the shapes that the engine launches, with its
own assembler; the columns are read off the machine code.

    stack       bytes per thread that were spilled to memory; should be 0
    shared      bytes of shared memory per thread block; 'too much' where no block may have as much
    blocks      thread blocks that fit on a multiprocessor at a time, by registers and shared memory
    multiplies  tcgen05, wgmma, mma.sync: matrix instructions; FMA: one product at a time (fp32)
    copies      bytes of the widest asynchronous copy from memory, 16 at most; 0 for none
    ahead       groups of copies for later steps that may be under way while one step of the main
                loop computes; 0: the loop waits for what it has just asked for
    loop        machine instructions in the longest loop, all branches of it together

An fp8 cache is refused by sm_80 and sm_86, whose instructions do not convert from e4m3.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import triton
from kernel_parts.cases import (
    DRAFT_KERNELS,
    Attention,
    attention_cases,
    draft_cases,
    step_cases,
)
from kernel_parts.compiler import ARCHITECTURES, Architecture, Kernel, compile_launches
from rich.table import Table
from shared_parts import machine, results
from shared_parts.arguments import results_file, script_parser
from shared_parts.results import wide_console

COLUMNS = ("registers", "stack", "shared", "warps", "blocks", "multiplies", "copies", "ahead")


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument(
        "--architectures", nargs="+", choices=list(ARCHITECTURES), default=["sm_90"]
    )
    parser.add_argument("--quick", action="store_true", help="one shape per kernel")
    parser.add_argument("--output", type=results_file, help="JSON with all figures")
    arguments = parser.parse_args()
    console = wide_console()
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:
        triton.knobs.cache.dir = cache
        for name in arguments.architectures:
            architecture = ARCHITECTURES[name]
            table = new_table(architecture)
            for label, kernel in kernels(architecture, arguments.quick):
                table.add_row(*row(label, kernel, architecture))
                found.append({"architecture": name, "case": label, **asdict(kernel)})
            console.print(table)
    results.write(arguments.output, {**machine.describe(gpu=None), "kernels": found})


def kernels(architecture: Architecture, quick: bool) -> Iterator[tuple[str, Kernel]]:
    """Each different kernel once, with the first case that launches it."""
    cases: list[tuple[str, Callable[[], Any]]] = [
        *((case.label, case) for case in attention_cases()),
        *step_cases(),
        *draft_cases(),
    ]
    if quick:
        few = [*list(step_cases())[1::4], *list(draft_cases())[:DRAFT_KERNELS]]
        cases = [(Attention().label, Attention()), *few]
    seen: set[Kernel] = set()
    for label, launch in cases:
        if label.startswith("fp8") and architecture.capability < 89:
            continue
        for kernel in compile_launches(architecture, launch):
            # The kernels around attention are few: only what differs is worth a line.
            if kernel.name == "_attend_part" or kernel not in seen:
                yield label, kernel
            seen.add(kernel)


def new_table(architecture: Architecture) -> Table:
    table = Table(title=f"{architecture.name} ({architecture.examples})")
    for column in ("kernel", "case"):
        table.add_column(column)
    for column in (*COLUMNS, "loop"):
        table.add_column(column, justify="right")
    return table


def row(label: str, kernel: Kernel, architecture: Architecture) -> list[str]:
    too_much = kernel.shared > architecture.block_shared
    return [
        kernel.name,
        label,
        str(kernel.registers),
        str(kernel.stack),
        f"{kernel.shared} (too much)" if too_much else str(kernel.shared),
        str(kernel.warps),
        str(kernel.blocks),
        kernel.instruction or "–",
        str(kernel.copy_bytes),
        str(kernel.ahead),
        str(kernel.loop),
    ]


if __name__ == "__main__":
    main()
