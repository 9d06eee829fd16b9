"""What a draft costs: plain, on packed weights, and at least."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from cpu_parts import timing
from vllm_redrafter.engine.cpu.packed_weights import packed
from vllm_redrafter.engine.cpu.search import search
from vllm_redrafter.heads.head import Product
from vllm_redrafter.heads.registry import new_head
from vllm_redrafter.heads.selector import SelectorConfig
from vllm_redrafter.heads.shortlist import affordable
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


class Read(NamedTuple):
    """One packed product of a draft: what it is of, and the numbers that it reads."""

    product: Product
    x: Tensor
    numbers: int


class Draft:
    """A drafter of random weights, plain and packed, and inputs for it.

    Args:
        head: its name; one that chooses among candidates has a selector.
        vocab_size, hidden_size: the target's.
        length: the most tokens that are drafted in a row.
        candidates: C; 0 ranks the vocabulary at every level.
        dtype: of the weights.
    """

    def __init__(
        self,
        head: str,
        vocab_size: int,
        hidden_size: int,
        length: int,
        candidates: int,
        dtype: torch.dtype,
    ) -> None:
        torch.manual_seed(0)
        self.dtype, self.candidates = dtype, candidates
        drafter = new_head(head, vocab_size, hidden_size, length)
        if candidates and length > 1:
            selector = SelectorConfig(length - 1, max(1, drafter.config.feature_width // 4))
            drafter = new_head(head, vocab_size, hidden_size, length, selector=selector)
        self.plain, self.config = drafter.to(dtype).eval().requires_grad_(False), drafter.config
        self.packed = self.plain.packed(self._packed)
        # The products of a search while it is recorded.
        self._recorded: list[Read] | None = None
        self.embed = torch.nn.Embedding(vocab_size, hidden_size, dtype=dtype)

    def search(self, packed: bool, requests: int, width: int, length: int) -> None:
        """As training and `evaluate` search, or as the engine does."""
        hidden = torch.zeros(requests, self.config.hidden_width, dtype=self.dtype)
        roots = torch.arange(requests) % self.config.vocab_size
        shape, count = SearchShape(width, length), self.affordable(requests, length)
        if packed:
            search(self.packed, self.embed, hidden, roots, shape, count)
        else:
            beam_search(self.plain, self.embed, hidden, roots, *shape, candidates=count)

    def affordable(self, requests: int, length: int) -> int:
        """Of how many candidates the engine chooses."""
        return affordable(self.candidates, requests, length, self.config.num_ranked_tokens)

    def products(self, requests: int, width: int, length: int) -> list[Read]:
        """The packed products of such a draft."""
        self._recorded = recorded = []
        self.search(True, requests, width, length)
        self._recorded = None
        return recorded

    def num_bytes(self, requests: int, width: int, length: int) -> int:
        """Read by such a draft: the weights of each product, and the rows that are gathered."""
        numbers = sum(read.numbers for read in self.products(requests, width, length))
        rows = requests * (length - 1) * self.affordable(requests, length)
        return (numbers + rows * self.config.feature_width) * self.dtype.itemsize

    def _packed(self, weight: Tensor, bias: Tensor | None) -> Product:
        product = packed(weight, bias)
        numbers = weight.numel() + (0 if bias is None else bias.numel())

        def recording(x: Tensor) -> Tensor:
            if self._recorded is not None:
                self._recorded.append(Read(product, x, numbers))
            return product(x)

        return recording


def measure(draft: Draft, requests: int, width: int, length: int, repeats: int) -> Cost:
    """Time one size."""
    products = draft.products(requests, width, length)

    @torch.inference_mode()
    def alone() -> None:
        for product, x, _ in products:
            product(x)

    parts: dict[str, Callable[[], None]] = {
        "plain": lambda: draft.search(False, requests, width, length),
        "packed": lambda: draft.search(True, requests, width, length),
        "products": alone,
    }
    bandwidth = timing.read_bandwidth()
    found = timing.medians(parts, repeats)
    least = 1000 * draft.num_bytes(requests, width, length) / bandwidth
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
