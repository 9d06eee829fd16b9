"""What a draft costs: plain, on packed weights, and at least."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from rich.table import Table

from cpu_parts import timing
from vllm_redrafter.beam_search import beam_search
from vllm_redrafter.engine.cpu.packed_weights import packed
from vllm_redrafter.engine.cpu.search import search
from vllm_redrafter.heads.registry import new_head
from vllm_redrafter.policy import SearchShape


@dataclass(frozen=True)
class Cost:
    """One draft; milliseconds, medians of the repeats.

    Attributes:
        requests: how many are drafted for at once.
        shape: WxL.
        plain, packed, products, bytes: see step_parts.py.
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

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.dtype = dtype
        drafter = new_head("recurrent", vocab_size, hidden_size)
        self.plain, self.config = drafter.to(dtype).eval().requires_grad_(False), drafter.config
        self.packed = self.plain.packed(packed)
        self.embed = torch.nn.Embedding(vocab_size, hidden_size, dtype=dtype)

    def search(self, packed: bool, requests: int, width: int, length: int) -> None:
        """As training and `evaluate` search, or as the engine does."""
        hidden = torch.zeros(requests, self.config.hidden_width, dtype=self.dtype)
        roots = torch.arange(requests) % self.config.vocab_size
        shape = SearchShape(width, length)
        if packed:
            search(self.packed, self.embed, hidden, roots, shape)
        else:
            beam_search(self.plain, self.embed, hidden, roots, *shape)

    @torch.inference_mode()
    def products(self, requests: int, width: int, length: int) -> None:
        """The packed products of such a draft: one row per request on the first level, then W."""
        hidden, read = self.config.hidden_size, self.config.hidden_width
        condition = self.packed.condition(torch.zeros(requests, 1, read, dtype=self.dtype))
        for depth, rows in enumerate((1, *[width] * (length - 1))):
            embedded = torch.zeros(requests, rows, hidden, dtype=self.dtype)
            if depth == 0:
                state = self.packed.start(condition, embedded)
            else:
                state = self.packed.advance(state[:, :1].expand(-1, rows, -1), embedded)
            self.packed.logits(condition, state, depth)

    def num_bytes(self, length: int) -> int:
        """Read by a draft: everything once per level, but what depends on h alone once."""
        once = self.plain.num_condition_parameters
        per_level = sum(p.numel() for p in self.plain.parameters()) - once
        return (per_level * length + once) * self.dtype.itemsize


def measure(draft: Draft, requests: int, width: int, length: int, repeats: int) -> Cost:
    """Time one size."""
    parts: dict[str, Callable[[], None]] = {
        "plain": lambda: draft.search(False, requests, width, length),
        "packed": lambda: draft.search(True, requests, width, length),
        "products": lambda: draft.products(requests, width, length),
    }
    bandwidth = timing.read_bandwidth()
    found = timing.medians(parts, repeats)
    least = 1000 * draft.num_bytes(length) / bandwidth
    return Cost(requests, f"{width}x{length}", **found, bytes=least)


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
