"""The least time that a step can take: bytes over bandwidth, or operations over rate.

A step's parts each read their weights once, and the caches of all requests; whichever is longer,
reading or multiplying, is the part's floor. A draft reads its weights once per level, since a
level's tokens are needed for the next. A draft's kernels are small and wait for one another, so
each launch is given a time besides: an assumption, which no GPU has been asked about. Those of the
target, waiting, activations and sampling come on top.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from step_cost_parts.report import PAPER_TOKENS_PER_STEP

BYTES = 2  # of a number in bf16


@dataclass(frozen=True)
class Device:
    """What a GPU can do: bytes per second from memory, bf16 operations per second."""

    bandwidth: float
    rate: float

    def seconds(self, read: float, operations: float) -> float:
        return max(read / self.bandwidth, operations / self.rate)


H200 = Device(bandwidth=4.8e12, rate=989e12)
"""By its data sheet, dense."""


@dataclass(frozen=True)
class Floor:
    """Least seconds of a plain step, and of a ReDrafter step's verification, draft and launches."""

    nodes: int
    requests: int
    context: int
    plain: float
    verify: float
    draft: float
    launches: float

    @property
    def ratio(self) -> float:
        """How many plain steps one ReDrafter step takes at least."""
        return (self.verify + self.draft + self.launches) / self.plain


@dataclass(frozen=True)
class Weights:
    """How many weights a target multiplies with, and a drafter: per level, and once per draft.

    Attributes:
        in_fp8: of those per level, how many have one byte each.
    """

    target: int
    per_level: int
    once: int
    in_fp8: int = 0

    @classmethod
    def of(
        cls, shape: dict[str, Any], draft_vocab_size: int | None, head_dtype: str = "auto"
    ) -> Weights:
        """Counted in the models themselves, made without memory."""
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        from vllm_redrafter import new_head

        with torch.device("meta"):
            target = LlamaForCausalLM(LlamaConfig(**shape))
            drafter = new_head(
                "recurrent",
                shape["vocab_size"],
                shape["hidden_size"],
                draft_vocab_size=draft_vocab_size,
            )
        embedding = target.get_input_embeddings().weight.numel()  # looked up, not multiplied
        once = drafter.num_condition_parameters
        return cls(
            # Of a tied table, the rows are multiplied with after all.
            target=sum(p.numel() for p in target.parameters())
            - (0 if target.config.tie_word_embeddings else embedding),
            per_level=sum(p.numel() for p in drafter.parameters()) - once,
            once=once,
            in_fp8=drafter.vocabulary_layers[0].weight.numel() if head_dtype == "fp8" else 0,
        )


@dataclass(frozen=True)
class Arithmetic:
    """A target and its drafter on a device: the least seconds of what they do.

    Attributes:
        shape: the target's sizes, by the names of a transformers config.
        weights: of both.
        device: that reads and multiplies them.
    """

    shape: dict[str, Any]
    weights: Weights
    device: Device

    def forward(self, requests: int, context: int, rows: int) -> float:
        """The target's pass over `rows` tokens, of so many requests together."""
        heads, layers = self.shape["num_attention_heads"], self.shape["num_hidden_layers"]
        head_size = self.shape["hidden_size"] // heads
        cached = 2 * layers * self.shape["num_key_value_heads"] * head_size * BYTES  # per token
        attention = 4 * layers * heads * head_size * context * rows
        return self.device.seconds(
            self.weights.target * BYTES + requests * context * cached,
            2 * self.weights.target * rows + attention,
        )

    def draft(self, requests: int, beam_width: int, beam_length: int) -> float:
        """A beam search for so many requests."""
        weights, device = self.weights, self.device
        level = weights.per_level * BYTES - weights.in_fp8 * (BYTES - 1)
        first = device.seconds(level, 2 * weights.per_level * requests)
        others = device.seconds(level, 2 * weights.per_level * requests * beam_width)
        once = device.seconds(weights.once * BYTES, 2 * weights.once * requests)
        return once + first + (beam_length - 1) * others


def draft_launches(beam_length: int) -> int:
    """Of a draft on the CUDA engine, by one request and one residual block, without a budget.

    Seven per level: state, projection, block, vocabulary, its best tokens twice, beams; once the
    part of the target's hidden state, and two for the trees. A test counts them.
    """
    return 7 * beam_length + 3


def floors(
    shape: dict[str, Any],
    weights: Weights,
    device: Device,
    beams: tuple[int, int],
    nodes: Iterable[int],
    cases: Iterable[tuple[int, int]],
    launches: float = 0.0,
) -> list[Floor]:
    """For each K and (batch, context): the floor with a tree of K nodes of W x L beams.

    `launches` are the seconds that a draft's take.
    """
    least = Arithmetic(shape, weights, device)
    return [
        Floor(
            nodes=k,
            requests=requests,
            context=context,
            plain=least.forward(requests, context, requests),
            verify=least.forward(requests, context, requests * (1 + k)),
            draft=least.draft(requests, *beams),
            launches=launches,
        )
        for requests, context in cases
        for k in nodes
    ]


def print_floors(target: str, found: Iterable[Floor], console: Console) -> None:
    """One target's floors; times in milliseconds."""
    table = Table(title=f"{target}: least time of a step, ms (arithmetic, nothing measured)")
    for name in ("batch", "context", "K", "plain", "verify", "draft", "launches", "ratio"):
        table.add_column(name, justify="right")
    table.add_column(f"speed-up at {PAPER_TOKENS_PER_STEP} tokens/step", justify="right")
    for floor in found:
        table.add_row(
            str(floor.requests),
            str(floor.context),
            str(floor.nodes),
            *(f"{1000 * t:.2f}" for t in (floor.plain, floor.verify, floor.draft, floor.launches)),
            f"{floor.ratio:.2f}",
            f"{PAPER_TOKENS_PER_STEP / floor.ratio:.2f}",
        )
    console.print(table)
