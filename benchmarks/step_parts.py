"""What a draft costs on a CPU, beside what it must cost at least.

    python benchmarks/step_parts.py
    python benchmarks/step_parts.py --vocab-size 49152 --hidden-size 576 --dtype bfloat16 \\
        --requests 1 8 --shapes 4x4 1x3 --output draft.json

Random weights: a draft's time does not depend on them. Each repeat measures, one after another,
so that a machine whose speed drifts slows all of them:

- plain: beam search with torch's own products (training and `evaluate` run these);
- packed: the same search as the CPU engine runs it, on weights that vLLM packed;
- products: the packed products alone, of as many rows, in as many calls;
- bytes: a draft's weights, each level's anew, over the bandwidth of reading memory.

The floor is the larger of the last two; figures are medians. The embedding is the target's and
counts for nothing here: a row per node.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median

import torch
from rich.table import Table
from shared_parts import machine, results
from shared_parts.arguments import beams, positive, script_parser

from vllm_redrafter.beam_search import beam_search
from vllm_redrafter.config import DrafterConfig
from vllm_redrafter.drafter import Drafter
from vllm_redrafter.engine.cpu.packed_drafter import PackedDrafter

READ_BYTES = 1 << 28
"""Read to measure the bandwidth: more than caches hold."""


@dataclass(frozen=True)
class Cost:
    """One draft; milliseconds, medians of the repeats.

    Attributes:
        requests: how many are drafted for at once.
        shape: WxL.
        plain, packed, products, bytes: see above.
    """

    requests: int
    shape: str
    plain: float
    packed: float
    products: float
    bytes: float

    @property
    def floor(self) -> float:
        return max(self.products, self.bytes)

    def as_json(self) -> dict[str, float | int | str]:
        return {**asdict(self), "floor": self.floor, "packed_over_floor": self.packed / self.floor}


class Draft:
    """A random drafter, plain and packed, and inputs for it."""

    def __init__(self, config: DrafterConfig, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.config, self.dtype = config, dtype
        self.plain = Drafter(config).to(dtype).eval().requires_grad_(False)
        self.packed = PackedDrafter(self.plain)
        self.embed = torch.nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype)

    def search(self, head: Drafter | PackedDrafter, requests: int, width: int, length: int) -> None:
        hidden = torch.zeros(requests, self.config.hidden_size, dtype=self.dtype)
        roots = torch.arange(requests) % self.config.vocab_size
        beam_search(head, self.embed, hidden, roots, width, length)

    @torch.inference_mode()
    def products(self, requests: int, width: int, length: int) -> None:
        """The packed products of such a draft: one row per request on the first level, then W."""
        hidden = self.config.hidden_size
        condition = self.packed.condition(torch.zeros(requests, 1, hidden, dtype=self.dtype))
        for rows in (1, *[width] * (length - 1)):
            state = torch.zeros(requests, rows, hidden, dtype=self.dtype)
            self.packed.logits(condition, self.packed.step(state, state))

    def num_bytes(self, length: int) -> int:
        """Read by a draft: everything once per level, but what depends on h alone once."""
        all_bytes = sum(p.numel() * p.element_size() for p in self.plain.parameters())
        if not self.config.has_input_projection:
            return all_bytes * length
        of_hidden = self.config.exit_dim * self.config.hidden_size * self.dtype.itemsize
        return (all_bytes - of_hidden) * length + of_hidden


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def read_bandwidth() -> float:
    """Bytes per second that this process reads, the best of a few sums over a large tensor."""
    memory = torch.ones(READ_BYTES // 8, dtype=torch.int64)
    return READ_BYTES / min(seconds(memory.sum) for _ in range(5))


def measure(draft: Draft, requests: int, width: int, length: int, repeats: int) -> Cost:
    """Time one size."""
    parts: dict[str, Callable[[], None]] = {
        "plain": lambda: draft.search(draft.plain, requests, width, length),
        "packed": lambda: draft.search(draft.packed, requests, width, length),
        "products": lambda: draft.products(requests, width, length),
    }
    for call in parts.values():  # first calls allocate
        call()
    times: dict[str, list[float]] = {name: [] for name in parts}
    bandwidth = read_bandwidth()
    for _ in range(repeats):
        for name, call in parts.items():
            times[name].append(1000 * seconds(call))
    medians = {name: median(values) for name, values in times.items()}
    least = 1000 * draft.num_bytes(length) / bandwidth
    return Cost(requests, f"{width}x{length}", **medians, bytes=least)


def table(costs: Sequence[Cost]) -> Table:
    """The figures, for a person."""
    made = Table(title="A draft, milliseconds")
    for column in ("requests", "shape", "plain", "packed", "products", "bytes"):
        made.add_column(column, justify="right")
    made.add_column("plain / packed", justify="right")
    made.add_column("packed / floor", justify="right")
    for cost in costs:
        made.add_row(
            str(cost.requests),
            cost.shape,
            *(f"{x:.2f}" for x in (cost.plain, cost.packed, cost.products, cost.bytes)),
            f"{cost.plain / cost.packed:.2f}",
            f"{cost.packed / cost.floor:.2f}",
        )
    return made


def arguments() -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("--vocab-size", type=positive, default=8192)
    parser.add_argument("--hidden-size", type=positive, default=512)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--requests", type=positive, nargs="+", default=[1, 8])
    parser.add_argument("--shapes", type=beams, nargs="+", default=[(4, 4), (1, 3)], metavar="WxL")
    parser.add_argument("--repeats", type=positive, default=30)
    parser.add_argument("--threads", type=positive, help="default: as many as torch takes")
    parser.add_argument("--output", type=Path, help="write all figures to this JSON file")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    config = DrafterConfig(args.vocab_size, args.hidden_size, exit_dim=args.hidden_size)
    surroundings = machine.describe(None)
    draft = Draft(config, getattr(torch, args.dtype))
    costs = [
        measure(draft, requests, width, length, args.repeats)
        for requests, (width, length) in product(args.requests, args.shapes)
    ]
    results.wide_console().print(table(costs))
    settings = {
        "vocab_size": args.vocab_size,
        "hidden_size": args.hidden_size,
        "dtype": args.dtype,
        "repeats": args.repeats,
        "threads": torch.get_num_threads(),
    }
    record = {**surroundings, "settings": settings, "draft": [cost.as_json() for cost in costs]}
    results.write(args.output, record)


if __name__ == "__main__":
    main()
