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

    `step` and `logits` are all there is: beam search and training call the same two functions.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        hidden, exit_dim = config.hidden_size, config.exit_dim
        if config.has_input_projection:
            self.input_proj = nn.Linear(2 * hidden, exit_dim)
        self.lm_head = nn.Sequential(
            *(ResidualBlock(exit_dim) for _ in range(config.num_draft_layers)),
            nn.Linear(exit_dim, config.vocab_size, bias=False),
        )
        if config.rnn:
            self.rnn_u = nn.Linear(hidden, hidden)
            self.rnn_w = nn.Linear(hidden, hidden, bias=False)

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

    def features(self, hidden: Tensor, state: Tensor) -> Tensor:
        """What the last, vocabulary-wide layer reads; training runs that layer in chunks.

        Args:
            hidden: [..., H], the target's hidden state h; broadcast against `state`.
            state: [..., H], s_t.

        Returns:
            [..., exit_dim].
        """
        if self.config.has_input_projection:
            # W [h ; s] = W_h h + W_s s: h is shared by a request's beams and projected once.
            weight_hidden, weight_state = self.input_proj.weight.chunk(2, dim=1)
            x = F.linear(hidden, weight_hidden, self.input_proj.bias) + F.linear(
                state, weight_state
            )
        else:
            x = torch.cat([hidden.expand_as(state), state], dim=-1)
        x = self.lm_head[:-1](x)
        return x

    def logits(self, hidden: Tensor, state: Tensor) -> Tensor:
        """Logits of the next draft token: [..., V], arguments as in `features`."""
        out: Tensor = self.lm_head[-1](self.features(hidden, state))
        return out
