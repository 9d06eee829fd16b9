# SPDX-License-Identifier: Apache-2.0
"""How to speculate; what a drafter is, `heads/head.py` says."""

from __future__ import annotations

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

LONGEST_PATH = 8
"""Tokens of a match."""

FEWEST_CANDIDATES, USUAL_CANDIDATES, MOST_CANDIDATES = 32, 128, 512
"""Tokens that the nodes of each level choose from: at least, by default, at most."""

TreeKind = Literal["explored", "beams", "chain"]


def require_positive(owner: str, **values: int) -> None:
    """Raise a ConfigError that begins with `owner` unless all are integers of at least 1."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{owner}: {name} must be an integer of at least 1, got {value!r}")


def require_at_most(owner: str, most: int, **values: int) -> None:
    """Raise a ConfigError that begins with `owner` unless none is more than `most`."""
    for name, value in values.items():
        if value > most:
            raise ConfigError(f"{owner}: {name} must be at most {most}, got {value:.6g}")


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
        candidates: C, how many tokens the nodes of each level below the first choose from, ranked
            for the whole draft at once; 0 ranks the vocabulary at every level.

    Raises:
        ConfigError: a value is out of range; the message names the limit.
    """

    num_speculative_tokens: int
    beam_width: int = 4
    beam_length: int = 5
    tree: TreeKind = "explored"
    adaptive: bool = True
    context_matches: int = 2
    candidates: int = 0

    def __post_init__(self) -> None:
        require_positive(
            "speculative config", beam_width=self.beam_width, beam_length=self.beam_length
        )
        k = self.num_speculative_tokens
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k < MAX_NODES:
            raise ConfigError(
                f"speculative config: num_speculative_tokens must be between 1 and {MAX_NODES - 1} "
                f"(tree nodes per request and step, the root not counted), got {k!r}; "
                "to decode without speculation, leave the speculative config out"
            )
        if self.beam_width > TOP_TOKENS:
            raise ConfigError(
                f"speculative config: beam_width must be at most {TOP_TOKENS} (the drafter ranks "
                f"its {TOP_TOKENS} best tokens per beam), got {self.beam_width}"
            )
        if self.beam_length >= MAX_NODES:
            raise ConfigError(
                f"speculative config: beam_length must be at most {MAX_NODES - 1}, "
                f"got {self.beam_length}"
            )
        if self.tree not in get_args(TreeKind):
            raise ConfigError(
                f"speculative config: tree must be one of {', '.join(get_args(TreeKind))}, "
                f"got {self.tree!r}"
            )
        m = self.context_matches
        if isinstance(m, bool) or not isinstance(m, int) or not 0 <= m <= MOST_MATCHES:
            raise ConfigError(
                f"speculative config: context_matches must be between 0 and {MOST_MATCHES} "
                f"(continuations found in a request's own text; 0 for none), got {m!r}"
            )
        c, fewest = self.candidates, max(FEWEST_CANDIDATES, self.beam_width)
        is_number = isinstance(c, int) and not isinstance(c, bool)
        if not is_number or (c and not fewest <= c <= MOST_CANDIDATES):
            raise ConfigError(
                f"speculative config: candidates must be 0, or between {fewest} and "
                f"{MOST_CANDIDATES} (tokens that the nodes of each level choose from; 0 ranks the "
                f"vocabulary at every level), got {c!r}"
            )
        if not isinstance(self.adaptive, bool):
            raise ConfigError(
                f"speculative config: adaptive must be true or false, got {self.adaptive!r}"
            )

    @property
    def path_length(self) -> int:
        """D, the tokens of a continuation found in the text."""
        return min(LONGEST_PATH, self.num_speculative_tokens)

    @property
    def max_explored(self) -> int:
        """Nodes that a beam search of this shape visits: at most W on each of L levels."""
        return self.beam_width * self.beam_length

    @classmethod
    def own_keys(cls) -> tuple[str, ...]:
        """The keys of a speculative config that are ours and unknown to vLLM."""
        return tuple(f.name for f in fields(cls) if f.name != "num_speculative_tokens")
