"""A gated recurrent head: its state begins as the target's hidden state, and tokens change it.

Apple's state knows drafted tokens alone, and meets the hidden state h in the head's last layers.
Here h is the state from the start, and a cell like a GRU's decides, entry by entry, what a token
leaves of it:

    s_0 = c = h, or h + F [h_1 ; .. ; h_n] where it reads n further layers of the target
    [g ; x] = W [n(e(x_t)) ; n(s_{t-1})] + b
    s_t = z s_{t-1} + (1 - z) SiLU(x),   z = sigmoid(g)
    y = s_t + SiLU(B n(s_t) + b')        num_draft_layers times
    logits = V (a n(y))

with x_1 the root token, e the target's input embedding, n(x) = sqrt(H) x / (|x| + eps), and a one
factor per entry. Nothing but V, whose rows begin as the target's, depends on how large the
embedding's and the hidden state's numbers are.

For few rows on a GPU, s_t, each block and a n(y) are one launch each (`gated_fused.py`): with V
and the search's three, a level is six launches and one per block. One that ranks candidates is four
and one per block: n's factor, a and the candidates' rows of V are one launch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vllm_redrafter.heads.gated_layers import GatedLayers, after_cell
from vllm_redrafter.heads.head import (
    DraftHead,
    HeadConfig,
    Pack,
    SearchHead,
    require_draft_layers,
)
from vllm_redrafter.heads.norm import normed

if TYPE_CHECKING:
    from vllm_redrafter.heads.fused_head import FusedHead


@dataclass(frozen=True)
class GatedConfig(HeadConfig):
    """The sizes of a gated head, all of whose layers are as wide as the target's hidden state.

    Attributes:
        num_draft_layers: residual blocks between the state and the vocabulary-wide layer.
    """

    model_type: ClassVar[str] = "redrafter_gated"

    num_draft_layers: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_draft_layers(self.num_draft_layers)


class GatedHead(DraftHead):
    """The gated head."""

    config_class = GatedConfig
    layouts: ClassVar[Mapping[str, str]] = {"own": "GatedDrafter"}

    config: GatedConfig

    def __init__(self, config: GatedConfig) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        self.cell = nn.Linear(2 * hidden, 2 * hidden)
        nn.init.zeros_(self.cell.bias)
        self.blocks = nn.ModuleList(
            nn.Linear(hidden, hidden) for _ in range(config.num_draft_layers)
        )
        self.scale = nn.Parameter(torch.ones(hidden))
        self.lm_head = nn.Linear(hidden, config.num_ranked_tokens, bias=False)

    def condition(self, hidden: Tensor) -> Tensor:
        """c [..., H], which the state begins as; see `DraftHead.condition`."""
        return self.fused(hidden)

    def start(self, condition: Tensor, embedded: Tensor) -> Tensor:
        """s_1 [..., H], from s_0 = c; see `DraftHead.start`."""
        return self.advance(condition, embedded)

    def advance(self, state: Tensor, embedded: Tensor) -> Tensor:
        """s_t [..., H] of s_{t-1} and e(x_t); see `DraftHead.advance`."""
        return after_cell(self.cell, state, embedded)

    def features(self, condition: Tensor, state: Tensor, depth: int) -> Tensor:
        """[..., H], of the state alone; see `DraftHead.features`."""
        for block in self.blocks:
            state = state + F.silu(block(normed(state)))
        return normed(state) * self.scale

    @property
    def vocabulary_layers(self) -> Sequence[nn.Linear]:
        return (self.lm_head,)

    @property
    def _layers(self) -> GatedLayers:
        blocks: list[Any] = list(self.blocks)
        return GatedLayers(self.cell, blocks, self.scale, self.lm_head, self.fuse)

    def packed(self, pack: Pack) -> SearchHead:
        """In as few calls as the mathematics allows: see `gated_packed.py`."""
        from vllm_redrafter.heads.gated_packed import PackedGatedHead

        return PackedGatedHead(self, self._layers, pack)

    def launches(self, table: nn.Module | None, max_rows: int, length: int) -> FusedHead | None:
        """See `gated_fused.py`."""
        from vllm_redrafter.heads.gated_fused import FusedGatedHead
        from vllm_redrafter.heads.selector_fused import FusedSelector

        selector = FusedSelector.of(self.selector, length, max_rows)
        return FusedGatedHead(self._layers, table, max_rows, selector)
