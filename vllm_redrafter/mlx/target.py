# SPDX-License-Identifier: Apache-2.0
"""A model of mlx-lm as a target: it verifies token trees and gives a drafter hidden states."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from vllm_redrafter.heads.target_layers import missing_layers
from vllm_redrafter.mlx.self_check import differences
from vllm_redrafter.mlx.taps import take_positions, tapped
from vllm_redrafter.mlx.tree_cache import TreeCache, TreeInput
from vllm_redrafter.utils.errors import ConfigError, one_line

INSTEAD = "use mlx_lm.generate without a drafter, or a target that docs/mlx-models.md lists"


class TreeTarget:
    """A model to draft for; only the classes of its ropes and of what is tapped change.

    `layers` are those that the drafter reads; `dtype` is that of the hidden states.
    """

    def __init__(self, model: nn.Module, target_layers: Sequence[int] = ()) -> None:
        """Prepare a model in place, and try a tree on it; a ConfigError says what is wrong."""
        if missing := missing_layers(target_layers, len(model.layers)):
            raise ConfigError(f"target_layers: {missing}")
        self.model = model
        self.layers = tuple(target_layers)
        for reason in _obstacles(model):
            raise _refusal(model, reason)
        # By cache, how many positions a token sees, its own counted; None for all.
        self._windows = [getattr(cache, "max_size", None) for cache in make_prompt_cache(model)]
        taps = tapped(model, (0, *self.layers))
        if taps is None:
            raise _refusal(model, "no module in it has all of its layers")
        self.taps = taps
        take_positions(model)
        try:
            with taps.watch() as seen:
                logits = model(mx.array([[0]]))
            if not isinstance(seen.output, mx.array):
                raise TypeError("the output of its layers is not handed on as one array")
            self.vocab_size = logits.shape[-1]
            self.hidden_size, self.dtype = seen.output.shape[-1], seen.output.dtype
            difference = next(differences(self), None)
        except Exception as error:  # a model may do anything with what it does not expect
            raise _refusal(model, f"it fails on a small one: {one_line(error)}") from error
        if difference is not None:
            raise _refusal(model, difference)

    def make_cache(self) -> list[TreeCache]:
        """Empty caches of one request.

        Those of layers with a sliding window keep all tokens: a tree's nodes have windows that end
        at different tokens. Their memory is that of layers without a window.
        """
        return [TreeCache(window) for window in self._windows]

    def adopt(self, caches: list[KVCache | RotatingKVCache]) -> None:
        """Make a prompt cache of mlx-lm one for trees, in place and with its tokens."""
        if len(caches) != len(self._windows):
            raise ConfigError(
                f"the prompt cache has {len(caches)} layers, and the target {len(self._windows)}: "
                "make one for this model"
            )
        for cache, window in zip(caches, self._windows, strict=True):
            if not _has_all_tokens(cache, window):
                raise ConfigError(
                    f"the prompt cache has a {type(cache).__name__} that does not keep K and V of "
                    "every token as they are: make one with TreeTarget.make_cache, and without "
                    "kv_bits and max_kv_size"
                )
        caches[:] = map(_adopted, caches, self._windows)

    def embed(self, tokens: mx.array) -> mx.array:
        """[..., H], the model's own input of its first layer for tokens [...]."""
        with self.taps.watch(ends_at=0) as seen:
            self.model(tokens.reshape(1, -1))
        return seen.inputs[0].reshape(*tokens.shape, -1)

    def forward(
        self, tokens: mx.array, caches: list[TreeCache], tree: TreeInput | None = None
    ) -> tuple[mx.array, mx.array]:
        """The next N tokens, lazily.

        Args:
            tokens: [N] integers.
            caches: these tokens' K and V are appended; those of a tree until `TreeCache.keep`.
            tree: whose nodes the tokens are; None for N tokens in a row.

        Returns:
            Logits [N, V], and hidden states [N, (1 + n) H]: after the final norm, then those of
            n target layers.
        """
        if tree is not None:
            for cache in caches:
                cache.tree = tree
        with self.taps.watch() as seen:
            logits = self.model(tokens[None], cache=caches)
        hidden = [seen.output, *(seen.inputs[layer] for layer in self.layers)]
        return logits[0], mx.concatenate(hidden, axis=-1)[0]


def _refusal(model: nn.Module, reason: str) -> ConfigError:
    name = type(model).__module__.rpartition(".")[2]
    return ConfigError(f"no token tree can be verified on mlx-lm's {name}: {reason}; {INSTEAD}")


def _has_all_tokens(cache: Any, window: int | None) -> bool:
    if type(cache) is RotatingKVCache:
        # Once a token is dropped, the index lags behind.
        return bool(cache.max_size == window and cache._idx == cache.offset)
    return type(cache) in (KVCache, TreeCache)


def _adopted(cache: KVCache | RotatingKVCache, window: int | None) -> TreeCache:
    """The same cache, or in place of a rotating one a new one of its rows."""
    if type(cache) is RotatingKVCache:
        # Held by two, the rows would be copied whenever one is written to.
        cache.keys, cache.values, rows = None, None, (cache.keys, cache.values)
        cache = TreeCache.from_state((*rows, cache.offset))
    cache.__class__ = TreeCache
    cache.window, cache.tree = window, None  # a step that was interrupted may have left a tree
    return cache


def _obstacles(model: nn.Module) -> Iterator[str]:
    """Why no tree can be verified on this model; nothing where it may be."""
    if (processes := mx.distributed.init().size()) > 1:
        yield f"it is spread over {processes} processes, and a tree is verified by one"
    others = Counter(
        type(cache).__name__
        for cache in make_prompt_cache(model)
        # A class derived from these may keep or read its rows in another way.
        if type(cache) not in (KVCache, RotatingKVCache)
    )
    for name, count in others.items():
        yield f"{count} of its caches are of mlx-lm's {name}, and a tree needs rows of K and V"
    if any(getattr(module, "block_sparse", False) for module in model.modules()):
        yield "its attention is to blocks of rows (block_sparse), and nodes lie in rows by number"


def check_rope(name: str, config: Mapping[str, Any], arguments: Any) -> None:
    """Refuse a target whose positions mlx-lm would turn by another angle than it was trained with.

    transformers 5 writes the base of the angles into `rope_parameters`; many of mlx-lm's models
    look for `rope_theta`, beside it, and else take their default without a word. `config` is the
    target's config.json, and `arguments` are `args` of mlx-lm's model.
    """
    theta = (config.get("rope_parameters") or {}).get("rope_theta")
    taken = getattr(arguments, "rope_theta", None)
    if theta is None or taken is None or hasattr(arguments, "rope_parameters") or taken == theta:
        return
    raise ConfigError(
        f"mlx-lm reads no rope_parameters of {name!r}, and would compute with rope_theta {taken:g} "
        f'in the place of {theta:g}: write "rope_theta": {theta} into its config.json, outside of '
        "rope_parameters"
    )
