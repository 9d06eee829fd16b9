"""The drafter on packed weights, as vLLM packs those of its own layers on a CPU.

A draft multiplies a few rows by matrices of millions of numbers: what it costs is reading them.
oneDNN reads a matrix in the blocks that it packed once, where torch's product, for some numbers of
rows, brings it into such an order at every call. The mathematics is that of `drafter.py`, in as
few products as it allows:

    s_t = SiLU([W_w W_u] [e(x_t) ; s_{t-1}] + b_u)

is one product, and of the head, only what depends on s_t is computed at every level.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from vllm_redrafter.config import DrafterConfig
from vllm_redrafter.drafter import Drafter

Product = Callable[[Tensor], Tensor]


class PackedDrafter:
    """What beam search asks of a `Drafter`, whose arguments and shapes these methods have.

    Keeps none of the drafter's tensors but `d2t`: its weights are freed with the drafter.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.config: DrafterConfig = drafter.config
        self._d2t = drafter.d2t if drafter.config.draft_vocab_size is not None else None
        hidden = drafter.config.hidden_size
        if drafter.config.rnn:
            both = torch.cat([drafter.rnn_w.weight, drafter.rnn_u.weight], dim=1)
            self._cell = packed(both, drafter.rnn_u.bias)
        if drafter.config.has_input_projection:
            projection = drafter.input_proj.weight
            self._project_hidden = packed(projection[:, :hidden], drafter.input_proj.bias)
            self._project_state = packed(projection[:, hidden:])
        blocks: list[Any] = [
            drafter.lm_head[i].linear for i in range(drafter.config.num_draft_layers)
        ]
        self._blocks = [packed(linear.weight, linear.bias) for linear in blocks]
        self._last_layer = packed(drafter.last_layer.weight)

    def step(self, state: Tensor | None, embedded: Tensor) -> Tensor:
        """See `Drafter.step`."""
        if not self.config.rnn:
            return embedded if state is None else state + embedded
        before = torch.zeros_like(embedded) if state is None else state
        return F.silu(self._cell(torch.cat([embedded, before], dim=-1)), inplace=True)

    def condition(self, hidden: Tensor) -> Tensor:
        """See `Drafter.condition`."""
        return self._project_hidden(hidden) if self.config.has_input_projection else hidden

    def logits(self, condition: Tensor, state: Tensor) -> Tensor:
        """See `Drafter.logits`."""
        if self.config.has_input_projection:
            x = self._project_state(state).add_(condition)
        else:
            x = torch.cat([condition.expand_as(state), state], dim=-1)
        for block in self._blocks:
            x = F.silu(block(x), inplace=True).add_(x)
        return self._last_layer(x)

    def target_tokens(self, draft_tokens: Tensor) -> Tensor:
        """See `Drafter.target_tokens`."""
        return draft_tokens if self._d2t is None else draft_tokens + self._d2t[draft_tokens]


def packed(weight: Tensor, bias: Tensor | None = None) -> Product:
    """The product x [..., in] -> x W^T + b [..., out], as vLLM's own linear layers compute it.

    Args:
        weight: [out, in]; copied.
        bias: [out] or None.
    """
    layer: Any = nn.Module()
    layer.weight = nn.Parameter(
        weight.detach().clone(memory_format=torch.contiguous_format), requires_grad=False
    )
    layer.bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)
    # vLLM says so itself where it cannot pack this dtype on this processor, and falls back.
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    return lambda x: layer.cpu_linear(x, layer.weight, layer.bias)
