# SPDX-License-Identifier: Apache-2.0
"""mlx-lm's K and V cache, with a token tree behind the tokens in it."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import KVCache


class TreeInput:
    """A tree of N nodes, as a forward pass reads it.

    Attributes:
        depths: [N] int32, of the root 0.
        sees: [N, N] bool; a node sees its ancestors and itself.
    """

    def __init__(self, parents: Sequence[int] | npt.NDArray[Any]) -> None:
        """`parents`: [N], before their children; the root, node 0, is its own."""
        self.depths = np.zeros(len(parents), np.int32)
        self.sees = np.eye(len(parents), dtype=bool)
        for node, parent in enumerate(parents[1:], 1):
            self.depths[node] = self.depths[parent] + 1
            self.sees[node] |= self.sees[parent]
        # All layers ask for the same, and each answer costs the device an operation.
        self._positions: dict[int, mx.array] = {}
        self._masks: dict[tuple[int, int | None], mx.array] = {}

    def __len__(self) -> int:
        return len(self.depths)

    def positions(self, n: int) -> mx.array:
        """[N] int32, behind n tokens: n + depth."""
        if n not in self._positions:
            self._positions[n] = mx.array(n + self.depths)
        return self._positions[n]

    def mask(self, n: int, window: int | None = None) -> mx.array:
        """[N, n + N] bool: which of n tokens before the tree and N nodes a node sees.

        `window`: positions that a token sees, its own counted; None for all.
        """
        if (n, window) not in self._masks:
            context = mx.ones((len(self), n), mx.bool_)
            mask = mx.concatenate([context, mx.array(self.sees)], axis=1)
            if window is not None:
                positions = self.positions(n)
                places = mx.concatenate([mx.arange(n), positions])
                mask &= positions[:, None] - places < window
            self._masks[n, window] = mask
        return self._masks[n, window]


class TreeCache(KVCache):
    """K and V of one layer: of n tokens, and while a tree is verified of its N nodes behind them.

    Without a tree it is mlx-lm's `KVCache`, except that it may have a sliding window. It then keeps
    every token, and the mask hides those before the window.
    """

    tree: TreeInput | None = None
    window: int | None = None

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.window = window

    @property
    def length(self) -> int:
        return self.__dict__["offset"]

    @property
    def offset(self) -> int | mx.array:
        """n, or positions [N] of a tree's nodes; attention layers only pass it to their rope."""
        return self.length if self.tree is None else self.tree.positions(self.length)

    @offset.setter
    def offset(self, n: int) -> None:
        self.__dict__["offset"] = n

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        window = window_size or self.window
        if self.tree is None:
            return super().make_mask(N, return_array=return_array, window_size=window)
        return self.tree.mask(self.length, window)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.tree is None:
            return super().update_and_fetch(keys, values)
        tree, n, self.tree = self.tree, self.length, None
        rows = super().update_and_fetch(keys, values)
        self.tree, self.offset = tree, n  # the nodes' rows are there, and not yet tokens
        return rows

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        if self.tree is None:
            return super().keys_and_values()
        end = self.length + len(self.tree)
        return self.keys[..., :end, :], self.values[..., :end, :]

    def rows_of(self, path: mx.array) -> tuple[mx.array, ...]:
        """K and V [1, heads, D, size] of nodes [D] int32, lazily."""
        rows = self.length + path
        return mx.take(self.keys, rows, axis=-2), mx.take(self.values, rows, axis=-2)

    def trim_to(self, length: int) -> None:
        """End the tree, if there is one, and drop tokens behind the first `length`."""
        self.tree = None
        self.offset = min(self.length, length)

    def keep(self, rows: tuple[mx.array, ...] | None, count: int) -> None:
        """End the tree; the first `count` of these rows are the next tokens.

        Args:
            rows: from `rows_of`, evaluated: MLX copies the whole cache where it has to read rows
                of it and to write others in one evaluation. None for a chain, whose rows stay.
            count: at most D.
        """
        self.tree = None
        start, end = self.length, self.length + count
        if rows is not None:
            self.keys[..., start:end, :] = rows[0][..., :count, :]
            self.values[..., start:end, :] = rows[1][..., :count, :]
        self.offset = end


# A saved prompt cache names its classes, and mlx-lm loads those of its own alone.
TreeCache.__name__ = KVCache.__name__
