r"""What to learn from: the target's distribution or a text's tokens, the target's text or another.

    python benchmarks/distillation.py

Trains drafters of the demo's target with several seeds, each way of training on the same prompts
for the same number of steps, and measures tokens per target step on held-out prompts: how the
target itself continues them, replayed (`vllm_redrafter/training/estimate.py`). The paper's
section 4.4 reports about 10 % more for distillation.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.table import Table
from shared_parts import machine, results
from shared_parts.arguments import script_parser
from transformers import AutoTokenizer

from vllm_redrafter.cli.demo import train_small as demo
from vllm_redrafter.cli.demo.cache import default_cache_dir
from vllm_redrafter.cli.demo.corpus import standard_library_sources
from vllm_redrafter.cli.demo.target import TargetSettings
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.data.rows import ListRows, TextRow, TextRows
from vllm_redrafter.data.source import read_all, split
from vllm_redrafter.training.choices import Initialisation, LossKind
from vllm_redrafter.training.initialisation import most_used_tokens, new_drafter
from vllm_redrafter.training.target import load_target
from vllm_redrafter.training.trainer import Trainer, make_accelerator
from vllm_redrafter.training.training_config import TrainingConfig

TARGET = TargetSettings(num_steps=200)
# Written out, so that the comparison does not change with the demo.
NUM_PROMPTS = 864
"""The demo's own are less, so that it takes few minutes; 64 of these are held out."""


@dataclass(frozen=True)
class Recipe:
    """One way of training."""

    name: str
    text: str
    loss: LossKind
    init: Initialisation = "lm_head"
    draft_vocab_size: int | None = None


RECIPES = (
    Recipe("cross-entropy, original text", "original", "ce"),
    Recipe("cross-entropy, target's text", "target", "ce"),
    Recipe("KL, original text", "original", "kl"),
    Recipe("KL, target's text", "target", "kl"),
    Recipe("half of each, target's text", "target", "mix"),
    Recipe("KL, target's text, random head", "target", "kl", init="random"),
    Recipe("KL, target's text, half the vocabulary", "target", "kl", draft_vocab_size=160),
)


def original_rows(rows: TextRows, tokenizer: Any, sources: Sequence[str]) -> ListRows:
    """The same prompts with the source text's own continuation, as long as the target's."""
    found = []
    for index in range(len(rows)):
        row = rows[index]
        start = int(row.generated.int().argmax())
        prompt = tokenizer.decode(row.tokens[:start], skip_special_tokens=True)
        source = next(text for text in sources if prompt in text)
        place = source.index(prompt) + len(prompt)
        # A token is at least one character: enough of them, whatever they are.
        text = source[place : place + 16 * len(row.tokens)]
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        found.append(
            TextRow.from_answer(row.tokens[:start].tolist(), ids[: len(row.tokens) - start])
        )
    return ListRows(found)


def train(
    recipe: Recipe,
    seed: int,
    target: Any,
    rows: TextRows,
    held_out: TextRows,
    config: TrainingConfig,
    accelerator: Accelerator,
    console: Console,
) -> float:
    """Tokens per target step of one trained drafter."""
    config = replace(config, loss=recipe.loss, init=recipe.init, seed=seed)
    kept = None
    if recipe.draft_vocab_size:
        kept, _ = most_used_tokens(rows, target.config.vocab_size, recipe.draft_vocab_size)
    drafter = new_drafter(target, config, kept)
    speculation: ReDrafterConfig = demo.SPECULATION
    trainer = Trainer(
        drafter, target, rows, held_out, config, speculation, accelerator, console=console
    )
    return trainer.run().acceptance.tokens_per_step


def main() -> None:
    parser = script_parser(__doc__)
    cache_dir = default_cache_dir().with_name("distillation")
    parser.add_argument("--cache-dir", type=Path, default=cache_dir)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--max-steps", type=int, default=360)
    parser.add_argument("--output", type=Path, help="JSON with all figures")
    arguments = parser.parse_args()
    console = Console()

    space = demo.workspace(arguments.cache_dir, training=TARGET)
    space = replace(space, num_prompts=NUM_PROMPTS)
    demo.make_demo_target(space, console, TARGET)
    demo.make_data(space, console)
    steps = arguments.max_steps
    config = replace(demo.DRAFTER_TRAINING, max_steps=steps, evaluate_every=10 * steps)
    written = read_all((space.data,), str(space.target))
    data = split(written, config.held_out, config.seed, config.block_length)
    target = load_target(space.target)
    tokenizer = AutoTokenizer.from_pretrained(space.target)
    originals = original_rows(data.rows, tokenizer, standard_library_sources())
    texts: dict[str, TextRows] = {"target": data.rows, "original": originals}

    accelerator = make_accelerator(config)
    figures: dict[str, list[float]] = {recipe.name: [] for recipe in RECIPES}
    for seed in range(arguments.seeds):
        for recipe in RECIPES:
            console.print(f"seed {seed}: {recipe.name}")
            value = train(
                recipe,
                seed,
                target,
                texts[recipe.text],
                data.held_out,
                config,
                accelerator,
                console,
            )
            figures[recipe.name].append(value)
    report(console, figures)
    record = {
        **machine.describe(gpu=None),
        "training": asdict(config),
        "speculation": asdict(demo.SPECULATION),
        "torch": torch.__version__,
        "tokens_per_step": figures,
    }
    results.write(arguments.output, record)


def report(console: Console, figures: dict[str, list[float]]) -> None:
    """A table; ratios are to the first recipe, seed by seed."""
    baseline = figures[RECIPES[0].name]
    table = Table(title="Tokens per target step on held-out prompts")
    for column in ("training", "mean (lowest–highest)", "over the first"):
        table.add_column(column)
    for name, values in figures.items():
        gains = [value / first - 1 for value, first in zip(values, baseline, strict=True)]
        table.add_row(
            name,
            f"{statistics.mean(values):.2f} ({min(values):.2f}–{max(values):.2f})",
            f"{statistics.mean(gains):+.0%} ({min(gains):+.0%} to {max(gains):+.0%})",
        )
    console.print(table)


if __name__ == "__main__":
    main()
