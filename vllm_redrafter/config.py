"""The two configurations: what a drafter checkpoint is, and how to speculate with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from vllm_redrafter.errors import ConfigError

MAX_NODES = 128
"""The most nodes in a tree, root included: vLLM's own MAX_SPEC_LEN."""

WORD_BITS = 32
"""Bits in a word of an ancestor set."""

TOP_TOKENS = 50
"""Draft logits keep their top 50 before the log-softmax (Apple's `warp_logits`)."""

LARGE_DRAFT_VOCABULARY = 65_536
"""From so many ranked tokens on, reading the vocabulary-wide layer is most of a draft."""

TreeKind = Literal["explored", "beams"]


LARGEST_VOCABULARY = 2**31 - 1
"""Token ids are int32."""

WIDEST = 2**20
"""Of hidden_size and exit_dim: far beyond any model, and what a layer is multiplied from fits."""

MOST_LAYERS = 256
"""Of num_draft_layers: far beyond any head, and little to build before it is found missing."""


def _require_positive(owner: str, **values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{owner}: {name} must be an integer of at least 1, got {value!r}")


def _require_at_most(owner: str, most: int, **values: int) -> None:
    for name, value in values.items():
        if value > most:
            raise ConfigError(f"{owner}: {name} must be at most {most}, got {value:.6g}")


@dataclass(frozen=True)
class DrafterConfig:
    """What a drafter checkpoint is: the sizes of its layers.

    Field names are those of Apple's config.json. `num_lookback_tokens` is recorded by Apple's
    training code and read by nothing.

    `draft_vocab_size` is ours: the drafter ranks only so many of the target's tokens, those that
    the checkpoint's `d2t` lists; None ranks them all.

    Raises:
        ConfigError: a size is below 1, absurdly large or not an integer, or the draft vocabulary
            the larger one.
    """

    vocab_size: int
    hidden_size: int
    exit_dim: int
    num_draft_layers: int = 1
    rnn: bool = True
    num_lookback_tokens: int = -1
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        _require_positive(
            "drafter config.json",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            exit_dim=self.exit_dim,
        )
        layers = self.num_draft_layers
        if isinstance(layers, bool) or not isinstance(layers, int) or layers < 0:
            raise ConfigError(
                "drafter config.json: num_draft_layers must be an integer of at least 0, "
                f"got {self.num_draft_layers!r}"
            )
        _require_at_most("drafter config.json", LARGEST_VOCABULARY, vocab_size=self.vocab_size)
        _require_at_most(
            "drafter config.json", WIDEST, hidden_size=self.hidden_size, exit_dim=self.exit_dim
        )
        _require_at_most("drafter config.json", MOST_LAYERS, num_draft_layers=layers)
        lookback = self.num_lookback_tokens
        if isinstance(lookback, bool) or not isinstance(lookback, int):
            raise ConfigError(
                f"drafter config.json: num_lookback_tokens must be an integer, got {lookback!r}"
            )
        if not isinstance(self.rnn, bool):
            raise ConfigError(f"drafter config.json: rnn must be true or false, got {self.rnn!r}")
        if self.draft_vocab_size is not None:
            _require_positive("drafter config.json", draft_vocab_size=self.draft_vocab_size)
            if self.draft_vocab_size > self.vocab_size:
                raise ConfigError(
                    f"drafter config.json: draft_vocab_size {self.draft_vocab_size} exceeds "
                    f"vocab_size {self.vocab_size}; leave it out to rank all tokens"
                )

    @property
    def num_ranked_tokens(self) -> int:
        """Rows of the vocabulary-wide layer."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def advice(self) -> str | None:
        """What would make drafts cheaper, in a sentence; None where nothing stands out."""
        if self.num_ranked_tokens < LARGE_DRAFT_VOCABULARY:
            return None
        return (
            f"the drafter ranks {self.num_ranked_tokens:,} tokens, and each level of a draft reads "
            "a row of weights for every one of them; one that is trained with --draft-vocab-size "
            "32768 drafts at a fraction of the cost"
        )

    @property
    def has_input_projection(self) -> bool:
        """`input_proj` exists only where [h ; s] (2H wide) does not fit the head as it is."""
        return self.exit_dim != 2 * self.hidden_size

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DrafterConfig:
        """Read a config.json; keys that are not the drafter's (transformers' own) are ignored.

        Raises:
            ConfigError: a size is missing or invalid.
        """
        known = {field.name for field in fields(cls)}
        required = ("vocab_size", "hidden_size", "exit_dim")
        if missing := [name for name in required if name not in values]:
            raise ConfigError(
                f"drafter config.json lacks {', '.join(missing)}: is this a ReDrafter checkpoint?"
            )
        # A config.json without this entry was written when drafters had no RNN; Apple's own code
        # reads it so, too.
        present = {"rnn": False} | dict(values)
        return cls(**{name: value for name, value in present.items() if name in known})


@dataclass(frozen=True)
class ReDrafterConfig:
    """How to speculate: the part of vLLM's speculative config that is ours.

    Attributes:
        num_speculative_tokens: K, the most tree nodes verified per request and step, the root
            not counted; vLLM's own setting.
        beam_width: W, the beams kept by the search.
        beam_length: L, the tokens drafted per beam.
        tree: `explored` verifies the K most probable nodes that the search visited; `beams`
            only those on a finished beam (the paper's prefix dedup).
        adaptive: K, W and L are maxima: every step verifies as many nodes of the whole batch as
            pay, and drafts only where drafting pays. Without it, they hold at every step.

    Raises:
        ConfigError: a value is out of range; the message names the limit.
    """

    num_speculative_tokens: int
    beam_width: int = 4
    beam_length: int = 5
    tree: TreeKind = "explored"
    adaptive: bool = True

    def __post_init__(self) -> None:
        _require_positive("speculative config", beam_width=self.beam_width)
        _require_positive("speculative config", beam_length=self.beam_length)
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
        if not isinstance(self.adaptive, bool):
            raise ConfigError(
                f"speculative config: adaptive must be true or false, got {self.adaptive!r}"
            )

    @property
    def max_explored(self) -> int:
        """Nodes that a beam search of this shape visits: at most W on each of L levels."""
        return self.beam_width * self.beam_length

    @classmethod
    def own_keys(cls) -> tuple[str, ...]:
        """The keys of a speculative config that are ours and unknown to vLLM."""
        return tuple(f.name for f in fields(cls) if f.name != "num_speculative_tokens")
