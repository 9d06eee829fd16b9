# SPDX-License-Identifier: Apache-2.0
"""A gated recurrent head: its state begins as the target's hidden state, and tokens change it.

Unlike in Apple's head, the hidden state h is the state from the start, and a cell like a GRU's
decides, entry by entry, what a token leaves of it:

    s_0 = c = h, or h + F [h_1 ; .. ; h_n] where it reads n further layers of the target
    [g ; x] = W [n(e(x_t)) ; n(s_{t-1})] + b
    s_t = z s_{t-1} + (1 - z) SiLU(x),   z = sigmoid(g)
    y = s_t + SiLU(B n(s_t) + b')        num_draft_layers times
    logits = V (a n(y))

with x_1 the root token, e the target's input embedding, n(x) = sqrt(H) x / (|x| + eps), and a one
factor per entry. Nothing but V, whose rows begin as the target's, depends on how large the
embedding's and the hidden state's numbers are.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vllm_redrafter.config import require_integers
from vllm_redrafter.heads.head import MOST_LAYERS, OWNER, DraftHead, HeadConfig
from vllm_redrafter.heads.norm import normed


@dataclass(frozen=True)
class GatedConfig(HeadConfig):
    """The sizes of a gated head, all of whose layers are as wide as the target's hidden state."""

    model_type: ClassVar[str] = "redrafter_gated"

    num_draft_layers: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_integers(OWNER, MOST_LAYERS, least=0, num_draft_layers=self.num_draft_layers)


class GatedHead(DraftHead):
    config_class = GatedConfig

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

    def advance(self, state: Tensor, embedded: Tensor, depth: int) -> Tensor:
        # One norm of both: calls of torch are what small layers cost.
        mixed = self.cell(normed(torch.stack([embedded, state], dim=-2)).flatten(-2))
        # Training under autocast has narrower products than states.
        gate, candidate = mixed.to(state.dtype).chunk(2, dim=-1)
        return torch.lerp(F.silu(candidate), state, gate.sigmoid())

    def features(self, condition: Tensor, state: Tensor) -> Tensor:
        for block in self.blocks:
            state = state + F.silu(block(normed(state)))
        return normed(state) * self.scale

    @property
    def vocabulary_layer(self) -> nn.Linear:
        return self.lm_head
