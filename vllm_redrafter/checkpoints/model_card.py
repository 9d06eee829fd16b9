# SPDX-License-Identifier: Apache-2.0
"""The README.md of a trained drafter: what a hub page shows."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from vllm_redrafter.heads.head import HeadConfig

TEXT = """---
{header}
---

# ReDrafter for {target}

A recurrent draft head ([ReDrafter](https://arxiv.org/abs/2403.09919)) that drafts token trees for
`{target}`, and for no other model. With `vllm-redrafter` installed beside vLLM:

```bash
vllm serve PATH_OR_ID_OF_THIS_FOLDER                        # its target with it
vllm serve {target} --spec-model PATH_OR_ID_OF_THIS_FOLDER  # a target that lies elsewhere
```

The output is the target's own, whatever this head drafts: every token is verified.

## What it is

{sizes}

## How good it is

{quality}

## How it was trained

{training}
"""


def model_card(config: HeadConfig, target: str, training: Mapping[str, Any]) -> str:
    """The text of a README.md; `training` is the entry of config.json that `train` writes."""
    result = _part(training, "result")
    quality = "Not measured: no conversation was held out."
    if isinstance(steps := result.get("tokens_per_step"), float):
        shape = ", ".join(f"{k} {v}" for k, v in _part(training, "speculation").items())
        quality = (
            f"{steps:.2f} tokens per target step on held-out conversations ({shape}), "
            "estimated offline by replaying the target's own answers."
        )
    name = target if "/" in target and not target.startswith(("/", ".", "~")) else None
    header = ModelCardData(
        base_model=name,
        library_name="vllm",
        tags=["speculative-decoding", "redrafter", "recurrent-drafter"],
    ).to_yaml()
    text = TEXT.format(
        header=header,
        target=target,
        sizes=_table(asdict(config)),
        quality=quality,
        training="\n\n".join(
            f"{title}:\n\n{_table(part)}" for title, part in _parts(training) if part
        ),
    )
    return str(ModelCard(text))


def _parts(training: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Titles and tables of the training."""
    yield "Settings", _part(training, "settings")
    yield "The drafter that it went on from", _part(training, "initial_drafter")
    yield "The selector's settings", _part(_part(training, "selector"), "settings")
    yield "Data", _part(training, "data")
    listed = training.get("sources")
    sources = [s for s in listed if isinstance(s, Mapping)] if isinstance(listed, list) else []
    for number, source in enumerate(sources, start=1):
        yield f"Data, folder {number} of {len(sources)}", source
    yield "Result", _part(training, "result")


def _part(training: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of the record if it is a table: another program may have written it."""
    part = training.get(name)
    return part if isinstance(part, Mapping) else {}


def _table(values: Mapping[str, Any]) -> str:
    rows = [f"| `{key}` | {value} |" for key, value in values.items() if value not in (None, ())]
    return "\n".join(["| | |", "| --- | --- |", *rows])
