# SPDX-License-Identifier: Apache-2.0
r"""A trained pair at a large model's cost: what its drafts bring where each step takes longer.

    python benchmarks/enlarge.py TARGET DRAFTER OUTPUT
    python benchmarks/throughput.py --model OUTPUT/target --drafter OUTPUT/drafter ...

How much a drafter gains depends on two things: how often it guesses right, which takes a trained
pair, and what steps cost, which takes a large target. This makes a small pair as expensive as a
large one, and leaves what it says as it is: OUTPUT's target has layers, heads and a vocabulary of
Llama-3-8B's sizes, in bf16, and the logits of TARGET's tokens are TARGET's, but for rounding. So
are the drafter's.

It is a means of measuring, and no model: nothing is known that the small target did not know, and
prompts have to be of TARGET's kind. TARGET is a Llama. DRAFTER is a gated head that reads the last
hidden state, or a speculator of MLP or LSTM, which becomes as wide as the large target (4096) and
keeps the levels that it was trained for; with a selector or without.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from enlarge_parts.drafter import enlarge_drafter
from enlarge_parts.target import LLAMA_3_8B, enlarge_target
from shared_parts.arguments import positive, script_parser

from vllm_redrafter import ConfigError

DTYPE = torch.bfloat16


def main(argv: Sequence[str] | None = None) -> None:
    command = script_parser(__doc__, output=None)
    add = command.add_argument
    add("target", type=Path, help="a folder: a Llama with its tokenizer")
    add("drafter", type=Path, help="a folder: its drafter")
    add("output", type=Path, help="a new folder")
    vocabulary = "tokens that the drafter ranks (default 32768; at most the large vocabulary)"
    add("--draft-vocab-size", type=positive, default=32768, help=vocabulary)
    options = command.parse_args(argv)
    if options.output.exists():
        command.error(f"{options.output} exists: name a new folder")
    try:
        targets = enlarge_target(options.target, options.output / "target", LLAMA_3_8B, DTYPE)
        enlarge_drafter(
            options.drafter, options.output / "drafter", targets, options.draft_vocab_size, DTYPE
        )
    except ConfigError as error:
        command.error(str(error))


if __name__ == "__main__":
    main()
