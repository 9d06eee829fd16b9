"""What a draft for one request must read and launch: counted of a search, on no GPU.

`DraftSearch` runs on memory that nobody has written. Kernels and products do not: each is counted
instead, with the head's parameters among its arguments. Of a gathering kernel's weights, only the
rows that it gathers are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

from vllm_redrafter.engine.cuda.draft_search import DraftSearch
from vllm_redrafter.heads.head import DraftHead
from vllm_redrafter.heads.registry import new_head
from vllm_redrafter.tree.policy import SearchShape

VOCABULARY = "V"
GATHERED = "gathered rows"
PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.linear")
ALLOCATIONS = ("aten.empty", "aten.new_empty")


@dataclass(frozen=True)
class Floor:
    """A draft for one request.

    Attributes:
        head: what it is called.
        launches: kernels of ours, and operations of torch.
        parts: bytes of weights that are read, by the part of the head that has them.
    """

    head: str
    launches: int
    parts: dict[str, int]

    @property
    def read(self) -> int:
        return sum(self.parts.values())


def heads(
    vocabulary: int, hidden: int, length: int, draft_vocab_size: int | None
) -> Iterator[tuple[str, DraftHead]]:
    """The heads that are compared, in bf16, whose memory nobody has written."""
    selector = {"depths": length - 1, "rank": hidden // 4}
    for name, head, options in (
        ("gated", "gated", {}),
        ("recurrent", "recurrent", {}),
        ("gated, selector", "gated", {"selector": selector}),
    ):
        sizes = {"draft_vocab_size": draft_vocab_size, **options}
        with torch.device("meta"):
            made = new_head(head, vocabulary, hidden, length, **sizes)
        yield name, made.to(torch.bfloat16).to_empty(device="cpu").eval()


def floors(
    vocabulary: int, hidden: int, shape: SearchShape, candidates: int, draft_vocab_size: int | None
) -> list[Floor]:
    """Of a target with so many tokens, so wide."""
    made = heads(vocabulary, hidden, shape.beam_length, draft_vocab_size)
    return [floor(name, head, shape, candidates) for name, head in made]


def floor(name: str, head: DraftHead, shape: SearchShape, candidates: int) -> Floor:
    """Of one head; candidates where it tells any."""
    config = head.config
    with torch.device("meta"):
        table = nn.Embedding(config.vocab_size, config.hidden_size, dtype=torch.bfloat16)
    table = table.to_empty(device="cpu")
    count = candidates if config.selected_depths else 0
    search = DraftSearch(head, table, table, shape, 1, candidates=lambda _: count)
    hidden = torch.empty(1, config.hidden_width, dtype=torch.bfloat16)
    roots, counts = torch.zeros(1, dtype=torch.int64), Counts(head)
    with counts.counting():
        search.explore(hidden, roots)
    return Floor(name, counts.launches, dict(counts.read))


class Counts(TorchDispatchMode):
    """Counts launches, and what they read of a head's parameters."""

    def __init__(self, head: DraftHead) -> None:
        super().__init__()
        self.launches = 0
        self.read: Counter[str] = Counter()
        self._parts = {
            memory_of(parameter): name.partition(".")[0]
            for name, parameter in head.named_parameters()
        }
        self._parts |= {memory_of(layer.weight): VOCABULARY for layer in head.vocabulary_layers}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """In the body, kernels and products are counted and not run."""

        def launch(kernel: JITFunction, *arguments: Any, grid: Any, **options: Any) -> None:
            self._count(arguments, gathers=kernel.fn.__name__ == "_gather_dot")

        with patch.object(JITFunction, "run", launch), self:
            yield

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: Any = None
    ) -> Any:
        options, name = options or {}, str(function)
        out = self._run(name, function, arguments, options)
        known = {memory_of(tensor) for tensor in tensors_of((arguments, options))}
        fresh = any(memory_of(tensor) not in known for tensor in tensors_of(out))
        if not name.startswith(ALLOCATIONS) and (fresh or function._schema.is_mutable):
            self._count(arguments)
        return out

    def _run(self, name: str, function: Callable[..., Any], arguments: Any, options: Any) -> Any:
        """Of a product, its shape alone: weights are not read."""
        if not name.startswith(PRODUCTS):
            return function(*arguments, **options)
        if name.partition("(")[0].split(".")[1].endswith("_"):
            return arguments[0]
        shapes = [
            argument.to("meta") if isinstance(argument, Tensor) else argument
            for argument in arguments
        ]
        return torch.empty_like(function(*shapes, **options), device="cpu")

    def _count(self, arguments: Any, gathers: bool = False) -> None:
        self.launches += 1
        # A kernel may be given one twice, where it reads nothing of the second.
        once = {}
        for tensor in tensors_of(arguments):
            if (part := self._parts.get(memory_of(tensor))) is not None:
                once[memory_of(tensor), tensor.storage_offset(), tuple(tensor.shape)] = part, tensor
        for part, tensor in once.values():
            if gathers and tensor.dim() == 2:
                (tokens,) = (t for t in tensors_of(arguments) if t.dtype == torch.int32)
                self.read[GATHERED] += tokens.numel() * tensor.shape[1] * tensor.element_size()
            else:
                self.read[part] += tensor.numel() * tensor.element_size()


def tensors_of(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def print_floors(title: str, found: list[Floor], console: Console) -> None:
    """A table of heads; the first is what others are compared with."""
    table = Table(title=title)
    for column in ("head", "launches", "MB", "of gated's", "MB of each part"):
        table.add_column(
            column, justify="left" if column in ("head", "MB of each part") else "right"
        )
    for each in found:
        parts = sorted(each.parts.items(), key=lambda part: -part[1])
        table.add_row(
            each.head,
            str(each.launches),
            f"{each.read / 1e6:.1f}",
            f"{each.read / found[0].read:.2f}",
            ", ".join(f"{name} {read / 1e6:.1f}" for name, read in parts if read >= 5e4),
        )
    console.print(table)
