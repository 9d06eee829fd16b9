# SPDX-License-Identifier: Apache-2.0
"""The settings of `evaluate`; a new setting is a new field here, and nothing else."""

from dataclasses import dataclass

from vllm_redrafter.config import ReDrafterConfig, TreeKind
from vllm_redrafter.training.training_config import TargetDtype
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.settings import check, setting


@dataclass(frozen=True)
class EvaluationConfig:
    """What an evaluation reads and assumes, in the order of `evaluate --help`."""

    held_out: int | None = setting(
        None,
        "Evaluate only this many conversations. With the --held-out and --seed of train they are "
        "those that the drafter was not trained on.",
        default_text="all",
        panel="Replay",
    )
    seed: int = setting(0, "Seed of the choice that --held-out makes.")
    max_length: int = setting(2048, "Conversations are cut to this many tokens.")
    target_dtype: TargetDtype = setting(
        "auto", "Dtype of the target's parameters; auto takes that of its checkpoint."
    )
    tree: TreeKind = setting(
        "explored",
        "What a step verifies, as the speculative config's tree. Give chain for a target on which "
        "vLLM's log says that chains are verified.",
    )
    draft_cost: float = setting(
        0.02,
        "What a level of beam search is assumed to cost, as a share of a plain decoding step.",
        at_least=0,
    )
    verify_cost: float = setting(
        0.005,
        "What a verified node is assumed to cost, as a share of a plain decoding step.",
        at_least=0,
    )
    stream: int = setting(
        16,
        "Replay matches in blocks of so many rows, in their order: earlier answers are those of "
        "the blocks before.",
        at_least=1,
    )
    trunk: bool = setting(
        False,
        "Replay the fastest shape's length as a chain too, as a drafter of vLLM's own drafts, with "
        "its tokens' runner-ups and with matches.",
    )

    def __post_init__(self) -> None:
        check(self)
        if self.trunk and self.tree == "chain":
            raise ConfigError("--trunk compares trees with a chain; leave --tree out")

    def step_cost(self, shape: ReDrafterConfig) -> float:
        """Of a step of this shape; a plain step costs 1."""
        nodes = shape.num_speculative_tokens
        return 1 + self.draft_cost * min(shape.beam_length, nodes) + self.verify_cost * nodes
