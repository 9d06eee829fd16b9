# SPDX-License-Identifier: Apache-2.0
"""The recurrent draft head: an RNN over drafted tokens, conditioned on the target's hidden state.

ReDrafter (arXiv 2403.09919) section 3.1; the mathematics is that of Apple's
`recurrent_drafting/modeling_drafter.py`, so that Apple's checkpoints give the same beams:

    s_0 = 0
    s_t = SiLU(W_w e(x_t) + W_u s_{t-1} + b_u)        with `rnn`; else s_t = s_{t-1} + e(x_t)
    logits = head(input_proj?([h ; s_t]))

with x_1 the root token, h the target's hidden state that predicted it, and e the target's own
input embedding.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vllm_redrafter.config import require_integers
from vllm_redrafter.heads.head import MOST_LAYERS, OWNER, WIDEST, DraftHead, HeadConfig
from vllm_redrafter.utils.errors import ConfigError

# From TensorRT-LLM's converter to Apple's.
_OLD_NAMES = (
    (re.compile(r"^input_projs\."), "input_proj."),
    (re.compile(r"^(lm_heads|0)\."), "lm_head."),
)
_LAST_LAYER = re.compile(r"lm_head\.(\d+)\.weight")


@dataclass(frozen=True)
class RecurrentConfig(HeadConfig):
    """The sizes of Apple's head, by the names in its config.json; nothing reads the last one."""

    model_type: ClassVar[str] = "recurrent_drafting_drafter"

    exit_dim: int
    num_draft_layers: int = 1
    rnn: bool = True
    num_lookback_tokens: int = -1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_integers(OWNER, WIDEST, exit_dim=self.exit_dim)
        require_integers(OWNER, MOST_LAYERS, least=0, num_draft_layers=self.num_draft_layers)
        require_integers(OWNER, least=-1, num_lookback_tokens=self.num_lookback_tokens)
        if not isinstance(self.rnn, bool):
            raise ConfigError(f"{OWNER}: rnn must be true or false, got {self.rnn!r}")

    @property
    def feature_width(self) -> int:
        return self.exit_dim

    @property
    def has_input_projection(self) -> bool:
        """`input_proj` exists only where [h ; s] (2H wide) does not fit the head as it is."""
        return self.exit_dim != 2 * self.hidden_size

    @classmethod
    def of_target(cls, vocab_size: int, hidden_size: int, **options: Any) -> Self:
        """As wide as the target by default, so that its last layer may begin as the target's."""
        given = {"exit_dim": hidden_size} | {k: v for k, v in options.items() if v is not None}
        return super().of_target(vocab_size, hidden_size, **given)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        # Without this entry it is of before there was an RNN: Apple's own code reads it so, too.
        return super().from_dict({"rnn": False} | dict(values))


class _ResidualBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class RecurrentHead(DraftHead):
    """Apple's draft head."""

    config_class = RecurrentConfig
    others_names = _OLD_NAMES

    config: RecurrentConfig

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config)
        hidden, exit_dim = config.hidden_size, config.exit_dim
        if config.has_input_projection:
            self.input_proj = nn.Linear(2 * hidden, exit_dim)
        self.lm_head = nn.Sequential(
            *(_ResidualBlock(exit_dim) for _ in range(config.num_draft_layers)),
            nn.Linear(exit_dim, config.num_ranked_tokens, bias=False),
        )
        if config.rnn:
            self.rnn_u = nn.Linear(hidden, hidden)
            self.rnn_w = nn.Linear(hidden, hidden, bias=False)

    def condition(self, hidden: Tensor) -> Tensor:
        """[..., exit_dim], the first term of W [h ; s] + b = (W_h h + b) + W_s s; or h itself."""
        hidden = self.fused(hidden)
        if not self.config.has_input_projection:
            return hidden
        weight_hidden = self.input_proj.weight[:, : self.config.hidden_size]
        return F.linear(hidden, weight_hidden, self.input_proj.bias)

    def start(self, condition: Tensor, embedded: Tensor) -> Tensor:
        if not self.config.rnn:
            return embedded
        return F.silu(self.rnn_w(embedded) + self.rnn_u.bias)

    def advance(self, state: Tensor, embedded: Tensor, depth: int) -> Tensor:
        if not self.config.rnn:
            return state + embedded
        return F.silu(self.rnn_w(embedded) + self.rnn_u(state))

    def features(self, condition: Tensor, state: Tensor) -> Tensor:
        if self.config.has_input_projection:
            weight_state = self.input_proj.weight[:, self.config.hidden_size :]
            x = condition + F.linear(state, weight_state)
        else:
            x = torch.cat([condition.expand_as(state), state], dim=-1)
        for index in range(self.config.num_draft_layers):
            x = self.lm_head[index](x)
        return x

    @property
    def blocks(self) -> tuple[nn.Linear, ...]:
        """The linear layers of the residual blocks."""
        return tuple(block.linear for block in self.lm_head if isinstance(block, _ResidualBlock))

    @property
    def vocabulary_layer(self) -> nn.Linear:
        layer = self.lm_head[-1]
        assert isinstance(layer, nn.Linear)
        return layer

    @classmethod
    def sizes_from_tensors(cls, where: str, shapes: Mapping[str, list[int]]) -> dict[str, Any]:
        """All sizes; vocab_size only without `d2t`."""
        matches = [match for name in shapes if (match := _LAST_LAYER.fullmatch(name))]
        if len(matches) != 1 or len(shapes[matches[0][0]]) != 2:
            raise ConfigError(
                f"{where}: not a ReDrafter's weights: expected one matrix lm_head.N.weight behind "
                "the N residual blocks of the head; found "
                f"{', '.join(sorted(shapes)) or 'no tensor'}"
            )
        rows, exit_dim = shapes[matches[0][0]]
        reduced = "d2t" in shapes
        sizes = {
            "hidden_size": _hidden_size(where, shapes, exit_dim),
            "exit_dim": exit_dim,
            "num_draft_layers": int(matches[0][1]),
            "rnn": "rnn_w.weight" in shapes,
            "draft_vocab_size": rows if reduced else None,
        }
        return sizes if reduced else {"vocab_size": rows, **sizes}


def _hidden_size(where: str, shapes: Mapping[str, list[int]], exit_dim: int) -> int:
    """From the RNN; else half of what goes into the head: [h ; s]."""
    if recurrent := shapes.get("rnn_w.weight"):
        return recurrent[-1]
    projection = shapes.get("input_proj.weight")
    doubled = projection[-1] if projection else exit_dim
    if doubled % 2:
        raise ConfigError(
            f"{where}: the head reads {doubled} numbers, but they must be two halves of equal "
            "size, the hidden and the recurrent state"
        )
    return doubled // 2
