r"""A trained pair at a large model's cost: what its drafts bring where each step takes longer.

    python benchmarks/enlarge.py TARGET DRAFTER OUTPUT --shape llama-3-8b
    python benchmarks/throughput.py --model OUTPUT/target --drafter OUTPUT/drafter ...

How much a drafter gains depends on two things: how often it guesses right, which takes a trained
pair, and what steps cost, which takes a large target. step_cost.py knows the second alone, with
random weights. This makes a small pair as expensive as a large one, and leaves what it says as it
is: OUTPUT's target has layers, heads and a vocabulary of the named model's sizes, and the logits of
TARGET's tokens are TARGET's, but for rounding. So are the drafter's.

It is a means of measuring, and no model: nothing is known that the small target did not know, and
prompts have to be of TARGET's kind. TARGET is a Llama, DRAFTER a gated head, with a selector or
without, that reads the last hidden state.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from enlarge_parts.drafter import enlarge_drafter
from enlarge_parts.target import EnlargeError, enlarge_target
from shared_parts.arguments import positive, script_parser
from step_cost_parts.jobs import SHAPES

from vllm_redrafter import ConfigError


def parser() -> argparse.ArgumentParser:
    made = script_parser(__doc__)
    add = made.add_argument
    add("target", type=Path, help="a folder: a Llama with its tokenizer")
    add("drafter", type=Path, help="a folder: its drafter")
    add("output", type=Path, help="a new folder")
    add("--shape", choices=SHAPES, default="llama-3-8b", help="(default llama-3-8b)")
    vocabulary = "tokens that the drafter ranks (default 32768; at most the shape's vocabulary)"
    add("--draft-vocab-size", type=positive, default=32768, help=vocabulary)
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="(default bfloat16)")
    return made


def main(argv: Sequence[str] | None = None) -> None:
    command = parser()
    options = command.parse_args(argv)
    import torch

    if options.output.exists():
        command.error(f"{options.output} exists: name a new folder")
    dtype, shape = getattr(torch, options.dtype), SHAPES[options.shape]
    try:
        target = enlarge_target(options.target, options.output / "target", shape, dtype)
        enlarge_drafter(
            options.drafter, options.output / "drafter", target, options.draft_vocab_size, dtype
        )
    except (EnlargeError, ConfigError) as error:
        command.error(str(error))


if __name__ == "__main__":
    main()
