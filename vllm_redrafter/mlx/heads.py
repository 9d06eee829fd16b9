# SPDX-License-Identifier: Apache-2.0
"""The draft heads in MLX; their terms and mathematics are those of `vllm_redrafter/heads`.

Their matrices are layers of `mlx.nn`, so that `nn.quantize` applies to a head as to a target.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import torch

from vllm_redrafter.checkpoints.reading import Checkpoint
from vllm_redrafter.heads import fusion
from vllm_redrafter.heads.gated import GatedConfig
from vllm_redrafter.heads.head import HeadConfig
from vllm_redrafter.heads.norm import EPSILON
from vllm_redrafter.heads.recurrent import RecurrentConfig
from vllm_redrafter.utils.errors import ConfigError

DTYPES = {mx.float32: torch.float32, mx.bfloat16: torch.bfloat16, mx.float16: torch.float16}

Tensors = Mapping[str, mx.array]


class Head(nn.Module, ABC):
    """What a beam search needs of a head; `heads/head.py` documents the methods and shapes."""

    config: HeadConfig

    def __init__(self, config: HeadConfig, tensors: Tensors) -> None:
        super().__init__()
        self.config = config
        if config.target_layers:
            self.fuse = _linear(tensors["fuse.weight"])
        self.ranked_tokens: mx.array | None = None
        if config.draft_vocab_size is not None:
            d2t = tensors["d2t"].astype(mx.int32)
            self.ranked_tokens = d2t + mx.arange(config.draft_vocab_size, dtype=mx.int32)

    @abstractmethod
    def condition(self, hidden: mx.array) -> mx.array: ...

    @abstractmethod
    def start(self, condition: mx.array, embedded: mx.array) -> mx.array: ...

    @abstractmethod
    def advance(self, state: mx.array, embedded: mx.array) -> mx.array: ...

    @abstractmethod
    def logits(self, condition: mx.array, state: mx.array) -> mx.array: ...

    def target_tokens(self, draft_tokens: mx.array) -> mx.array:
        return draft_tokens if self.ranked_tokens is None else self.ranked_tokens[draft_tokens]

    def _fused(self, hidden: mx.array) -> mx.array:
        """One hidden state [..., H] of the last and n layers' [..., (1 + n) H]."""
        if not self.config.target_layers:
            return hidden
        size = self.config.hidden_size
        layers = mx.unflatten(hidden[..., size:], -1, (-1, size))
        return hidden[..., :size] + self.fuse(_normed(layers, fusion.EPSILON).flatten(-2))


class _RecurrentHead(Head):
    config: RecurrentConfig

    def __init__(self, config: RecurrentConfig, tensors: Tensors) -> None:
        super().__init__(config, tensors)
        if config.rnn:
            self.rnn_w = _linear(tensors["rnn_w.weight"], tensors["rnn_u.bias"])
            self.rnn_u = _linear(tensors["rnn_u.weight"])
        if config.has_input_projection:
            of_hidden, of_state = mx.split(tensors["input_proj.weight"], 2, axis=1)
            self.project_hidden = _linear(mx.contiguous(of_hidden), tensors["input_proj.bias"])
            self.project_state = _linear(mx.contiguous(of_state))
        names = [f"lm_head.{index}.linear" for index in range(config.num_draft_layers)]
        self.blocks = [_linear(tensors[f"{n}.weight"], tensors[f"{n}.bias"]) for n in names]
        self.vocabulary = _linear(tensors[f"lm_head.{config.num_draft_layers}.weight"])

    def condition(self, hidden: mx.array) -> mx.array:
        hidden = self._fused(hidden)
        return self.project_hidden(hidden) if self.config.has_input_projection else hidden

    def start(self, condition: mx.array, embedded: mx.array) -> mx.array:
        return nn.silu(self.rnn_w(embedded)) if self.config.rnn else embedded

    def advance(self, state: mx.array, embedded: mx.array) -> mx.array:
        if not self.config.rnn:
            return state + embedded
        return nn.silu(self.rnn_w(embedded) + self.rnn_u(state))

    def logits(self, condition: mx.array, state: mx.array) -> mx.array:
        if self.config.has_input_projection:
            x = condition + self.project_state(state)
        else:
            x = mx.concatenate([mx.broadcast_to(condition, state.shape), state], axis=-1)
        for block in self.blocks:
            x = x + nn.silu(block(x))
        return self.vocabulary(x)


class _GatedHead(Head):
    config: GatedConfig

    def __init__(self, config: GatedConfig, tensors: Tensors) -> None:
        super().__init__(config, tensors)
        self.cell = _linear(tensors["cell.weight"], tensors["cell.bias"])
        names = [f"blocks.{index}" for index in range(config.num_draft_layers)]
        self.blocks = [_linear(tensors[f"{n}.weight"], tensors[f"{n}.bias"]) for n in names]
        self.scale = tensors["scale"]
        self.vocabulary = _linear(tensors["lm_head.weight"])
        # |x| + e and sqrt(|x|^2 + e^2) are nearly the same number, unless |x| is near e.
        self._epsilon = EPSILON**2 / config.hidden_size

    def condition(self, hidden: mx.array) -> mx.array:
        return self._fused(hidden)

    def start(self, condition: mx.array, embedded: mx.array) -> mx.array:
        return self.advance(condition, embedded)

    def advance(self, state: mx.array, embedded: mx.array) -> mx.array:
        both = _normed(mx.stack([embedded, state], axis=-2), self._epsilon)
        gate, candidate = mx.split(self.cell(both.flatten(-2)), 2, axis=-1)
        return _mixed(gate, candidate, state)

    def logits(self, condition: mx.array, state: mx.array) -> mx.array:
        for block in self.blocks:
            state = state + nn.silu(block(_normed(state, self._epsilon)))
        return self.vocabulary(mx.fast.rms_norm(state, self.scale, self._epsilon))


FORMS: dict[type[HeadConfig], type[Head]] = {
    RecurrentConfig: _RecurrentHead,
    GatedConfig: _GatedHead,
}


def load_head(checkpoint: Checkpoint, dtype: mx.Dtype) -> Head:
    """Read a drafter's weights in the target's dtype."""
    config, model = checkpoint.head, checkpoint.model
    if (form := FORMS.get(type(config))) is None:
        known = " and ".join(f'"{config_class.model_type}"' for config_class in FORMS)
        raise ConfigError(
            f"{model}: a head of model_type {config.model_type!r} does not run in MLX, where "
            f"those of {known} do; take a drafter with such a head, or serve this one with vLLM"
        )
    if dtype not in DTYPES:
        raise ConfigError(
            f"{model}: a drafter does not run in {dtype}; load the target in one of "
            f"{', '.join(map(str, DTYPES))}"
        )
    state = checkpoint.load(DTYPES[dtype]).state_dict()
    head = form(config, {name: mx.array(tensor) for name, tensor in state.items()})
    # What is split or added above is made here, not in the first draft.
    mx.eval(head.parameters())
    return head


def _linear(weight: mx.array, bias: mx.array | None = None) -> nn.Linear:
    """A layer of these; `nn.Linear` itself would draw from MLX's global random state."""
    layer = nn.Linear.__new__(nn.Linear)
    nn.Module.__init__(layer)
    layer.weight = weight
    if bias is not None:
        layer.bias = bias
    return layer


def _normed(x: mx.array, epsilon: float) -> mx.array:
    """x / rms(x) over the last axis, computed in float32."""
    return mx.fast.rms_norm(x, None, epsilon)


@partial(mx.compile, shapeless=True)
def _mixed(gate: mx.array, candidate: mx.array, state: mx.array) -> mx.array:
    """z s + (1 - z) SiLU(x), with z the sigmoid of the gate."""
    candidate = nn.silu(candidate)
    return candidate + mx.sigmoid(gate) * (state - candidate)
