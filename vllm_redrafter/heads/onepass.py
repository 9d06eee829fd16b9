"""A gated head that reads the vocabulary-wide layer once per draft.

The gated head's state of H numbers is changed by every drafted token, and the vocabulary ranked
with it. Here it is changed by the root alone. What nodes of each depth may be is told from it at
once (`selector.py`); a smaller state of S numbers follows the drafted tokens, and corrects what is
told, for the candidates only:

    s = gated cell(h, e(x_1));  g_0 = s;  g_d = s + Up_d SiLU(Down_d n(s) + b_d)
    u = A n(s) + b_A
    per drafted x: [q ; w] = M [n(e(x)) ; n(u)] + b_M;  u <- sigmoid(q) u + (1 - sigmoid(q)) SiLU(w)
    at depth 0:  y = s;  below:  [p ; c] = D u + b_D;  y = sigmoid(p) g_d + c
    logits = V (a n(y))

The terms are those of `gated.py`. A state is [s ; u].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from vllm_redrafter.config import MAX_NODES, require_at_most, require_positive
from vllm_redrafter.heads.gated_layers import after_cell, gated
from vllm_redrafter.heads.head import (
    OWNER,
    WIDEST,
    DraftHead,
    HeadConfig,
    Pack,
    SearchHead,
)
from vllm_redrafter.heads.norm import normed
from vllm_redrafter.heads.onepass_layers import OnePassLayers
from vllm_redrafter.heads.selector import Selector, SelectorConfig
from vllm_redrafter.utils.errors import ConfigError

if TYPE_CHECKING:
    from vllm_redrafter.heads.fused_head import FusedHead

USUAL_LEVELS = 5
KEPT = 2.0
"""How p's bias begins: what the root told stays nearly whole."""
UNCORRECTED = 0.05
"""Of a training's rows, those that teach what nodes of a depth may be, whatever their path."""
GATED = 0.5
"""Those that are the gated head's, whose state every token changes. The cell would learn from roots
alone otherwise, and guess what follows one less often."""


@dataclass(frozen=True)
class OnePassConfig(HeadConfig):
    """The sizes of a head that reads the vocabulary once per draft.

    Attributes:
        levels: L, how many tokens it can draft in a row; at least 2.
        state_size: S.
        base_rank: k, of each depth's change of what the root tells.
    """

    model_type: ClassVar[str] = "redrafter_onepass"
    takes_selector: ClassVar[bool] = False

    levels: int
    state_size: int
    base_rank: int

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = {"state_size": self.state_size, "base_rank": self.base_rank}
        require_positive(OWNER, levels=self.levels, **sizes)
        require_at_most(OWNER, MAX_NODES - 1, levels=self.levels)
        if self.levels < 2:
            raise ConfigError(f"{OWNER}: levels must be at least 2, got {self.levels}")
        require_at_most(OWNER, WIDEST, **sizes)

    @property
    def max_beam_length(self) -> int:
        """What nodes of deeper levels may be, nothing tells."""
        return self.levels

    @property
    def selected_depths(self) -> int:
        """See `HeadConfig.selected_depths`: all."""
        return self.levels - 1

    @classmethod
    def of_target(
        cls, vocab_size: int, hidden_size: int, beam_length: int | None = None, **options: Any
    ) -> Self:
        """See `HeadConfig.of_target`; S is 5/16 of H in whole sixteens, and k a quarter of H."""
        given = {
            "levels": beam_length or USUAL_LEVELS,
            "state_size": 16 * -(-5 * hidden_size // 256),
            "base_rank": max(1, hidden_size // 4),
        } | options
        return super().of_target(vocab_size, hidden_size, **given)


class OnePassHead(DraftHead):
    """The head."""

    config_class = OnePassConfig
    layouts: ClassVar[Mapping[str, str]] = {"own": "OnePassDrafter"}

    config: OnePassConfig

    def __init__(self, config: OnePassConfig) -> None:
        super().__init__(config)
        hidden, small = config.hidden_size, config.state_size
        self.cell = nn.Linear(2 * hidden, 2 * hidden)
        self.base = Selector(hidden, SelectorConfig(config.levels - 1, config.base_rank))
        self.first = nn.Linear(hidden, small)
        self.mix = nn.Linear(hidden + small, 2 * small)
        self.change = nn.Linear(small, 2 * hidden)
        self.scale = nn.Parameter(torch.ones(hidden))
        self.lm_head = nn.Linear(hidden, config.num_ranked_tokens, bias=False)
        for layer in (self.cell, self.first, self.mix, self.change):
            nn.init.zeros_(layer.bias)
        nn.init.constant_(self.change.bias[:hidden], KEPT)

    def condition(self, hidden: Tensor) -> Tensor:
        """h [..., H]; see `DraftHead.condition`."""
        return self.fused(hidden)

    def start(self, condition: Tensor, embedded: Tensor) -> Tensor:
        """[s ; u] [..., H + S] at the root; see `DraftHead.start`.

        In training, a state goes on behind it that is the gated head's.
        """
        root = after_cell(self.cell, condition, embedded)
        parts = [root, self.first(normed(root)).to(root.dtype)]
        return torch.cat([*parts, root] if self.training else parts, dim=-1)

    def advance(self, state: Tensor, embedded: Tensor) -> Tensor:
        """[s ; u] [..., H + S], with another u; see `DraftHead.advance`."""
        root, small, recurrent = self._parts(state)
        joined = torch.cat([normed(embedded), normed(small)], dim=-1)
        parts = [root, gated(self.mix(joined), small)]
        if self.training:
            parts.append(after_cell(self.cell, recurrent, embedded))
        return torch.cat(parts, dim=-1)

    def features(self, condition: Tensor, state: Tensor, depth: int) -> Tensor:
        """[..., H]; see `DraftHead.features`.

        In training, some rows are what the root told, and some the gated head's.
        """
        root, small, recurrent = self._parts(state)
        if depth == 0:
            return normed(root) * self.scale
        told = self.base.at(root, depth)
        kept, change = self.change(small).to(told.dtype).chunk(2, dim=-1)
        corrected = told * kept.sigmoid() + change
        if self.training:
            drawn = torch.rand(*told.shape[:-1], 1, device=told.device)
            corrected = torch.where(drawn < UNCORRECTED, told, corrected)
            corrected = torch.where(drawn >= 1 - GATED, recurrent, corrected)
        return normed(corrected) * self.scale

    def base_features(self, condition: Tensor, state: Tensor, length: int) -> Tensor:
        """a n(g_d) [..., length, H]; see `DraftHead.base_features`."""
        return normed(self.base(state[..., : self.config.hidden_size], length)) * self.scale

    def _parts(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """s [..., H], u [..., S], and the gated head's state [..., H] in training."""
        hidden = self.config.hidden_size
        end = hidden + self.config.state_size
        return state[..., :hidden], state[..., hidden:end], state[..., end:]

    @property
    def vocabulary_layers(self) -> Sequence[nn.Linear]:
        return (self.lm_head,)

    @property
    def _layers(self) -> OnePassLayers:
        small = self.first, self.mix, self.change
        return OnePassLayers(self.cell, self.base, *small, self.scale, self.fuse)

    def packed(self, pack: Pack) -> SearchHead:
        """In as few calls as the mathematics allows: see `onepass_packed.py`."""
        from vllm_redrafter.heads.onepass_packed import PackedOnePassHead

        return PackedOnePassHead(self, self._layers, pack)

    def launches(self, table: nn.Module | None, max_rows: int, length: int) -> FusedHead | None:
        """See `onepass_fused.py`."""
        from vllm_redrafter.heads.onepass_fused import FusedOnePassHead

        return FusedOnePassHead(self._layers, table, max_rows, length)
