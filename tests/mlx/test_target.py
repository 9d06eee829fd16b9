# SPDX-License-Identifier: Apache-2.0
"""Every model class of mlx-lm: trees are what plain decoding is, or they are refused."""

from copy import deepcopy
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache
from mlx_lm.utils import load_model

from redrafter_testing.models.checkpoints import edit_config
from redrafter_testing.models.mlx_models import (
    ACCEPTED,
    REFUSED,
    VOCAB,
    WINDOW,
    tiny_model,
    wrong_tree,
)
from redrafter_testing.models.tiny_models import make_target
from vllm_redrafter.mlx.target import TreeTarget, check_rope
from vllm_redrafter.mlx.tree_cache import TreeInput
from vllm_redrafter.utils.errors import ConfigError

PARENTS = (0, 0, 0, 1, 1, 2, 3, 6)
LEAVES = ((0, 2, 5), (0, 1, 4), (0, 1, 3, 6, 7))
PATH = LEAVES[-1]

CONTEXT = 3 * WINDOW + 5
"""Sliding windows begin in it, and for some nodes at another token than for others."""

rng = np.random.default_rng(0)
context, nodes, following = (mx.array(rng.integers(0, VOCAB, n)) for n in (CONTEXT, 8, 1))


def decoded(model: Any) -> tuple[np.ndarray, np.ndarray]:
    """Token by token, by mlx-lm alone: logits [N, V] at the nodes, [1, V] behind the kept path."""
    caches = make_prompt_cache(model)
    mx.eval(model(context[None], cache=caches))
    at_nodes, last = {}, None
    for path in LEAVES:
        its_caches = deepcopy(caches)
        for node in path:
            last = model(nodes[node][None, None], cache=its_caches)[0, -1]
            at_nodes[node] = last
        last = model(following[None], cache=its_caches)[0]
    return to_numpy(mx.stack([at_nodes[node] for node in range(len(PARENTS))])), to_numpy(last)


def verified(target: TreeTarget, tree: TreeInput) -> tuple[np.ndarray, np.ndarray]:
    """The same from one pass over a tree, and one behind its compacted path."""
    caches = target.make_cache()
    target.forward(context, caches)
    logits, _ = target.forward(nodes, caches, tree)
    rows = [cache.rows_of(mx.array(PATH)) for cache in caches]
    mx.eval(logits, rows)
    for cache_, its_rows in zip(caches, rows, strict=True):
        cache_.keep(its_rows, len(PATH))
    return to_numpy(logits), to_numpy(target.forward(following, caches)[0])


def to_numpy(x: Any) -> np.ndarray:
    return np.array(x.astype(mx.float32))


def off(got: np.ndarray, expected: np.ndarray) -> float:
    return float(abs(got - expected).max() / abs(expected).max())


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_tree_gives_at_each_node_what_decoding_its_path_gives(name: str) -> None:
    model = tiny_model(name)
    at_nodes, behind_path = decoded(model)
    target = TreeTarget(model, (1, 2))
    assert target.embed(nodes).shape == (len(PARENTS), target.hidden_size)
    logits, next_logits = verified(target, TreeInput(PARENTS))
    assert off(logits, at_nodes) < 2e-5
    assert off(next_logits, behind_path) < 2e-5
    for kind in "by rows", "causal":
        assert off(verified(target, wrong_tree(PARENTS, kind))[0], at_nodes) > 1e-3, kind


@pytest.mark.parametrize(
    ("name", "dtype", "bits"),
    [
        *product(("llama", "gemma2"), ("bfloat16", "float16"), (0,)),
        # MLX multiplies experts of 16 bits on a GPU alone.
        *product(("llama", "gpt_oss"), ("bfloat16",), (4, 8)),
        *product(("gemma2", "qwen3_moe"), ("bfloat16",), (4,)),
    ],
)
def test_trees_are_accepted_in_low_precision(name: str, dtype: str, bits: int) -> None:
    model = tiny_model(name, getattr(mx, dtype), bits)
    at_nodes, _ = decoded(model)
    target = TreeTarget(model)
    assert target.dtype == getattr(mx, dtype)
    right, wrong = (
        float(np.median(abs(verified(target, tree)[0] - at_nodes)))
        for tree in (TreeInput(PARENTS), wrong_tree(PARENTS, "causal"))
    )
    assert 4 * right < wrong


@pytest.mark.parametrize(
    "rope",
    [
        dict(rope_type="linear", factor=2.0),
        dict(rope_type="yarn", factor=2.0, original_max_position_embeddings=256),
        dict(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
        dict(
            rope_type="longrope",
            original_max_position_embeddings=32,
            short_factor=[1.0] * 8,
            long_factor=[1.5] * 8,
        ),
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_every_rope_takes_the_positions_of_nodes(rope: dict[str, Any]) -> None:
    model = tiny_model("llama", rope_scaling=rope)
    at_nodes, _ = decoded(model)
    assert off(verified(TreeTarget(model), TreeInput(PARENTS))[0], at_nodes) < 2e-5


REASONS = {
    "recurrent": "ArraysCache",
    "several caches": "CacheList",
    "caches of its own": "LayerCache",
    "attention within chunks": "ChunkedKVCache",
    "attention to blocks": "block_sparse",
    "positions applied outside": "small one: .*(offset|broadcast|batch dimension|Python scalars)",
    "several hidden states": r"what enters its layers is \(2, 1, 5, 64\)",
    "the output layer": r"what comes out is \(1, 5, 200\)",
    "layers that are not called": "its layers are not called as modules",
    "a final norm": "the final norm is not in the module",
    "positions that are counted": "a tree's logits are",
    "no module": "not handed on as one array",
}


@pytest.mark.parametrize(("reason", "name"), REFUSED.items())
def test_a_model_without_trees_is_refused_for_its_reason(reason: str, name: str) -> None:
    (said,) = [said for begins, said in REASONS.items() if reason.startswith(begins)]
    with pytest.raises(ConfigError, match=said) as refusal:
        TreeTarget(tiny_model(name))
    assert "use mlx_lm.generate without a drafter" in str(refusal.value)


def test_models_and_layers_that_cannot_be_read_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    flat, model = nn.Module(), tiny_model("llama")
    flat.layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    with pytest.raises(ConfigError, match="no module in it has all of its layers"):
        TreeTarget(flat)
    for layers in (4,), (1, 9):
        with pytest.raises(ConfigError, match="1 to 3 can be read"):
            TreeTarget(model, layers)
    monkeypatch.setattr(mx.distributed, "init", lambda: SimpleNamespace(size=lambda: 2))
    with pytest.raises(ConfigError, match="spread over 2 processes"):
        TreeTarget(model)


def test_the_model_stays_the_one_that_mlx_lm_made() -> None:
    model = tiny_model("gemma3_text")
    names, classes = dict(tree_flatten(model.parameters())).keys(), [*map(type, model.modules())]
    plain = model(nodes[None])
    TreeTarget(model, (1,))
    TreeTarget(model)
    assert dict(tree_flatten(model.parameters())).keys() == names
    for module, its_class in zip(model.modules(), classes, strict=True):
        assert isinstance(module, its_class) and type(module).__name__ == its_class.__name__
    assert mx.array_equal(model(nodes[None]), plain)


@pytest.mark.parametrize("name", ["gemma", "gemma2", "gemma3_text", "gemma3"])
def test_the_embedding_of_a_gemma_is_scaled(name: str) -> None:
    model = tiny_model(name, mx.bfloat16)
    target = TreeTarget(model)
    tokens = nodes.reshape(2, 4)
    inner = model.language_model.model if name == "gemma3" else model.model
    scaled = inner.embed_tokens(tokens) * mx.array(target.hidden_size**0.5, mx.bfloat16)
    assert mx.array_equal(target.embed(tokens), scaled)
    assert target.embed(tokens[0, 0]).shape == (target.hidden_size,)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "starcoder2"])
@pytest.mark.parametrize("length", [0, 5, CONTEXT])
def test_a_prompt_cache_of_mlx_lm_is_adopted_with_its_tokens(name: str, length: int) -> None:
    model = tiny_model(name)
    target, caches = TreeTarget(model), make_prompt_cache(model)
    expected = target.make_cache()
    if length:
        model(context[None, :length], cache=caches)
        target.forward(context[:length], expected)
    target.adopt(caches)
    # As far behind the prompt as a window reaches: without its window, a cache would show more.
    for tokens, tree in ((context, None), (nodes, TreeInput(PARENTS))):
        got, right = (target.forward(tokens, its, tree)[0] for its in (caches, expected))
        assert off(to_numpy(got), to_numpy(right)) < 2e-5
    # A tree that an interrupted step left is ended.
    target.adopt(caches)
    whole = mx.concatenate([context[:length], context, following])
    got, right = target.forward(following, caches)[0], target.forward(whole, target.make_cache())[0]
    assert off(to_numpy(got[-1]), to_numpy(right[-1])) < 2e-5


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ([KVCache] * 3 + [QuantizedKVCache], "QuantizedKVCache that does not keep K and V"),
        ([KVCache] * 3, "has 3 layers, and the target 4"),
    ],
)
def test_a_refused_prompt_cache_is_left_as_it_was(kinds: list[Any], message: str) -> None:
    caches = [kind() for kind in kinds]
    with pytest.raises(ConfigError, match=message):
        TreeTarget(tiny_model("llama")).adopt(caches)
    assert list(map(type, caches)) == kinds


@pytest.mark.parametrize("written", [{}, {"rope_theta": 5e5}])
def test_a_rope_theta_that_mlx_lm_does_not_read_is_refused(
    written: dict[str, float], tmp_path: Path
) -> None:
    make_target(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    edit_config(tmp_path, lambda values: values.update(written))
    model, values = load_model(tmp_path)
    if written:
        assert model.args.rope_theta == 5e5
        check_rope("target", values, model.args)
        return
    with pytest.raises(ConfigError, match=r'write "rope_theta": 500000.0 into its config.json'):
        check_rope("target", values, model.args)
