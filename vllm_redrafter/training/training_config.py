# SPDX-License-Identifier: Apache-2.0
"""The settings of `train`; a new setting is a new field here, and nothing else."""

from dataclasses import dataclass
from typing import Literal

from vllm_redrafter.heads.target_layers import AUTO, LAYERS_HELP, parsed_layers
from vllm_redrafter.utils.settings import check, require, setting

HeadName = Literal["recurrent", "gated"]
"""The names in `heads/registry.py`."""
Precision = Literal["auto", "no", "bf16"]
TargetDtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class TrainingConfig:
    """How to train; the order of the fields is that of `train --help`."""

    epochs: int = setting(1, "Read the data this many times.", at_least=1, panel="Optimisation")
    max_steps: int | None = setting(
        None,
        "Stop after this many optimizer steps, however many epochs that makes.",
        at_least=1,
        default_text="as many as --epochs has",
    )
    batch_size: int = setting(
        16, "Blocks in an optimizer step, over all processes; 16 are 32,768 tokens.", at_least=1
    )
    micro_batch_size: int = setting(1, "Number of blocks that a process reads at once.", at_least=1)
    block_length: int = setting(
        2048,
        "Number of tokens in a block. Conversations are packed into blocks; what is longer than a "
        "block is cut.",
    )
    unroll_steps: int = setting(
        5,
        "Number of tokens that the drafter learns to draft ahead: its longest beam to serve.",
        at_least=1,
    )
    kl_weight: float = setting(
        0.5,
        "Share of the target's distribution in what the drafter learns, for sampled requests; the "
        "text's own tokens, for greedy ones, have the rest.",
        at_least=0,
        at_most=1,
    )
    learning_rate: float = setting(
        1e-3, "The highest learning rate. A cosine brings it down to 0 after the warm-up.", above=0
    )
    warmup_steps: int = setting(
        100, "Number of steps in which the learning rate rises to its highest value.", at_least=0
    )
    precision: Precision = setting(
        "auto",
        "Precision of matrix products: bf16, or no for that of the parameters; auto takes bf16 on "
        "GPUs that have it. The drafter's parameters are float32 in any case.",
    )
    target_dtype: TargetDtype = setting(
        "auto", "Dtype of the target's parameters; auto takes that of its checkpoint."
    )
    held_out: int = setting(
        64,
        "Number of conversations that are not trained on. Tokens per target step are estimated "
        "on them.",
        at_least=0,
        panel="Estimates and checkpoints",
    )
    evaluate_every: int = setting(
        200, "Number of steps from one estimate of tokens per target step to the next.", at_least=1
    )
    save_every: int = setting(500, "Number of steps from one checkpoint to the next.", at_least=1)
    seed: int = setting(
        0,
        "Seed of the initial weights, of the order of the text, and of the choice of what is held "
        "out.",
        at_least=0,
    )
    head: HeadName = setting(
        "gated",
        "Which draft head: gated begins as the target's hidden state, and gates what drafted "
        "tokens leave of it; recurrent is Apple's.",
        panel="Draft head",
    )
    exit_dim: int | None = setting(
        None,
        "Width of a recurrent draft head; a gated one is as wide as the target.",
        at_least=1,
        default_text="the target's hidden size",
    )
    num_draft_layers: int | None = setting(
        None,
        "Number of residual blocks in the draft head.",
        at_least=0,
        default_text="0; 1 in a recurrent head",
    )
    draft_vocab_size: int | None = setting(
        None,
        "Rank only this many of the target's tokens, those that the data has most often. The head "
        "gets smaller and faster.",
        at_least=1,
        default_text="all",
    )
    target_layers: str | None = setting(
        None,
        "Let the drafter read the hidden states of these layers of the target, beside the last "
        f"one: {LAYERS_HELP}. vLLM must support EAGLE-3 for the target's class to serve it.",
        default_text=f"{AUTO}; those of --initial-drafter",
    )

    def __post_init__(self) -> None:
        check(self)
        parsed_layers(self.target_layers or AUTO)
        shortest, size = self.unroll_steps + 2, self.micro_batch_size
        long_enough, divides = self.block_length >= shortest, self.batch_size % size == 0
        require(self, "block_length", long_enough, f"at least {shortest}")
        multiple = f"a multiple of --micro-batch-size ({size})"
        require(self, "batch_size", divides, multiple)
