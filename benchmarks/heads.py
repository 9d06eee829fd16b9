# SPDX-License-Identifier: Apache-2.0
r"""Which draft head guesses best, trained on the same text for the same steps?

    python benchmarks/heads.py TARGET --data greedy --measure sampled --runs RUNS --output OUT.json

Each head is trained with each seed on what the target wrote (`generate-data`), and its drafts are
replayed on conversations that it has not seen: those held out of --data, and those of --measure. A
run that RUNS has is not made again, so the same command goes on where it was stopped; the table has
all that is there.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from heads_parts.report import table
from heads_parts.texts import read_texts
from heads_parts.training import VARIANTS, Material, Variant, run
from shared_parts import machine, results
from shared_parts.arguments import integer, positive, script_parser, shape_text, tree_shape

from vllm_redrafter.data.rows import ListRows
from vllm_redrafter.data.target import Target
from vllm_redrafter.heads.target_layers import AUTO, layers_of
from vllm_redrafter.replay.target import load_ends, load_target
from vllm_redrafter.training.processes import make_accelerator
from vllm_redrafter.training.training_config import TrainingConfig

SHAPES = ["4x4:4", "4x4:8", "4x4:16", "8x4:32"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = script_parser(__doc__)
    add = parser.add_argument
    add("target", help="folder or hub id")
    add("--data", type=Path, required=True, help="to learn from, and to measure on")
    add("--measure", type=Path, action="append", default=[], help="to measure on")
    add("--runs", type=Path, required=True, help="folder of the runs' figures")
    add("--conversations", type=positive, default=256, help="rows of --data")
    add("--held-out", type=positive, default=40, help="rows of each text")
    add("--head", action="append", choices=[v.name for v in VARIANTS])
    add("--seeds", type=integer(0), default=1, help="0: no further run")
    add("--shape", action="append", type=tree_shape, help=f"default: {SHAPES}")
    add("--target-layers", default=AUTO, help="of fused heads")
    add("--draft-vocab-size", type=positive, default=4096)
    add("--epochs", type=positive, default=2)
    unroll = "how far heads learn to draft (default 4)"
    add("--unroll-steps", type=positive, default=4, help=unroll)
    options = parser.parse_args(arguments)
    variants = [v for v in VARIANTS if options.head is None or v.name in options.head]
    options.runs.mkdir(parents=True, exist_ok=True)
    material = read_material(options)
    for seed in range(options.seeds):
        config = TrainingConfig(**training_settings(options), seed=seed)
        for variant in variants:
            make_run(variant, config, material, options)
    report(variants, material, options)
    return 0


def training_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Those of the recipe of SmolLM2's drafter, with as many warm-up steps as few steps allow."""
    return {
        "epochs": options.epochs,
        "batch_size": 2,
        "micro_batch_size": 2,
        "block_length": 288,
        "unroll_steps": options.unroll_steps,
        "learning_rate": 2e-3,
        "warmup_steps": 20,
        "draft_vocab_size": options.draft_vocab_size,
        "held_out": options.held_out,
    }


def read_material(options: argparse.Namespace) -> Material:
    target = Target.open(options.target)
    number = target.text_config.num_hidden_layers
    layers = layers_of(options.target_layers, number)
    length = training_settings(options)["block_length"]

    model = load_target(target)

    def read(folder: Path, number: int) -> tuple[str, ListRows]:
        return read_texts(target, model, folder, number, layers, length)

    name, rows = read(options.data, options.conversations)
    measured = {name: ListRows(rows[: options.held_out])}
    for folder in options.measure:
        name, others = read(folder, options.held_out)
        measured[f"{name}, text {len(measured) + 1}" if name in measured else name] = others
    return Material(
        target=load_ends(target),
        learnt=ListRows(rows[options.held_out :]),
        measured=measured,
        layers=layers,
        shapes=options.shape or [*map(tree_shape, SHAPES)],
        accelerator=make_accelerator("no"),
    )


def make_run(
    variant: Variant, config: TrainingConfig, material: Material, options: argparse.Namespace
) -> None:
    """Make a run, unless the folder has it."""
    about = {"head": variant.name, "seed": config.seed}
    path = options.runs / ("-".join(map(str, about.values())).replace(" ", "_") + ".json")
    if path.exists():
        return
    figures = run(variant, config, material)
    about |= {"learnt_rows": len(material.learnt), "settings": asdict(config)}
    results.write(path, {**machine.describe(gpu=None), **about, **figures})
    print(path.name, f"{figures['seconds']:.0f} s", flush=True)


def report(variants: Sequence[Variant], material: Material, options: argparse.Namespace) -> None:
    """The table of all runs of these heads, and the files."""
    runs = [json.loads(path.read_text()) for path in sorted(options.runs.glob("*.json"))]
    order = [variant.name for variant in variants]
    runs = sorted((r for r in runs if r["head"] in order), key=lambda r: order.index(r["head"]))
    results.wide_console().print(table(runs))
    record = {
        **machine.describe(gpu=None),
        "shapes": [shape_text(shape) for shape in material.shapes],
        "target_layers": list(material.layers),
        "runs": runs,
    }
    results.write(options.output, record)


if __name__ == "__main__":
    raise SystemExit(main())
