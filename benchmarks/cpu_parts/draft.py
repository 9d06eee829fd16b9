"""What a draft costs: plain, on packed weights, and at least."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from rich.table import Table
from torch import Tensor

from cpu_parts import timing
from vllm_redrafter.engine.cpu.packed_weights import packed
from vllm_redrafter.engine.cpu.search import search
from vllm_redrafter.heads.head import Product
from vllm_redrafter.heads.registry import new_head
from vllm_redrafter.tree.beam_search import beam_search
from vllm_redrafter.tree.policy import SearchShape


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
    """A drafter of random weights, plain and packed, and inputs for it; `head` is its name."""

    def __init__(self, head: str, vocab_size: int, hidden_size: int, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.dtype = dtype
        drafter = new_head(head, vocab_size, hidden_size)
        self.plain, self.config = drafter.to(dtype).eval().requires_grad_(False), drafter.config
        self.packed = self.plain.packed(self._packed)
        # Of each product, what it is of, while a search is recorded.
        self._recorded: list[tuple[Product, Tensor]] | None = None
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

    def products(self, requests: int, width: int, length: int) -> list[tuple[Product, Tensor]]:
        """The packed products of such a draft, and what each is of."""
        self._recorded = recorded = []
        self.search(True, requests, width, length)
        self._recorded = None
        return recorded

    def _packed(self, weight: Tensor, bias: Tensor | None) -> Product:
        product = packed(weight, bias)

        def recording(x: Tensor) -> Tensor:
            if self._recorded is not None:
                self._recorded.append((product, x))
            return product(x)

        return recording

    def num_bytes(self, length: int) -> int:
        """Read by a draft: everything once per level, but what depends on h alone once."""
        once = self.plain.num_condition_parameters
        per_level = sum(p.numel() for p in self.plain.parameters()) - once
        return (per_level * length + once) * self.dtype.itemsize


def measure(draft: Draft, requests: int, width: int, length: int, repeats: int) -> Cost:
    """Time one size."""
    products = draft.products(requests, width, length)

    @torch.inference_mode()
    def alone() -> None:
        for product, x in products:
            product(x)

    parts: dict[str, Callable[[], None]] = {
        "plain": lambda: draft.search(False, requests, width, length),
        "packed": lambda: draft.search(True, requests, width, length),
        "products": alone,
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
