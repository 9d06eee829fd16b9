# SPDX-License-Identifier: Apache-2.0
"""`vllm-redrafter inspect`: what a checkpoint is, and for which targets, without its weights."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from huggingface_hub import ModelCard
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from vllm_redrafter.checkpoints.draft_cost import parameters_read
from vllm_redrafter.checkpoints.drafter_files import CARD_FILE, read_config, resolve_file
from vllm_redrafter.checkpoints.reading import Checkpoint, shape_of, verifier_of
from vllm_redrafter.checkpoints.speculation import NODES, speculation
from vllm_redrafter.checkpoints.tensors import DRAFT_TO_TARGET
from vllm_redrafter.checkpoints.weight_files import read_weights
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.utils.errors import ConfigError

EXPENSIVE = 0.5
"""A draft that reads this share of what a step of the target does is warned of."""


@dataclass(frozen=True)
class _Inspection:
    """A checkpoint, and its weights by their headers.

    `d2t` is none of the parameters, which training sets.
    """

    checkpoint: Checkpoint
    dtypes: list[str]
    num_parameters: int
    num_bytes: int

    @property
    def has_nodes(self) -> bool:
        """Whether K is recorded."""
        return NODES in shape_of(self.checkpoint.values)

    @cached_property
    def served(self) -> ReDrafterConfig:
        """The shape that it is served with where no other is given; K is 1 if none is recorded."""
        return speculation(self.checkpoint, {} if self.has_nodes else {NODES: 1})

    @property
    def draft_bytes(self) -> int:
        """What a draft reads."""
        each = self.num_bytes / max(self.num_parameters, 1)
        return round(each * parameters_read(self.checkpoint.head, self.served.beam_length))


def inspect_checkpoint(model: str) -> _Inspection:
    """Read and check what a checkpoint says of itself."""
    found = Checkpoint.open(model).checked()
    tensors = read_weights(found.weights)
    parameters = [tensor for name, tensor in tensors.items() if name != DRAFT_TO_TARGET]
    return _Inspection(
        found,
        sorted({str(tensor.dtype).removeprefix("torch.") for tensor in parameters}),
        num_parameters=sum(tensor.numel() for tensor in parameters),
        num_bytes=sum(tensor.nbytes for tensor in tensors.values()),
    )


def _source(values: Mapping[str, Any]) -> str:
    """What config.json says of itself: `architectures`, and `method` where it has one."""
    written = values.get("architectures") or values.get("model_type")
    names = [*written] if isinstance(written, list) else [written]
    return ", ".join(str(name) for name in (*names, values.get("method")) if name)


def _licence(model: str) -> str | None:
    try:
        path = resolve_file(model, CARD_FILE)
        licence = path and ModelCard.load(path).data.get("license")
    except (ConfigError, OSError, ValueError):  # out of reach; or no card's header
        return None
    return str(licence) if licence else None


def _cost_note(found: _Inspection, target: str, step: int | None) -> str:
    """What a draft costs beside a step of a target that uses so many bytes of its weights."""
    if step is None:
        return f"what a step of {target} reads is not known: transformers cannot make its model"
    share = found.draft_bytes / step
    note = (
        f"a draft reads {share:.1%} of the {decimal(step)} of weights that a step of {target} uses"
    )
    if share < EXPENSIVE:
        return note
    return (
        f"{note}: drafts cost more than they bring where a step gives fewer than {1 + share:.1f} "
        "tokens; convert --draft-vocab-size makes them cheaper, or take another drafter"
    )


def print_inspection(
    console: Console,
    found: _Inspection,
    target: str | None = None,
    step: int | None = None,
    verbose: bool = False,
) -> None:
    """Show it to a reader; `step` are the bytes that a step of the target reads, if known.

    `verbose` adds its config.json, as we read it.
    """
    facts = Table.grid(padding=(0, 2))
    for label, text in _facts(found):
        facts.add_row(label, Text(text))  # as it is: rich would read square brackets as markup
    if target is not None:
        facts.add_row("cost", Text(_cost_note(found, target, step)))
    console.print(facts)
    if verbose:
        console.print_json(data=dict(found.checkpoint.values))


def _facts(found: _Inspection) -> Iterator[tuple[str, str]]:
    """What to know first, each with its name."""
    values, config, served = found.checkpoint.values, found.checkpoint.head, found.served
    model = found.checkpoint.model
    yield "drafter", f"{model}: {config.model_type}, from {_source(read_config(model))}"
    ranked, total = config.num_ranked_tokens, config.vocab_size
    target = verifier_of(values) or "not recorded"
    yield "target", f"{target}: hidden size {config.hidden_size}, vocabulary size {total:,}"
    nodes = f"K {served.num_speculative_tokens}" if found.has_nodes else "K as --spec-tokens says"
    beams = f"{served.beam_width} beams of {served.beam_length} tokens"
    candidates = f", {served.candidates} candidates" if served.candidates else ""
    yield "served with", f"{nodes}, {beams}{candidates}"
    yield "gives", _gives(found)
    size = f"{found.num_parameters:,} parameters in {' and '.join(found.dtypes)}"
    yield "size", f"{size}, {decimal(found.num_bytes)}; a draft reads {decimal(found.draft_bytes)}"
    share = f"{ranked:,} of the target's {total:,} tokens ({ranked / total:.1%})"
    yield "ranks", f"all {total:,} tokens" if config.draft_vocab_size is None else share
    if config.target_layers:
        layers = ", ".join(map(str, config.target_layers))
        yield "reads", f"layers {layers} of the target: vLLM must support EAGLE-3 for its class"
    if config.advice is not None:
        yield "advice", config.advice
    yield "licence", _licence(model) or f"not stated in its {CARD_FILE}"
    yield "training", "--verbose shows it" if values.get("training") else "nothing is recorded"


def _gives(found: _Inspection) -> str:
    """Tokens per target step by the recorded acceptance: 1, and the K most probable nodes."""
    means = [
        f"{1 + sum(sorted(chain(*record.survival))[-found.served.num_speculative_tokens :]):.1f} "
        f"{kind}"
        for kind, record in found.checkpoint.acceptance._asdict().items()
        if record is not None and found.has_nodes
    ]
    if not means:
        return "nothing is recorded: vllm-redrafter evaluate --record measures it"
    return f"tokens per target step, without matches, as evaluate measured: {', '.join(means)}"
