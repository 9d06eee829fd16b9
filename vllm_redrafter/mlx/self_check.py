# SPDX-License-Identifier: Apache-2.0
"""A test of a model before it verifies trees, by what it computes rather than by its name.

A small tree must give at each node the model's own logits for the node's path, and the logits must
come from the tapped hidden states.
"""

from collections.abc import Iterator
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from vllm_redrafter.mlx.taps import Taps
from vllm_redrafter.mlx.tree_cache import TreeCache, TreeInput

CONTEXT, FOLLOWING = 5, 3
"""Tokens before the tree, and behind a path of it."""
PARENTS = (0, 0, 0, 0, 1, 1, 2, 4)
"""Six of eight nodes are neither where a causal mask nor where a position for each row has them."""
LEAVES = ((0, 3), (0, 1, 5), (0, 2, 6), (0, 1, 4, 7))
"""The tree's paths; the last is the one that is kept."""
SAME = 1e-3
"""Logits of the same hidden states in passes of the same shape are no further apart."""
FAR = 4
"""A tree may be off by so many times what plain decoding differs by. A tree with a wrong mask must
be off by so many times what the right one is."""


class _Target(Protocol):
    model: nn.Module
    taps: Taps
    layers: tuple[int, ...]
    vocab_size: int
    dtype: mx.Dtype

    def make_cache(self) -> list[TreeCache]: ...

    def forward(
        self, tokens: mx.array, caches: list[TreeCache], tree: TreeInput | None = None
    ) -> tuple[mx.array, mx.array]: ...


def differences(target: _Target) -> Iterator[str]:
    """How a `TreeTarget` deviates from its model; nothing where it does not."""
    yield from _tap_differences(target)
    yield from _tree_differences(target)


def _tap_differences(target: _Target) -> Iterator[str]:
    """A token must have one state in a layer; the last one, normed, must give the logits alone."""
    context, nodes, _ = _tokens(target)
    with target.taps.watch() as seen:
        expected = _plain_logits(target, context)
    if 0 not in seen.inputs:
        yield "its layers are not called as modules"
    elif (entered := seen.inputs[0].shape) != seen.output.shape:
        yield f"what enters its layers is {entered}, and what comes out is {seen.output.shape}"
    if seen.runs_again and target.layers:
        yield "its layers run more than once in a pass, so what enters one is not one state"

    def logits_of(state: mx.array) -> mx.array:
        with target.taps.watch(replacement=state):
            return _plain_logits(target, nodes[:CONTEXT])

    if not _distance(logits_of(seen.output), expected) <= SAME:  # NaN too
        yield "its logits do not come from the output of the module that has its layers alone"
    # A norm behind the tap would undo the factor.
    if _distance(logits_of(2 * seen.output), expected) <= SAME:
        yield "the final norm is not in the module that has its layers"


def _tree_differences(target: _Target) -> Iterator[str]:
    """Where a small tree's logits, or those behind a kept path, are not the model's own."""
    context, nodes, following = _tokens(target)
    caches, tree = target.make_cache(), TreeInput(PARENTS)
    target.forward(context, caches)
    logits, _ = target.forward(nodes, caches, tree)
    rows = [cache.rows_of(mx.array(LEAVES[-1])) for cache in caches]
    mx.eval(logits, rows)
    expected = _expected_logits(target, context, nodes)
    allowed = min(
        _rounding(target, context, nodes, expected),
        _wrong_mask(target, context, nodes, expected) / FAR,
    )
    if not (off := _distance(logits, expected)) <= allowed:
        yield f"a tree's logits are {off:.1g} off, of which {allowed:.1g} may be rounding"
        return
    for cache, its_rows in zip(caches, rows, strict=True):
        cache.keep(its_rows, len(LEAVES[-1]))
    logits, _ = target.forward(following, caches)
    tokens = mx.concatenate([context, nodes[mx.array(LEAVES[-1])], following])
    if not (off := _distance(logits, _plain_logits(target, tokens)[-FOLLOWING:])) <= allowed:
        yield f"the logits behind a kept path are {off:.1g} off"


def _expected_logits(target: _Target, context: mx.array, nodes: mx.array) -> mx.array:
    """[N, V], the model's own at each node, path by path."""
    by_node: dict[int, mx.array] = {}
    for path in LEAVES:
        logits = _plain_logits(target, mx.concatenate([context, nodes[mx.array(path)]]))
        by_node |= dict(zip(path, logits[len(context) :], strict=True))
    return mx.stack([by_node[node] for node in range(len(PARENTS))])


def _rounding(target: _Target, context: mx.array, nodes: mx.array, expected: mx.array) -> float:
    """How far off a tree may be: by what the model itself differs when it decodes by tokens."""
    caches, path = make_prompt_cache(target.model), mx.array(LEAVES[-1])
    target.model(context[None], cache=caches)
    logits = [target.model(token[None, None], cache=caches)[0, -1] for token in nodes[path]]
    differs = _distance(mx.stack(logits), expected[path])
    return FAR * max(differs, mx.finfo(target.dtype).eps, 3e-5)


def _wrong_mask(target: _Target, context: mx.array, nodes: mx.array, expected: mx.array) -> float:
    """How far off a tree is whose nodes see all before them."""
    caches, tree = target.make_cache(), TreeInput(PARENTS)
    tree.sees = np.tri(len(PARENTS), dtype=bool)
    target.forward(context, caches)
    return _distance(target.forward(nodes, caches, tree)[0], expected)


def _distance(logits: mx.array, expected: mx.array) -> float:
    """Of logits [N, V]: the norm of the difference by that of the deviation from the mean.

    The median over nodes: in a mixture of experts, rounding may send one token to another expert.
    NaN where a model gives that, or the same logits for all tokens.
    """
    got, right = (np.array(x.astype(mx.float32)) for x in (logits, expected))
    deviation = np.linalg.norm(right - right.mean(1, keepdims=True), axis=1)
    with np.errstate(invalid="ignore"):
        return float(np.median(np.linalg.norm(got - right, axis=1) / deviation))


def _plain_logits(target: _Target, tokens: mx.array) -> mx.array:
    return target.model(tokens[None], cache=make_prompt_cache(target.model))[0]


def _tokens(target: _Target) -> tuple[mx.array, mx.array, mx.array]:
    """A context, a tree's and what follows: all different, from all over the vocabulary."""
    ends = np.cumsum([CONTEXT, len(PARENTS), FOLLOWING])
    spread = np.linspace(1, target.vocab_size - 1, ends[-1]).astype(np.int32)
    tokens = np.random.default_rng(0).permutation(spread)
    context, nodes, following = map(mx.array, np.split(tokens, ends[:-1]))
    return context, nodes, following
