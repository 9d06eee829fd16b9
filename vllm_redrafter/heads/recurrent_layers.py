"""Apple's head: its sizes, and the layers that its forms for inference are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

from torch import Tensor, nn
from torch.nn import functional as F

from vllm_redrafter.config import require_at_most, require_positive
from vllm_redrafter.heads.fusion import FuseLayer
from vllm_redrafter.heads.head import OWNER, WIDEST, HeadConfig, require_draft_layers
from vllm_redrafter.utils.errors import ConfigError


@dataclass(frozen=True)
class RecurrentConfig(HeadConfig):
    """The sizes of Apple's head; field names are those of its config.json.

    `num_lookback_tokens` is recorded by Apple's training code and read by nothing.
    """

    model_type: ClassVar[str] = "recurrent_drafting_drafter"

    exit_dim: int
    num_draft_layers: int = 1
    rnn: bool = True
    num_lookback_tokens: int = -1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(OWNER, exit_dim=self.exit_dim)
        require_at_most(OWNER, WIDEST, exit_dim=self.exit_dim)
        require_draft_layers(self.num_draft_layers)
        lookback = self.num_lookback_tokens
        if isinstance(lookback, bool) or not isinstance(lookback, int):
            raise ConfigError(f"{OWNER}: num_lookback_tokens must be an integer, got {lookback!r}")
        if not isinstance(self.rnn, bool):
            raise ConfigError(f"{OWNER}: rnn must be true or false, got {self.rnn!r}")

    @property
    def feature_width(self) -> int:
        """E."""
        return self.exit_dim

    @property
    def has_input_projection(self) -> bool:
        """`input_proj` exists only where [h ; s] (2H wide) does not fit the head as it is."""
        return self.exit_dim != 2 * self.hidden_size

    @classmethod
    def of_target(
        cls, vocab_size: int, hidden_size: int, beam_length: int | None = None, **options: Any
    ) -> Self:
        """See `HeadConfig.of_target`; the head is as wide as the target, unless something is said,
        so that its last layer may begin as the target's."""
        given = {"exit_dim": hidden_size} | {k: v for k, v in options.items() if v is not None}
        return super().of_target(vocab_size, hidden_size, **given)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """See `HeadConfig.from_dict`."""
        # A config.json without this entry was written when drafters had no RNN; Apple's own code
        # reads it so, too.
        return super().from_dict({"rnn": False} | dict(values))


class ResidualBlock(nn.Module):
    """x + SiLU(Linear x), one layer of the draft head."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class RecurrentLayers(NamedTuple):
    """The layers of a head, where it has them.

    Attributes:
        config: the head's.
        rnn_w, rnn_u: of the recurrence; None without `rnn`.
        input_proj: None where there is none.
        blocks: the linear layers of the residual blocks.
        vocabulary: the vocabulary-wide layer.
        fuse: of the layers that the head reads besides; None where it reads none.
    """

    config: RecurrentConfig
    rnn_w: nn.Linear | None
    rnn_u: nn.Linear | None
    input_proj: nn.Linear | None
    blocks: tuple[nn.Linear, ...]
    vocabulary: nn.Linear
    fuse: FuseLayer | None = None
