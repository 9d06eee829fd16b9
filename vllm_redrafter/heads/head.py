# SPDX-License-Identifier: Apache-2.0
"""What a draft head is: all that search, engines and training know of it.

A search goes from the root down a tree. At each node it asks the head for the tokens that may
follow:

    c = condition(h)                    once per draft, from the target's hidden states
    s = start(c, e(root))               the root's state
    z = logits(c, s, depth)             the next draft token's, at a node
    s' = advance(s, e(token), depth)    the state of a child

with e the target's own input embedding, or what `embedding_of` gives instead; the root's depth is
0, and weights may be by depth. Where a head has a selector (`selector.py`), nodes below
the root rank the root's candidates instead: the vocabulary-wide layer is read once per draft.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from vllm_redrafter.config import require_integers
from vllm_redrafter.heads.fusion import FuseLayer, fused
from vllm_redrafter.heads.selector import Selector, SelectorConfig
from vllm_redrafter.heads.shortlist import Shortlist
from vllm_redrafter.heads.target_layers import checked_layers
from vllm_redrafter.utils.errors import ConfigError

if TYPE_CHECKING:
    from vllm_redrafter.heads.fused_head import FusedHead

LARGEST_VOCABULARY = 2**31 - 1
"""Token ids are int32."""

WIDEST = 2**20
"""Of a layer: far beyond any model."""

LARGE_DRAFT_VOCABULARY = 65_536
"""From here on, reading the vocabulary-wide layer dominates a draft."""

MOST_LAYERS = 256
"""Of num_draft_layers: far beyond any head."""

OWNER = "drafter config.json"

Product = Callable[[Tensor], Tensor]
"""x [..., in] -> x W^T + b [..., out]."""

Pack = Callable[[Tensor, Tensor | None], Product]
"""From a weight [out, in] and a bias [out] or None to their product, as a device does it best."""


@dataclass(frozen=True)
class HeadConfig:
    """A head's kind and sizes, as a checkpoint's config.json has them; impossible ones are refused.

    Attributes:
        vocab_size, hidden_size: V and H, of the target.
        draft_vocab_size: the head ranks only so many of the target's tokens, those that the
            checkpoint's `d2t` lists; None ranks them all.
        target_layers: whose outputs the head reads beside the last hidden state; ascending.
        selector: the sizes of its selector, if it has one.
    """

    model_type: ClassVar[str]

    vocab_size: int
    hidden_size: int
    draft_vocab_size: int | None = field(default=None, kw_only=True)
    target_layers: tuple[int, ...] = field(default=(), kw_only=True)
    selector: SelectorConfig | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        layers = checked_layers(self.target_layers, f"{OWNER}: target_layers")
        object.__setattr__(self, "target_layers", layers)
        object.__setattr__(self, "selector", _selector_config(self.selector))
        require_integers(OWNER, LARGEST_VOCABULARY, vocab_size=self.vocab_size)
        require_integers(OWNER, WIDEST, hidden_size=self.hidden_size)
        if self.draft_vocab_size is not None:
            require_integers(OWNER, draft_vocab_size=self.draft_vocab_size)
            if self.draft_vocab_size > self.vocab_size:
                raise ConfigError(
                    f"{OWNER}: draft_vocab_size {self.draft_vocab_size} exceeds "
                    f"vocab_size {self.vocab_size}; leave it out to rank all tokens"
                )

    @property
    def num_ranked_tokens(self) -> int:
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def hidden_width(self) -> int:
        """(1 + n) H, what the head reads of the target with n layers."""
        return (1 + len(self.target_layers)) * self.hidden_size

    @property
    def max_beam_length(self) -> int | None:
        """The most tokens that the head can draft in a row; None where there is no limit."""
        return None

    @property
    def feature_width(self) -> int:
        """E, the numbers that the vocabulary-wide layer reads."""
        return self.hidden_size

    @property
    def selected_depths(self) -> int:
        """Depths below the root that the selector has candidates for."""
        return 0 if self.selector is None else self.selector.depths

    def require_beam_length(self, owner: str, beam_length: int, candidates: int = 0) -> None:
        """Refuse drafts, or drafts among candidates, that are longer than this head can make."""
        if (most := self.max_beam_length) is not None and beam_length > most:
            raise ConfigError(
                f"{owner}: beam_length {beam_length} exceeds the {most} tokens that this drafter "
                f"can draft in a row; ask for {most} or less"
            )
        if not candidates or beam_length <= 1 + self.selected_depths:
            return
        if not self.selected_depths:
            raise ConfigError(
                f"{owner}: candidates {candidates}, and this drafter has no selector: add one with "
                "`vllm-redrafter train --add-selector`, or leave candidates out"
            )
        raise ConfigError(
            f"{owner}: beam_length {beam_length} exceeds the {1 + self.selected_depths} tokens "
            "that this drafter's selector has candidates for; ask for that or less, or for "
            "candidates 0, which ranks the vocabulary at every level"
        )

    @property
    def advice(self) -> str | None:
        """What would make drafts cheaper, in a sentence; None where nothing stands out."""
        if self.num_ranked_tokens < LARGE_DRAFT_VOCABULARY or self.selected_depths:
            return None
        return (
            f"the drafter ranks {self.num_ranked_tokens:,} tokens, and each level of a draft reads "
            "a row of weights for every one of them; one that is trained with --draft-vocab-size "
            "32768 drafts at a fraction of the cost; so does one with a selector (train "
            "--add-selector)"
        )

    @classmethod
    def of_target(cls, vocab_size: int, hidden_size: int, **options: Any) -> Self:
        """The sizes of a new head for a target; `options` are further fields, None for defaults."""
        given = {name: value for name, value in options.items() if value is not None}
        if unknown := sorted(given.keys() - {f.name for f in fields(cls)}):
            raise ConfigError(
                f"{', '.join(unknown)}: a {cls.model_type} head has no such size; leave it out"
            )
        return cls(vocab_size=vocab_size, hidden_size=hidden_size, **given)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Read a config.json; keys that are not the head's (transformers' own) are ignored."""
        known = fields(cls)
        required = [f.name for f in known if f.default is MISSING and f.default_factory is MISSING]
        if missing := [name for name in required if name not in values]:
            raise ConfigError(
                f"{OWNER} lacks {', '.join(missing)}: is this a ReDrafter checkpoint?"
            )
        names = {f.name for f in known}
        return cls(**{name: value for name, value in values.items() if name in names})


def _selector_config(value: Any) -> SelectorConfig | None:
    """Of an entry of config.json, or None."""
    if value is None or isinstance(value, SelectorConfig):
        return value
    if not isinstance(value, Mapping) or set(value) != {"depths", "rank"}:
        raise ConfigError(
            f"{OWNER}: selector must be an object with depths and rank, got {value!r}"
        )
    return SelectorConfig(**value)


class SearchHead(Protocol):
    """What a search needs of a head."""

    config: HeadConfig

    def embedding_of(self, target: Any, depth: int) -> Any:
        """What embeds tokens at a depth: `target`, what does for the target, or an own table.

        Such a layer has rows by the target's ids, also where there is a draft vocabulary.
        """
        return target

    @abstractmethod
    def condition(self, hidden: Tensor) -> Tensor:
        """[..., C], what depends on the target's hidden states [..., (1 + n) H] alone.

        These predicted the root; those of the n `target_layers` stand behind the last one. Of them
        a head reads no more than `DraftHead.fused` gives.
        """

    @abstractmethod
    def start(self, condition: Tensor, embedded: Tensor) -> Tensor:
        """[..., S], the state at the root; see `advance`."""

    @abstractmethod
    def advance(self, state: Tensor, embedded: Tensor, depth: int) -> Tensor:
        """[..., S], the state at a child, of its parent's [..., S].

        `embedded` is what `embedding_of` gives of the child's token, `depth` the child's, from 1.
        """

    @abstractmethod
    def features(self, condition: Tensor, state: Tensor) -> Tensor:
        """[..., E], what the vocabulary-wide layer reads; training runs that layer in chunks.

        Args:
            condition: [..., C], broadcast against `state`.
            state: [..., S], at the node that is expanded.
        """

    @abstractmethod
    def logits(self, condition: Tensor, state: Tensor, depth: int) -> Tensor:
        """Logits of the next draft token: [..., draft tokens], arguments as in `features`.

        `depth` is that of the node that is expanded.
        """

    @abstractmethod
    def shortlist(self, condition: Tensor, state: Tensor, length: int, count: int) -> Shortlist:
        """The candidates of drafts of L levels, L at most 1 + `config.selected_depths`.

        Args:
            condition, state: [R, 1, C] and [R, 1, S], of the roots.
            length, count: L, and how many candidates a depth has.
        """

    @abstractmethod
    def target_tokens(self, draft_tokens: Tensor) -> Tensor:
        """The target's ids of draft tokens [...] int64."""


class DraftHead(nn.Module, SearchHead):
    """A draft head; its parameters' names are those in its checkpoints.

    With a reduced draft vocabulary, the buffer `d2t` says which of the target's tokens are ranked,
    as in EAGLE-3's checkpoints: draft token i is the target's token i + d2t[i].
    """

    config_class: ClassVar[type[HeadConfig]]
    others_names: ClassVar[Sequence[tuple[re.Pattern[str], str]]] = ()
    """From names of tensors in other programs' checkpoints to ours."""

    d2t: Tensor

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.fuse: FuseLayer | None = None
        if config.target_layers:
            self.fuse = FuseLayer(config.hidden_size, len(config.target_layers))
        if config.draft_vocab_size is not None:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.selector: Selector | None = None
        if config.selector is not None:
            self.selector = Selector(config.feature_width, config.selector)

    # Drafting

    def fused(self, hidden: Tensor) -> Tensor:
        """The hidden state [..., H] that is made of all that `condition` is given: `fusion.py`."""
        return fused(hidden, self.config.hidden_size, self.fuse)

    def condition(self, hidden: Tensor) -> Tensor:
        return self.fused(hidden)

    def start(self, condition: Tensor, embedded: Tensor) -> Tensor:
        return self.advance(condition, embedded, 0)

    @property
    @abstractmethod
    def vocabulary_layer(self) -> nn.Linear:
        """V, the vocabulary-wide layer, without bias; the root's where depths have their own."""

    def layer_of(self, depth: int) -> nn.Linear:
        """The vocabulary-wide layer that ranks what follows nodes of a depth."""
        return self.vocabulary_layer

    def logits(self, condition: Tensor, state: Tensor, depth: int) -> Tensor:
        out: Tensor = self.layer_of(depth)(self.features(condition, state))
        return out

    def base_features(self, condition: Tensor, state: Tensor, length: int) -> Tensor:
        """[..., length, E], the selector's features of each depth, from the root's."""
        assert self.selector is not None
        return self.selector(self.features(condition, state), length)

    def shortlist(self, condition: Tensor, state: Tensor, length: int, count: int) -> Shortlist:
        features = self.base_features(condition, state, length).squeeze(1)
        layer = self.vocabulary_layer
        return Shortlist.of(layer(features), layer.weight, count)

    @property
    def dtype(self) -> torch.dtype:
        return self.vocabulary_layer.weight.dtype

    # The draft vocabulary

    def target_tokens(self, draft_tokens: Tensor) -> Tensor:
        if self.config.draft_vocab_size is None:
            return draft_tokens
        return draft_tokens + self.d2t[draft_tokens]

    def keep_tokens(self, target_tokens: Tensor) -> None:
        """Make these of the target's tokens the draft vocabulary: [draft tokens] int64."""
        index = torch.arange(len(target_tokens), device=target_tokens.device)
        self.d2t.copy_(target_tokens - index)

    # Forms for inference of heads that no engine lists, `engine/*/heads/forms.py`

    def packed(self, pack: Pack) -> SearchHead | None:
        """The same head on products that are made once, such as a CPU's on packed weights.

        It has fewer products than the head linear layers, and keeps none of its matrices. None
        where there is no such form: each linear layer is packed then.
        """
        return None

    def launches(self, max_rows: int, length: int) -> FusedHead | None:
        """The same head in few launches, for a GPU and few rows; None where it has no such form.

        Args:
            max_rows: of searches; the form may take fewer.
            length: L, the levels of drafts.
        """
        return None

    # Checkpoints

    @classmethod
    def own_part(cls, name: str, values: Mapping[str, Any]) -> tuple[str, int]:
        """Our name of a tensor in a file with this config.json, and which part of ours it is.

        A tensor is its parts one after the other in the first dimension, most often one.
        """
        for pattern, replacement in cls.others_names:
            name = pattern.sub(replacement, name)
        return name, 0

    @classmethod
    def sizes_from_tensors(cls, where: str, shapes: Mapping[str, list[int]]) -> dict[str, Any]:
        """The entries of config.json that follow from the tensors' shapes, by own name.

        None by default: config.json must state all sizes. `where` begins messages.
        """
        return {}
