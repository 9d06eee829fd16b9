# SPDX-License-Identifier: Apache-2.0
"""Medusa's heads: one per depth, each a function of the target's hidden state alone.

Medusa (arXiv 2401.10774), section 2.1; h is the target's hidden state that predicted the root:

    x_0 = h,  x_{j+1} = x_j + SiLU(W_ij x_j + b_ij)     num_draft_layers times, the biases optional
    logits_i = V_i x

The target's own output layer has made the root of h, so head 0 ranks the token after the root, and
head i the one i further; there are as many levels as heads. No head sees a drafted token: all nodes
of a level have the same candidates, ranked once per request and level. W beams are, on every level,
the W most probable paths of Medusa's whole cartesian tree, not an approximation.

Medusa's own code keeps the nodes that are best on average, measured once per model; here they are
the best for this very text. A level's probabilities are normalised over its 50 best tokens, as all
drafts' are; what is learned about each depth (`budget/acceptance.py`) makes up for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vllm_redrafter.config import require_at_most, require_positive
from vllm_redrafter.heads.head import OWNER, DraftHead, HeadConfig
from vllm_redrafter.utils.errors import ConfigError

VLLM_MODEL_TYPE = "medusa"
"""vLLM 0.32 itself serves these, as chains, unless trees are asked for."""

MOST_HEADS = 127
"""A tree is no deeper."""

_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.weight")
_OUTPUT = re.compile(r"lm_head(?:s\.(\d+))?\.weight")
_OTHERS_NAMES = (
    (re.compile(r"^medusa_heads?\."), ""),
    (re.compile(r"^(\d+)\.(\d+)\.linear\.(weight|bias)$"), r"blocks.\1.layers.\2.\3"),
    (re.compile(r"^(\d+)\.\d+\.weight$"), r"lm_heads.\1.weight"),
)
"""FasterDecoding's, alone or in a whole model."""

_VLLM_ENTRIES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_heads": "num_heads",
    "num_hidden_layers": "num_draft_layers",
    "medusa_fc_bias": "bias",
    "original_lm_head": "shared_output",
    "truncated_vocab_size": "draft_vocab_size",
}
"""From entries of vLLM's config.json to ours."""


@dataclass(frozen=True)
class MedusaConfig(HeadConfig):
    """The sizes of Medusa's heads.

    Attributes:
        num_heads: how many tokens they draft, one each.
        num_draft_layers, bias: residual blocks of each head, and whether these have a bias.
        shared_output: one vocabulary-wide layer, instead of one per head.
    """

    model_type: ClassVar[str] = "redrafter_medusa"
    takes_selector: ClassVar[bool] = False

    num_heads: int
    num_draft_layers: int = 1
    bias: bool = False
    shared_output: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(OWNER, num_heads=self.num_heads)
        require_at_most(OWNER, MOST_HEADS, num_heads=self.num_heads)
        self._require_draft_layers(self.num_draft_layers)
        for name in ("bias", "shared_output"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"{OWNER}: {name} must be true or false, got {value!r}")

    @property
    def max_beam_length(self) -> int:
        return self.num_heads

    @classmethod
    def of_target(
        cls, vocab_size: int, hidden_size: int, beam_length: int | None = None, **options: Any
    ) -> Self:
        """Five heads, as are published, unless `beam_length` is given."""
        given = {"num_heads": beam_length or 5} | options
        return super().of_target(vocab_size, hidden_size, **given)


class _MedusaBlocks(nn.Module):
    """A head's residual blocks, x + SiLU(Linear x) each; the identity until they are trained."""

    def __init__(self, width: int, num_layers: int, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=bias) for _ in range(num_layers))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaHead(DraftHead):
    """Medusa's heads; parameter names are those of vLLM's checkpoints."""

    config_class = MedusaConfig
    others_names = _OTHERS_NAMES

    config: MedusaConfig

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        hidden, heads = config.hidden_size, config.num_heads
        self.blocks = nn.ModuleList(
            _MedusaBlocks(hidden, config.num_draft_layers, config.bias) for _ in range(heads)
        )
        if config.shared_output:
            self.lm_head = nn.Linear(hidden, config.num_ranked_tokens, bias=False)
        else:
            self.lm_heads = nn.ModuleList(
                nn.Linear(hidden, config.num_ranked_tokens, bias=False) for _ in range(heads)
            )

    def advance(self, state: Tensor, embedded: Tensor) -> Tensor:
        """Nothing that is read: [..., 1]."""
        return embedded[..., :1]

    def features(self, condition: Tensor, state: Tensor, depth: int) -> Tensor:
        out: Tensor = self.blocks[depth](condition)
        return out

    @property
    def vocabulary_layers(self) -> Sequence[nn.Linear]:
        layers = [self.lm_head] if self.config.shared_output else list(self.lm_heads)
        return layers  # type: ignore[return-value]

    # Checkpoints

    @classmethod
    def from_foreign_config(cls, values: Mapping[str, Any]) -> dict[str, Any] | None:
        if values.get("model_type") != VLLM_MODEL_TYPE and "medusa_num_heads" not in values:
            return None
        # FasterDecoding's `medusa_num_heads` is not read: published ones of five heads say 2.
        if values.get("logit_scale", 1) != 1:
            raise ConfigError(
                f"{OWNER}: logit_scale is {values['logit_scale']!r}, which scales draft logits: "
                "multiply the weights lm_heads.* by it, and leave it out"
            )
        own: dict[str, Any] = {}
        if values.get("model_type") == VLLM_MODEL_TYPE:
            own = {ours: values[name] for name, ours in _VLLM_ENTRIES.items() if name in values}
        if own.get("draft_vocab_size") == own.get("vocab_size"):
            own.pop("draft_vocab_size", None)
        if (target := values.get("base_model_name_or_path")) is not None:
            own["speculators_config"] = {"verifier": {"name_or_path": target}}
        return own

    @classmethod
    def from_foreign_tensors(cls, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of a whole model, its heads; a layer shared by them may be called as the first head's."""
        heads = {name: t for name, t in tensors.items() if name.startswith("medusa_head.")}
        heads = heads or dict(tensors)
        own = {cls.own_name(name): tensor for name, tensor in heads.items()}
        if len(own) < len(heads):
            return heads  # with a tensor under two names, which is refused
        layers = [name for name in own if _OUTPUT.fullmatch(name)]
        if layers == ["lm_heads.0.weight"] and any(name.startswith("blocks.1.") for name in own):
            own["lm_head.weight"] = own.pop("lm_heads.0.weight")
        if (kept := own.pop("token_map", None)) is not None:
            return _of_tokens(own, kept)
        return own

    @classmethod
    def sizes_from_tensors(cls, where: str, shapes: Mapping[str, list[int]]) -> dict[str, Any]:
        """All sizes; vocab_size only without `d2t`."""
        blocks = [match for name in shapes if (match := _BLOCK.fullmatch(name))]
        layers = [match for name in shapes if (match := _OUTPUT.fullmatch(name))]
        if not blocks and not layers:
            raise ConfigError(
                f"{where}: not Medusa's weights: expected blocks.I.layers.J.weight and "
                "lm_heads.I.weight, or I.J.linear.weight and I.N.weight; found "
                f"{', '.join(sorted(shapes)) or 'no tensor'}"
            )
        if not layers or len(shapes[layers[0][0]]) != 2:
            raise ConfigError(
                f"{where}: the heads have no vocabulary-wide layer: they rank tokens by the "
                'target\'s own, as those of FasterDecoding\'s "version": "2". Add it to the '
                "weights, as lm_head.weight"
            )
        rows, hidden = shapes[layers[0][0]]
        reduced = "d2t" in shapes
        sizes = {
            "hidden_size": hidden,
            "num_heads": 1 + max(int(match[1] or 0) for match in (*blocks, *layers)),
            "num_draft_layers": 1 + max((int(match[2]) for match in blocks), default=-1),
            "bias": "blocks.0.layers.0.bias" in shapes,
            "shared_output": "lm_head.weight" in shapes,
            "draft_vocab_size": rows if reduced else None,
        }
        return sizes if reduced else {"vocab_size": rows, **sizes}


def _of_tokens(tensors: Mapping[str, Tensor], kept: Tensor) -> dict[str, Tensor]:
    """With `d2t` instead of vLLM's `token_map`; rows of tokens that are not kept are left out."""
    if kept.ndim != 1 or kept.is_floating_point() or not len(kept) or kept.min() < 0:
        raise ConfigError("token_map must be a list of the target's tokens")
    kept, own = kept.long(), dict(tensors)
    for name, tensor in tensors.items():
        if _OUTPUT.fullmatch(name) and tensor.ndim == 2 and len(tensor) > len(kept):
            if kept.max() >= len(tensor):
                raise ConfigError(
                    f"token_map has token {int(kept.max())}, {name} rows for {len(tensor)}"
                )
            own[name] = tensor[kept]
    return own | {"d2t": kept - torch.arange(len(kept))}
