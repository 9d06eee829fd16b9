"""The recurrent draft head: an RNN over drafted tokens, conditioned on the target's hidden state.

ReDrafter (arXiv 2403.09919) section 3.1; the mathematics is that of Apple's
`recurrent_drafting/modeling_drafter.py`, so that Apple's checkpoints give the same beams:

    s_0 = 0
    s_t = SiLU(W_w e(x_t) + W_u s_{t-1} + b_u)        with `rnn`; else s_t = s_{t-1} + e(x_t)
    logits = head(input_proj?([h ; s_t]))

with x_1 the root token, h the target's hidden state that predicted it, and e the target's own
input embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vllm_redrafter.config import DrafterConfig


class ResidualBlock(nn.Module):
    """x + SiLU(Linear x), one layer of the draft head."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class Drafter(nn.Module):
    """The draft head; parameter names are those of Apple's checkpoints.

    `step`, `condition`, `features` and `logits` are all there is: beam search and training call
    the same. The vocabulary-wide layer dominates a draft's cost; with a reduced draft vocabulary
    it has rows for some of the target's tokens only, which the buffer `d2t` tells as EAGLE-3's
    checkpoints do: draft token i is the target's token i + d2t[i].
    """

    d2t: Tensor

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        hidden, exit_dim = config.hidden_size, config.exit_dim
        if config.has_input_projection:
            self.input_proj = nn.Linear(2 * hidden, exit_dim)
        self.lm_head = nn.Sequential(
            *(ResidualBlock(exit_dim) for _ in range(config.num_draft_layers)),
            nn.Linear(exit_dim, config.num_ranked_tokens, bias=False),
        )
        if config.rnn:
            self.rnn_u = nn.Linear(hidden, hidden)
            self.rnn_w = nn.Linear(hidden, hidden, bias=False)
        if config.draft_vocab_size is not None:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))

    def step(self, state: Tensor | None, embedded: Tensor) -> Tensor:
        """Advance the recurrence by one token.

        Args:
            state: [..., H], s_{t-1}; None for s_0 = 0.
            embedded: [..., H], the target's embedding of x_t.

        Returns:
            [..., H], s_t.
        """
        if not self.config.rnn:
            return embedded if state is None else state + embedded
        recurrent = self.rnn_u.bias if state is None else self.rnn_u(state)
        return F.silu(self.rnn_w(embedded) + recurrent)

    def condition(self, hidden: Tensor) -> Tensor:
        """The part of the head that depends on h alone, the same for all beams and levels.

        W [h ; s] + b = (W_h h + b) + W_s s, of which this is the first term.

        Args:
            hidden: [..., H], the target's hidden state h.

        Returns:
            [..., exit_dim]; h itself where the head has no input projection.
        """
        if not self.config.has_input_projection:
            return hidden
        weight_hidden = self.input_proj.weight[:, : self.config.hidden_size]
        return F.linear(hidden, weight_hidden, self.input_proj.bias)

    def features(self, condition: Tensor, state: Tensor) -> Tensor:
        """What the last, vocabulary-wide layer reads; training runs that layer in chunks.

        Args:
            condition: `condition(h)`; broadcast against `state`.
            state: [..., H], s_t.

        Returns:
            [..., exit_dim].
        """
        if self.config.has_input_projection:
            weight_state = self.input_proj.weight[:, self.config.hidden_size :]
            x = condition + F.linear(state, weight_state)
        else:
            x = torch.cat([condition.expand_as(state), state], dim=-1)
        for index in range(self.config.num_draft_layers):
            x = self.lm_head[index](x)
        return x

    def logits(self, condition: Tensor, state: Tensor) -> Tensor:
        """Logits of the next draft token: [..., draft tokens], arguments as in `features`."""
        out: Tensor = self.lm_head[-1](self.features(condition, state))
        return out

    def target_tokens(self, draft_tokens: Tensor) -> Tensor:
        """The target's ids of draft tokens [...] int64: themselves, unless there is a `d2t`."""
        if self.config.draft_vocab_size is None:
            return draft_tokens
        return draft_tokens + self.d2t[draft_tokens]

    @property
    def last_layer(self) -> nn.Linear:
        """The vocabulary-wide layer, which training runs in chunks."""
        layer = self.lm_head[-1]
        assert isinstance(layer, nn.Linear)
        return layer

    def keep_tokens(self, target_tokens: Tensor) -> None:
        """Make these of the target's tokens the draft vocabulary: [draft tokens] int64."""
        index = torch.arange(len(target_tokens), device=target_tokens.device)
        self.d2t.copy_(target_tokens - index)
