# SPDX-License-Identifier: Apache-2.0
"""How to speculate; what a drafter is, `heads/head.py` says."""

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args

from vllm_redrafter.utils.errors import ConfigError

MAX_NODES = 128
"""The most nodes in a tree, root included: vLLM's own MAX_SPEC_LEN."""

WORD_BITS = 32
"""Bits in a word of an ancestor set."""

TOP_TOKENS = 50
"""Draft logits keep their top 50 before the log-softmax (Apple's `warp_logits`)."""

MOST_MATCHES = 4
"""Prompt-lookup (n-gram) matches per request at most."""

MOST_ANSWERS = 1_000_000
"""Earlier answers that are kept at most."""

LONGEST_PATH = 8
"""Tokens of a match."""

FEWEST_CANDIDATES, USUAL_CANDIDATES, MOST_CANDIDATES = 32, 128, 512
"""Tokens that the nodes of each level choose from: at least, by default, at most."""

TreeKind = Literal["explored", "beams", "chain"]


def require_integers(owner: str, most: float = math.inf, least: int = 1, **values: object) -> None:
    """Raise a ConfigError that begins with `owner` unless all are integers within the limits."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(
                f"{owner}: {name} must be an integer of at least {least}, got {value!r}"
            )
        if value > most:
            raise ConfigError(f"{owner}: {name} must be at most {most}, got {value:.6g}")


def _is_within(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


@dataclass(frozen=True)
class ReDrafterConfig:
    """How to speculate: the part of vLLM's speculative config that is ours.

    Attributes:
        num_speculative_tokens: K, the most tree nodes verified per request and step, the root
            not counted; vLLM's own setting.
        beam_width: W, the beams kept by the search.
        beam_length: L, the tokens drafted per beam.
        tree: `explored` verifies the K most probable nodes that the search visited; `beams`, of
            these, only those on a finished beam (the paper's prefix dedup); `chain`, a single
            path, as vLLM's own methods do, on whichever of its attention backends.
        adaptive: K, W and L are maxima, of which every step uses what pays.
        context_matches: M, prompt-lookup (n-gram) matches beside the drafter's nodes; 0 for none.
        earlier_answers: N, how many of the newest answers of finished requests are searched for
            matches too; 0 for none. Without matches nothing is kept.
        earlier_prompts: their prompts as well.
        candidates: C, how many tokens the nodes of each level below the first choose from, ranked
            for the whole draft at once; 0 ranks the vocabulary at every level.

    ConfigError: a value is out of range; the message names the limit.
    """

    num_speculative_tokens: int
    beam_width: int = 4
    beam_length: int = 5
    tree: TreeKind = "explored"
    adaptive: bool = True
    context_matches: int = 2
    earlier_answers: int = 10_000
    earlier_prompts: bool = False
    candidates: int = 0

    def __post_init__(self) -> None:
        sizes = {"beam_width": self.beam_width, "beam_length": self.beam_length}
        require_integers("speculative config", **sizes)
        fewest = max(FEWEST_CANDIDATES, self.beam_width)
        c, kinds = self.candidates, get_args(TreeKind)
        limits = {
            "num_speculative_tokens": (
                _is_within(self.num_speculative_tokens, 1, MAX_NODES - 1),
                f"between 1 and {MAX_NODES - 1} (tree nodes per request and step, the root not "
                "counted), or leave the speculative config out to decode without speculation",
            ),
            "beam_width": (
                self.beam_width <= TOP_TOKENS,
                f"at most {TOP_TOKENS} (the drafter ranks its {TOP_TOKENS} best tokens per beam)",
            ),
            "beam_length": (self.beam_length < MAX_NODES, f"at most {MAX_NODES - 1}"),
            "tree": (self.tree in kinds, f"one of {', '.join(kinds)}"),
            "context_matches": (
                _is_within(self.context_matches, 0, MOST_MATCHES),
                f"between 0 and {MOST_MATCHES} (prompt-lookup matches; 0 for none)",
            ),
            "earlier_answers": (
                _is_within(self.earlier_answers, 0, MOST_ANSWERS),
                f"between 0 and {MOST_ANSWERS} (answers of finished requests; 0 for none)",
            ),
            "earlier_prompts": (
                isinstance(self.earlier_prompts, bool)
                and self.earlier_prompts <= bool(self.earlier_answers and self.context_matches),
                "true or false, and false without earlier_answers or context_matches",
            ),
            "candidates": (
                _is_within(c, 0, 0) or _is_within(c, fewest, MOST_CANDIDATES),
                f"0, or between {fewest} and {MOST_CANDIDATES} (tokens that the nodes of each "
                "level choose from; 0 ranks the vocabulary at every level)",
            ),
            "adaptive": (isinstance(self.adaptive, bool), "true or false"),
        }
        for name, (is_met, limit) in limits.items():
            if not is_met:
                value = getattr(self, name)
                raise ConfigError(f"speculative config: {name} must be {limit}, got {value!r}")

    @property
    def path_length(self) -> int:
        """D, the tokens of a match."""
        return min(LONGEST_PATH, self.num_speculative_tokens)

    @classmethod
    def own_keys(cls) -> tuple[str, ...]:
        """The keys of a speculative config that are ours and unknown to vLLM."""
        return tuple(f.name for f in fields(cls) if f.name != "num_speculative_tokens")
