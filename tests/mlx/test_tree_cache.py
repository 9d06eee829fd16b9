# SPDX-License-Identifier: Apache-2.0
"""Trees behind the tokens of a cache: masks, positions, compaction, memory, mlx-lm's own uses."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)

from redrafter_testing.algorithm import naive
from redrafter_testing.models.mlx_models import tiny_model
from vllm_redrafter.mlx.target import TreeTarget
from vllm_redrafter.mlx.tree_cache import TreeInput

PARENTS = [0, 0, 0, 1, 3, 2, 4]
N = len(PARENTS)


def rows(count: int, heads: int = 2, size: int = 4) -> Any:
    return mx.random.normal((1, heads, count, size))


@pytest.mark.parametrize("window", [None, 1, 2, 3, 6, 100])
@pytest.mark.parametrize("n", [0, 5])
def test_a_window_hides_what_lies_as_many_positions_back(n: int, window: int | None) -> None:
    tree = TreeInput(PARENTS)
    mask = np.array(tree.mask(n, window))
    positions = [*range(n), *(n + tree.depths)]
    for node in range(N):
        for place in range(n + N):
            seen = place < n or place - n in naive.ancestors(PARENTS, node)
            near = window is None or positions[n + node] - positions[place] < window
            assert mask[node, place] == (seen and near)


def test_mlx_lm_saves_loads_and_trims_a_prompt_cache(tmp_path: Path) -> None:
    target = TreeTarget(tiny_model("gemma3_text"))
    caches, tokens = target.make_cache(), mx.arange(20)
    target.forward(tokens, caches)
    save_prompt_cache(str(tmp_path / "prompt.safetensors"), caches)
    loaded = load_prompt_cache(str(tmp_path / "prompt.safetensors"))
    target.adopt(loaded)
    assert trim_prompt_cache(loaded, 3) == 3 and trim_prompt_cache(caches, 3) == 3
    nodes, tree = mx.arange(N), TreeInput(PARENTS)
    got, expected = (target.forward(nodes, its, tree)[0] for its in (loaded, caches))
    assert mx.allclose(got, expected, atol=1e-5)


CONTEXT = 2040
"""A few tokens before the cache has to grow."""

STEPS = 20


@pytest.fixture(scope="module")
def target() -> TreeTarget:
    return TreeTarget(tiny_model("llama", layer_types=None, head_dim=64, num_key_value_heads=4))


def context_of(target: TreeTarget, by_mlx_lm: bool) -> list[Any]:
    """Caches whose K and V are most of the memory that a step needs."""
    caches = make_prompt_cache(target.model) if by_mlx_lm else target.make_cache()
    for cache in caches:
        cache.update_and_fetch(rows(CONTEXT, 4, 64), rows(CONTEXT, 4, 64))
    mx.eval([cache.state[:2] for cache in caches])
    target.adopt(caches)
    return caches


def step(target: TreeTarget, caches: list[Any], how: str) -> None:
    """Seven rows, of which four become tokens."""
    if how == "without a tree":
        mx.eval(target.model(mx.arange(N)[None], cache=caches))
        trim_prompt_cache(caches, N - 4)
        return
    logits, _ = target.forward(mx.arange(N), caches, TreeInput(PARENTS))
    found = [cache.rows_of(mx.array([0, 1, 3, 4])) for cache in caches]
    mx.eval(logits, [] if how == "rows not evaluated" else found)
    for cache, its_rows in zip(caches, found, strict=True):
        cache.keep(its_rows, 4)
    if how == "rows not evaluated":
        mx.eval([cache.state[:2] for cache in caches])


def peak(target: TreeTarget, how: str, by_mlx_lm: bool = False) -> int:
    """Bytes that steps need beyond what they begin with."""
    caches = context_of(target, by_mlx_lm)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(STEPS):
        step(target, caches, how)
    assert caches[0].offset == CONTEXT + 4 * STEPS > 2048
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("by_mlx_lm", [False, True])
def test_trees_copy_no_cache(target: TreeTarget, by_mlx_lm: bool) -> None:
    one_layer = context_of(target, by_mlx_lm)[0].nbytes
    plain, trees = (peak(target, how, by_mlx_lm) for how in ("without a tree", "with one"))
    assert trees < plain + one_layer / 2
    copies = peak(target, "rows not evaluated", by_mlx_lm)
    assert copies > plain + one_layer, "a copy of the cache is not seen"
