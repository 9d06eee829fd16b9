# SPDX-License-Identifier: Apache-2.0
"""The target's token at each node, drawn by mlx-lm's samplers with noise of its position alone.

Noise depends on a key of the request and on the position, as in vLLM's V2 runner: a seeded answer
is the same whatever was drafted. All of mlx-lm's samplers draw from `mx.random.state`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import LogitsProcessor, greedy_sampler

Sampler = Callable[[mx.array], mx.array]

KEYS = 1 << 64
"""Seeds that `mx.random.seed` takes."""


class NodeSampler:
    """Samples the tokens of one request.

    Attributes:
        is_greedy: the most probable token is taken, and no noise is drawn.
        needs_chain: there are logits processors, which see the tokens before a node in their order.
    """

    def __init__(
        self, sampler: Sampler | None, processors: Sequence[LogitsProcessor] | None
    ) -> None:
        """The key is the next one of `mx.random.state`, which `mx.random.seed` sets."""
        self._sampler, self._processors = sampler or greedy_sampler, tuple(processors or ())
        self.is_greedy = self._sampler is greedy_sampler
        self.needs_chain = bool(self._processors)
        if not self.is_greedy:
            following, self._key = map(_number, mx.random.split(_state()))
            mx.random.seed(following)

    def sample(
        self, logits: mx.array, positions: Sequence[int], context: mx.array, nodes: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Draw tokens [N] at N nodes, lazily; and log-probabilities [N, V] as mlx-lm gives them.

        Args:
            logits, positions: [N, V] and [N], of the nodes.
            context: [T] integers, the tokens before the root.
            nodes: [N] integers, the nodes' tokens: a chain's, if there are processors.
        """
        if self.needs_chain:
            logits = self._processed(logits, mx.concatenate([context, nodes]))
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if self.is_greedy:
            return self._sampler(logprobs), logprobs
        before = _number(_state())
        try:
            rows = zip(logprobs, positions, strict=True)
            drawn = [self._draw(row[None], position) for row, position in rows]
        finally:
            mx.random.seed(before)  # others must not draw with these keys
        return mx.concatenate(drawn), logprobs

    def _processed(self, logits: mx.array, text: mx.array) -> mx.array:
        """Each row as its processors leave it, given the tokens up to its own node."""
        rows = []
        before = text.size - len(logits)
        for node, row in enumerate(logits, 1):
            row = row[None]
            for processor in self._processors:
                row = processor(text[: before + node], row)
            rows.append(row)
        return mx.concatenate(rows)

    def _draw(self, logprobs: mx.array, position: int) -> mx.array:
        mx.random.seed((self._key + position) % KEYS)
        return self._sampler(logprobs)


def _state() -> mx.array:
    """MLX's own key, [2] uint32, of this thread."""
    state: Any = mx.random.state
    return state[0]


def _number(key: mx.array) -> int:
    """The seed of a key [2] uint32."""
    high, low = (int(word) for word in np.array(key))
    return high << 32 | low
