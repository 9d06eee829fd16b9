r"""Peak memory of a training step, measured on a CPU for growing sizes, the frozen target apart.

    python benchmarks/training_memory.py                     # sizes that fit a small machine
    python benchmarks/training_memory.py 4096,128256,5,2048  # H, V, L, T: 8 B-class target

Each size runs in a process of its own: KL distillation of one block of T tokens, all written by
the target, forward, backward and AdamW's update, twice. The peak of the process's resident
memory, less what it had before the drafter was made, is set against what has to be there:

    16 bytes per parameter (weight, gradient, two moments; float32)
  + the chunk's logits and their like: CHUNK_ELEMENTS x 4 bytes, a few times
  + activations of L x T rows

Chunks are as large as on a GPU: it is a GPU's memory that runs out.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from shared_parts import machine, results
from shared_parts.arguments import script_parser

from vllm_redrafter.data.rows import TextRow
from vllm_redrafter.heads.registry import new_head
from vllm_redrafter.training import chunked_loss
from vllm_redrafter.training.batches import TextBatch
from vllm_redrafter.training.chunked_loss import CHUNK_ELEMENTS
from vllm_redrafter.training.distillation import Distillation
from vllm_redrafter.training.target import TargetOutputs
from vllm_redrafter.training.trainer import adamw
from vllm_redrafter.training.training_config import TrainingConfig

GIB = 2**30
SIZES = (
    (1024, 32000, 5, 1024),
    (1024, 32000, 5, 2048),
    (1024, 64000, 5, 1024),
    (4096, 128256, 5, 256),
)


@dataclass(frozen=True)
class Measurement:
    """One size; bytes, and seconds of the step."""

    hidden_size: int
    vocab_size: int
    unroll_steps: int
    length: int
    parameters: int
    peak: int
    states: int
    naive_logits: int
    seconds: float


def measure(hidden_size: int, vocab_size: int, unroll_steps: int, length: int) -> Measurement:
    """Take two training steps in this process."""
    torch.manual_seed(0)
    head = torch.nn.Linear(hidden_size, vocab_size, bias=False).requires_grad_(False)
    row = TextRow.from_answer([0], [1] * (length - 1))
    batch = TextBatch.of([[row]])
    shape = (1, length, hidden_size)
    target = TargetOutputs(torch.randn(shape), torch.randn(shape))
    # The head's initialisation has touched all of its memory: what follows is the drafter's.
    before = _resident()
    started = time.perf_counter()
    drafter = new_head("recurrent", vocab_size, hidden_size)
    optimizer = adamw(drafter, TrainingConfig())
    chunked_loss.CPU_CHUNK_ELEMENTS = CHUNK_ELEMENTS
    model = Distillation(drafter, head, unroll_steps)
    for _ in range(2):  # the moments are there from the first update on
        loss = model(batch, target, torch.full((unroll_steps,), 1 / length))
        loss.total.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    seconds = (time.perf_counter() - started) / 2
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    parameters = sum(p.numel() for p in drafter.parameters())
    # All steps' logits, the teacher's, and the gradient of the former, in float32.
    naive = 3 * 4 * unroll_steps * length * vocab_size
    return Measurement(
        hidden_size,
        vocab_size,
        unroll_steps,
        length,
        parameters,
        peak,
        16 * parameters,
        naive,
        seconds,
    )


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("sizes", nargs="*", metavar="H,V,L,T", help="sizes to measure")
    parser.add_argument("--output", type=Path, help="JSON with all figures")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(asdict(measure(*map(int, arguments.one.split(","))))))
        return
    sizes = arguments.sizes or [",".join(map(str, size)) for size in SIZES]
    found = []
    for size in sizes:
        command = [sys.executable, __file__, "--one", size]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found.append(Measurement(**json.loads(done.stdout)))
    report(Console(), found)
    record = {**machine.describe(gpu=None), "measurements": [asdict(m) for m in found]}
    results.write(arguments.output, record)


def report(console: Console, found: list[Measurement]) -> None:
    """A table in GiB; the rest is what is left for chunks and activations."""
    table = Table(title=f"GiB; a chunk's logits are {CHUNK_ELEMENTS * 4 / GIB:.2f}")
    columns = ("H", "V", "L", "T", "parameters", "peak", "16 B each", "rest", "logits at once", "s")
    for column in columns:
        table.add_column(column, justify="right")
    for m in found:
        table.add_row(
            *(str(v) for v in (m.hidden_size, m.vocab_size, m.unroll_steps, m.length)),
            f"{m.parameters / 1e6:.0f} M",
            f"{m.peak / GIB:.2f}",
            f"{m.states / GIB:.2f}",
            f"{(m.peak - m.states) / GIB:.2f}",
            f"{m.naive_logits / GIB:.2f}",
            f"{m.seconds:.0f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
