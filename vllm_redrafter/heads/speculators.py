# SPDX-License-Identifier: Apache-2.0
"""Recurrent speculators that others have published: an MLP's cell, or an LSTM's.

They begin with the target's last hidden state h, and have tables of embeddings of their own. With
n(x) = x / sqrt(mean(x^2) + EPSILON), x_0 the root token, x_d the drafted one at depth d, D the
width of s, and r the tokens that a checkpoint was trained to draft:

    s_{-1} = h, or n(h) / sqrt(2) with `scale_input`
    alpha = sqrt((1 - w^2) D / 2) / w,  w = 2^(-1 / (2 r))
    MLP:   s_d = GELU(a_d n(P_d s_{d-1} + alpha E_d[x_d]) + b_d)
    LSTM:  [f; i; o; g] = P_d s_{d-1} + alpha [z; z; z; z],  z = E[x_d],  c_{-1} = 0
           c_d = sigmoid(f) c_{d-1} + sigmoid(i) GELU(a n(g) + b)
           s_d = sigmoid(o) GELU(a' n(c_d) + b')
    logits of what follows x_d = V_d s_d

Tied ones have one set of weights for all depths, but P_0 for the root and P_1 below it. The MLP is
IBM's (arXiv 2404.19124), nebius' and Arctic's `sum_rnn`, the LSTM Arctic's `sum_lstm`.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vllm_redrafter.config import MAX_NODES, require_integers
from vllm_redrafter.heads.head import OWNER, WIDEST, DraftHead, HeadConfig
from vllm_redrafter.utils.errors import ConfigError

EPSILON = 1e-6
GATES = ("forget", "input", "output", "cell")
"""In the order of their rows in an LSTM's projections."""

# Names in published checkpoints: Arctic's have lists of one layer, and a matrix for each gate.
_LIST_OF_ONE = re.compile(r"^((?:emb|proj|ln)\.\d+|cell_ln|state_ln)\.0\.(?=weight|bias)")
_OF_GATE = re.compile(rf"^({'|'.join(GATES)})_(emb|proj)\.")
_OF_DEPTH = re.compile(r"^(emb|proj|ln|head)\.(\d+)\.")


@dataclass(frozen=True)
class SpeculatorConfig(HeadConfig):
    """The sizes of a speculator: D is `width`, r `num_levels`."""

    width: int
    num_levels: int
    tied: bool = True
    scale_input: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_integers(OWNER, WIDEST, width=self.width)
        require_integers(OWNER, MAX_NODES - 1, num_levels=self.num_levels)
        for name in ("tied", "scale_input"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"{OWNER}: {name} must be true or false, got {value!r}")
        if self.selector is not None and not self.tied:
            raise ConfigError(
                f"{OWNER}: selector: a speculator with an output layer for each depth takes none"
            )

    @property
    def feature_width(self) -> int:
        return self.width

    @property
    def max_beam_length(self) -> int | None:
        """Tied weights draft on behind the tokens that they were trained for."""
        return None if self.tied and self.num_levels > 1 else self.num_levels

    @property
    def alpha(self) -> float:
        """What a token's row of the table is multiplied by."""
        w = 2 ** (-1 / (2 * self.num_levels))
        return math.sqrt((1 - w * w) * self.width / 2) / w


class _Norm(nn.Module):
    """a n(x) + b of x [..., D], in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return _normed(x) * self.weight.float() + self.bias.float()


def _normed(x: Tensor) -> Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], eps=EPSILON)


class _Speculator(DraftHead):
    """All but the cell. A state begins with s; tables keep V rows with a draft vocabulary."""

    num_gates: ClassVar[int] = 1
    """P_d gives so many times D."""

    config: SpeculatorConfig

    def __init__(self, config: SpeculatorConfig) -> None:
        super().__init__(config)
        width, num_sets = config.width, 1 if config.tied else config.num_levels
        num_projections = min(config.num_levels, 2) if config.tied else config.num_levels
        sources = [config.hidden_size] + [width] * (num_projections - 1)
        self.emb = nn.ModuleList(nn.Embedding(config.vocab_size, width) for _ in range(num_sets))
        self.proj = nn.ModuleList(
            nn.Linear(source, width * self.num_gates, bias=False) for source in sources
        )
        self.head = nn.ModuleList(
            nn.Linear(width, config.num_ranked_tokens, bias=False) for _ in range(num_sets)
        )

    def embedding_of(self, target: Any, depth: int) -> nn.Module:
        return of_depth(self.emb, depth)

    def condition(self, hidden: Tensor) -> Tensor:
        """P_0 s_{-1}."""
        hidden = self.fused(hidden)
        if self.config.scale_input:
            hidden = (_normed(hidden) * 0.5**0.5).to(hidden.dtype)
        out: Tensor = self.proj[0](hidden)
        return out

    def start(self, condition: Tensor, embedded: Tensor) -> Tensor:
        return self._after(condition, embedded, None, 0)

    def advance(self, state: Tensor, embedded: Tensor, depth: int) -> Tensor:
        width = self.config.width
        projected = of_depth(self.proj, depth)(state[..., :width])
        return self._after(projected, embedded, state[..., width:], depth)

    def _after(
        self, projected: Tensor, embedded: Tensor, carried: Tensor | None, depth: int
    ) -> Tensor:
        gates = projected.float().view(*projected.shape[:-1], self.num_gates, self.config.width)
        mixed = gates + self.config.alpha * embedded.float().unsqueeze(-2)
        return self._cell(mixed, carried, depth).to(embedded.dtype)

    def _cell(self, mixed: Tensor, carried: Tensor | None, depth: int) -> Tensor:
        """The state in float32, of what enters gates [..., gates, D] float32.

        `carried` is what the state above has behind s; None at the root.
        """
        raise NotImplementedError

    def features(self, condition: Tensor, state: Tensor) -> Tensor:
        return state[..., : self.config.width]

    @property
    def vocabulary_layer(self) -> nn.Linear:
        return self.layer_of(0)

    def layer_of(self, depth: int) -> nn.Linear:
        return cast(nn.Linear, of_depth(self.head, depth))

    @classmethod
    def own_part(cls, name: str, values: Mapping[str, Any]) -> tuple[str, int]:
        """Tied weights have one tensor of ours, and names by depth or gate in other files."""
        name, part = _LIST_OF_ONE.sub(r"\1.", name.removeprefix("speculator.")), 0
        if gate := _OF_GATE.match(name):
            part = GATES.index(gate[1]) if gate[2] == "proj" else 0
            name = _OF_GATE.sub(r"\2.", name)
        if values.get("tied") is True and (found := _OF_DEPTH.match(name)):
            depth = min(int(found[2]), 1 if found[1] == "proj" else 0)
            name = _OF_DEPTH.sub(rf"\1.{depth}.", name)
        return name, part


def of_depth(layers: nn.ModuleList, depth: int) -> nn.Module:
    """The layer of a depth; the last one is for all depths below, too."""
    return layers[min(depth, len(layers) - 1)]


class MlpSpeculatorConfig(SpeculatorConfig):
    model_type: ClassVar[str] = "redrafter_mlp"


class MlpSpeculator(_Speculator):
    config_class = MlpSpeculatorConfig

    def __init__(self, config: SpeculatorConfig) -> None:
        super().__init__(config)
        self.ln = nn.ModuleList(_Norm(config.width) for _ in self.head)

    def _cell(self, mixed: Tensor, carried: Tensor | None, depth: int) -> Tensor:
        return F.gelu(of_depth(self.ln, depth)(mixed.squeeze(-2)))


class LstmSpeculatorConfig(SpeculatorConfig):
    model_type: ClassVar[str] = "redrafter_lstm"


class LstmSpeculator(_Speculator):
    """Its state is [s; c]."""

    config_class = LstmSpeculatorConfig
    num_gates = len(GATES)

    def __init__(self, config: SpeculatorConfig) -> None:
        super().__init__(config)
        self.cell_ln, self.state_ln = _Norm(config.width), _Norm(config.width)

    def _cell(self, mixed: Tensor, carried: Tensor | None, depth: int) -> Tensor:
        forget, let_in, let_out = mixed[..., :3, :].sigmoid().unbind(-2)
        cell = let_in * F.gelu(self.cell_ln(mixed[..., 3, :]))
        if carried is not None:
            cell = cell + forget * carried.float()
        return torch.cat([let_out * F.gelu(self.state_ln(cell)), cell], dim=-1)
