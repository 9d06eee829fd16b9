# SPDX-License-Identifier: Apache-2.0
"""`vllm-redrafter inspect`: what a checkpoint is, and for which targets, without its weights."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from huggingface_hub import ModelCard
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from vllm_redrafter.checkpoints.draft_cost import parameters_read
from vllm_redrafter.checkpoints.drafter_files import CARD_FILE, read_config, resolve_file
from vllm_redrafter.checkpoints.reading import Checkpoint, verifier_of
from vllm_redrafter.checkpoints.speculation import NODES, speculation
from vllm_redrafter.checkpoints.tensors import DRAFT_TO_TARGET
from vllm_redrafter.checkpoints.weight_files import read_weights
from vllm_redrafter.heads.head import HeadConfig
from vllm_redrafter.utils.errors import ConfigError, one_line
from vllm_redrafter.utils.hub import check_within_reach

EXPENSIVE = 0.5
"""A draft that reads this share of what a step of the target does is warned of."""


@dataclass(frozen=True)
class _Inspection:
    """What a checkpoint is; `verifier` is its target, and `training` the record of `train`.

    `d2t` is none of the parameters, which training sets. `source` is the form that it is in,
    `licence` what its README.md states, `levels` what it is served with.
    """

    checkpoint: str
    config: HeadConfig
    dtypes: list[str]
    num_parameters: int
    num_bytes: int
    verifier: str | None
    training: Any
    source: str
    licence: str | None
    levels: int

    @property
    def _draft_bytes(self) -> int:
        """What a draft of `levels` reads."""
        each = self.num_bytes / max(self.num_parameters, 1)
        return round(each * parameters_read(self.config, self.levels))


def inspect_checkpoint(model: str) -> _Inspection:
    """Read and check what a checkpoint says of itself."""
    found = Checkpoint.open(model).checked()
    tensors = read_weights(found.weights)
    parameters = [tensor for name, tensor in tensors.items() if name != DRAFT_TO_TARGET]
    return _Inspection(
        model,
        found.head,
        sorted({str(tensor.dtype).removeprefix("torch.") for tensor in parameters}),
        num_parameters=sum(tensor.numel() for tensor in parameters),
        num_bytes=sum(tensor.nbytes for tensor in tensors.values()),
        verifier=verifier_of(found.values),
        training=found.values.get("training"),
        source=_source(read_config(model)),
        licence=_licence(model),
        levels=speculation(found, {NODES: 1}).beam_length,
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


def target_of(target: str) -> Any:
    """A target's transformers configuration, by folder or hub id."""
    from transformers import AutoConfig

    check_within_reach(target, "target")
    try:
        # Explicitly: otherwise it asks, in a terminal, whether to run code of the target's.
        return AutoConfig.from_pretrained(target, trust_remote_code=False)
    except Exception as error:  # with odd sizes in the file it may be any: ZeroDivisionError, say
        raise ConfigError(
            f"target {target!r}: transformers cannot read its config.json; give a folder in "
            f"Hugging Face format, or a hub id: {one_line(error) or type(error).__name__}"
        ) from error


def _cost_note(found: _Inspection, target: str, step: int | None) -> str:
    """What a draft costs beside a step of a target that uses so many bytes of its weights."""
    if step is None:
        return f"what a step of {target} reads is not known: transformers cannot make its model"
    share = found._draft_bytes / step
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
    console: Console, found: _Inspection, target: str | None = None, step: int | None = None
) -> None:
    """Show it to a reader; `step` are the bytes that a step of the target reads, if known."""
    config, training = found.config, found.training
    dtypes, size = " and ".join(found.dtypes), decimal(found.num_bytes)
    size = f"{found.num_parameters:,} parameters in {dtypes}, {size}"
    _say(console, f"{found.checkpoint}: a ReDrafter drafter of {size}")
    licence = found.licence or "not stated in its README.md"
    _say(console, f"family {config.model_type}, from {found.source}; licence: {licence}")
    _say(console, f"a draft of {found.levels} tokens reads {decimal(found._draft_bytes)}")
    if target is not None:
        _say(console, _cost_note(found, target, step))
    console.print(_size_table(config))
    for line in _notes(config):
        _say(console, line)
    _say(
        console,
        f"targets: hidden size {config.hidden_size}, vocabulary size {config.vocab_size}; trained "
        f"for {found.verifier or 'a target that is not recorded'}",
    )
    if isinstance(training, Mapping) and training:
        console.print(_training_table(training))
    else:
        _say(console, f"training: {training or 'nothing is recorded'}")


def _notes(config: HeadConfig) -> Iterator[str]:
    ranked, total = config.num_ranked_tokens, config.vocab_size
    if config.draft_vocab_size is None:
        yield f"draft vocabulary: all {total:,} tokens"
    else:
        share = f"{ranked:,} of the target's {total:,} tokens ({ranked / total:.1%})"
        yield f"draft vocabulary: {share}, d2t"
    if config.target_layers:
        yield (
            f"reads layers {', '.join(map(str, config.target_layers))} of the target beside its "
            "last hidden state: vLLM must support EAGLE-3 for the target's class"
        )
    if depths := config.selected_depths:
        yield (
            f"selects candidates for {depths} depths below the root: a draft of at most "
            f"{1 + depths} tokens reads the vocabulary-wide layer once"
        )
    if config.advice is not None:
        yield f"advice: {config.advice}"


def _say(console: Console, text: str) -> None:
    """Print text as it is: rich would read square brackets in a checkpoint's name as markup."""
    console.print(Text(text))


def _size_table(config: HeadConfig) -> Table:
    table = Table(title="sizes", title_justify="left", show_header=False)
    for key, value in asdict(config).items():
        if value not in (None, ()):
            table.add_row(key, json.dumps(value))
    return table


def _training_table(training: Mapping[str, Any]) -> Table:
    """A section for each of the record's parts: settings, speculation, data, result."""
    table = Table(title="training", title_justify="left", show_header=False)
    for part, values in training.items():
        rows = values if isinstance(values, Mapping) else {"": values}
        for index, (key, value) in enumerate(rows.items()):
            text = value if isinstance(value, str) else json.dumps(value)
            table.add_row(Text(part if index == 0 else ""), Text(key), Text(text))
        table.add_section()
    return table
