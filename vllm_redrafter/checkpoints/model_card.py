"""The README.md of a trained drafter: what a hub page shows."""

from __future__ import annotations

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
    """The text of a README.md.

    Args:
        config: the drafter's sizes.
        target: the target's name.
        training: the `training` entry of the checkpoint's config.json, as `train` records it.
    """
    result: Mapping[str, Any] = training.get("result", {})
    quality = "Not measured: no conversation was held out."
    if steps := result.get("tokens_per_step"):
        shape = ", ".join(f"{k} {v}" for k, v in training.get("speculation", {}).items())
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
    """What is known of the training: titles and tables."""
    yield "Settings", training.get("settings", {})
    yield "The drafter that it went on from", training.get("initial_drafter", {})
    yield "The selector's settings", training.get("selector", {}).get("settings", {})
    yield "Data", training.get("data", {})
    sources = training.get("sources", [])
    for number, source in enumerate(sources, start=1):
        yield f"Data, folder {number} of {len(sources)}", source
    yield "Result", training.get("result", {})


def _table(values: Mapping[str, Any]) -> str:
    rows = [f"| `{key}` | {value} |" for key, value in values.items() if value not in (None, ())]
    return "\n".join(["| | |", "| --- | --- |", *rows])
