# SPDX-License-Identifier: Apache-2.0
"""Every model class of mlx-lm: trees are what plain decoding is, or they are refused."""

from collections.abc import Callable
from copy import deepcopy
from itertools import product
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")
nn = pytest.importorskip("mlx.nn")
pytest.importorskip("mlx_lm")

from mlx.utils import tree_flatten
from mlx_lm.models.cache import (
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from redrafter_testing.models import mlx_models
from redrafter_testing.models.mlx_accepted import ACCEPTED, REFUSED
from redrafter_testing.models.mlx_models import VOCAB, tiny_model
from vllm_redrafter.mlx.target import TreeTarget
from vllm_redrafter.mlx.tree_cache import TreeInput
from vllm_redrafter.utils.errors import ConfigError

PARENTS = (0, 0, 0, 1, 1, 2, 3, 6)
LEAVES = ((0, 2, 5), (0, 1, 4), (0, 1, 3, 6, 7))
PATH = LEAVES[-1]

CONTEXT = 3 * mlx_models.WINDOW + 5
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


def with_rows_for_positions(tree: TreeInput) -> TreeInput:
    tree.depths = np.arange(len(PARENTS), dtype=np.int32)
    return tree


def with_a_causal_mask(tree: TreeInput) -> TreeInput:
    tree.sees = np.tri(len(PARENTS), dtype=bool)
    return tree


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_tree_gives_at_each_node_what_decoding_its_path_gives(name: str) -> None:
    model = tiny_model(name)
    at_nodes, behind_path = decoded(model)
    target = TreeTarget(model, (1, 2))
    assert target.embed(nodes).shape == (len(PARENTS), target.hidden_size)
    logits, next_logits = verified(target, TreeInput(PARENTS))
    assert off(logits, at_nodes) < 2e-5
    assert off(next_logits, behind_path) < 2e-5
    for wrong in with_rows_for_positions, with_a_causal_mask:
        assert off(verified(target, wrong(TreeInput(PARENTS)))[0], at_nodes) > 1e-3, wrong


noise = rng.gumbel(size=(CONTEXT + 80, VOCAB))


def drawn(logits: Any, position: int) -> int:
    """The token at a position, drawn by a seeded sampler whose noise belongs to the position.

    The most probable one would not do: random models repeat it, whatever they see.
    """
    return int(np.argmax(to_numpy(logits) + noise[position]))


def decoded_by_tokens(model: Any, count: int) -> list[int]:
    """Behind the context, by mlx-lm alone."""
    caches, tokens = make_prompt_cache(model), []
    logits = model(context[None], cache=caches)[0, -1]
    for position in range(CONTEXT, CONTEXT + count):
        tokens.append(drawn(logits, position))
        logits = model(mx.array([tokens[-1:]]), cache=caches)[0, -1]
    return tokens


def decoded_by_trees(
    target: TreeTarget, plain: list[int], kept: Callable[[list[int]], list[int]]
) -> tuple[list[int], int]:
    """The same, and in how many steps; a tree has what follows in `plain` for some depths.

    Args:
        kept: the nodes whose rows become tokens, of those walked.
    """
    caches, draws = target.make_cache(), np.random.default_rng(0)
    tokens, steps = [drawn(target.forward(context, caches)[0][-1], CONTEXT)], 0
    while len(tokens) < len(plain):
        drafted = draws.integers(0, VOCAB, len(PARENTS))
        right = plain[len(tokens) : len(tokens) + draws.integers(0, len(PATH))]
        drafted[list(PATH[1 : 1 + len(right)])] = right
        drafted[0] = tokens[-1]
        logits, _ = target.forward(mx.array(drafted), caches, TreeInput(PARENTS))
        path, position = [0], CONTEXT + len(tokens)
        tokens.append(drawn(logits[0], position))
        for node, parent in enumerate(PARENTS):
            if node and parent == path[-1] and drafted[node] == tokens[-1]:
                path.append(node)
                tokens.append(drawn(logits[node], position + len(path) - 1))
        rows = [cache.rows_of(mx.array(kept(path))) for cache in caches]
        mx.eval(rows)
        for cache, its_rows in zip(caches, rows, strict=True):
            cache.keep(its_rows, len(path))
        steps += 1
    return tokens[: len(plain)], steps


@pytest.mark.parametrize(
    "name", ["llama", "qwen3_moe", "gemma3_text", "gemma4_text", "gpt_oss", "deepseek_v3"]
)
def test_steps_of_trees_give_the_tokens_of_plain_decoding(name: str) -> None:
    model = tiny_model(name)
    plain = decoded_by_tokens(model, 60)
    target = TreeTarget(model)
    tokens, steps = decoded_by_trees(target, plain, kept=lambda path: path)
    assert tokens == plain and steps < 40
    in_order, _ = decoded_by_trees(target, plain, kept=lambda path: list(range(len(path))))
    assert in_order != plain, "rows that are not compacted are not seen"


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
        for tree in (TreeInput(PARENTS), with_a_causal_mask(TreeInput(PARENTS)))
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


@pytest.mark.parametrize(
    ("reason", "name"),
    [(reason, name) for reason, names in REFUSED.items() for name in names],
)
def test_a_model_without_trees_is_refused_for_its_reason(reason: str, name: str) -> None:
    (said,) = [said for begins, said in REASONS.items() if reason.startswith(begins)]
    with pytest.raises(ConfigError, match=said) as refusal:
        TreeTarget(tiny_model(name))
    assert "use mlx_lm.generate without a drafter" in str(refusal.value)


def test_a_rope_that_depends_on_the_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="it fails on a small one"):
        TreeTarget(tiny_model("llama", rope_scaling=dict(rope_type="dynamic", factor=2.0)))


def test_a_model_around_a_refused_one_is_refused() -> None:
    inner = mlx_models.COMMON | dict(model_type="ministral3", rope_parameters=mlx_models.YARN)
    with pytest.raises(ConfigError, match="mistral3: it fails on a small one"):
        TreeTarget(tiny_model("mistral3", text_config=inner))


def test_a_model_with_layers_in_no_common_module_is_refused() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.Linear(4, 4), nn.Linear(4, 4)]

    with pytest.raises(ConfigError, match="no module in it has all of its layers"):
        TreeTarget(Flat())


def test_a_model_in_a_distributed_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        def size(self) -> int:
            return 2

    monkeypatch.setattr(mx.distributed, "init", Group)
    with pytest.raises(ConfigError, match="spread over 2 processes"):
        TreeTarget(tiny_model("llama"))


@pytest.mark.parametrize("layers", [(4,), (1, 9)])
def test_a_layer_that_the_model_lacks_is_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="1 to 3 can be read"):
        TreeTarget(tiny_model("llama"), layers)


def test_hidden_states_are_the_last_and_those_that_enter_the_named_layers() -> None:
    model = tiny_model("llama")
    target, entered = TreeTarget(model, (1, 3)), [model.model.embed_tokens(nodes)[None]]
    for layer in model.layers:
        entered.append(layer(entered[-1], "causal", None))
    logits, hidden = target.forward(nodes, target.make_cache())
    expected = [model.model.norm(entered[-1]), entered[1], entered[3]]
    assert hidden.shape == (8, 3 * target.hidden_size)
    assert mx.allclose(hidden, mx.concatenate(expected, axis=-1)[0], atol=1e-5)
    assert mx.allclose(logits, model.model.embed_tokens.as_linear(expected[0])[0], atol=1e-4)


def test_targets_of_one_model_each_read_their_own_layers() -> None:
    model = tiny_model("qwen3")
    first = TreeTarget(model, (1,))
    second, third = TreeTarget(model, (2, 3)), TreeTarget(model)
    caches = [target.make_cache() for target in (first, second, third)]
    size = first.hidden_size
    one = first.forward(nodes, caches[0])[1]
    two = second.forward(nodes, caches[1])[1]
    assert third.forward(nodes, caches[2])[1].shape == (8, size)
    assert one.shape == (8, 2 * size) and two.shape == (8, 3 * size)
    assert mx.array_equal(one[:, :size], two[:, :size])
    assert not mx.allclose(one[:, size:], two[:, size : 2 * size])


def test_the_model_stays_the_one_that_mlx_lm_made() -> None:
    model = tiny_model("gemma3_text")
    before, classes = tree_flatten(model.parameters()), list(map(type, model.modules()))
    plain = model(nodes[None])
    TreeTarget(model, (1,))
    TreeTarget(model)
    assert [name for name, _ in tree_flatten(model.parameters())] == [name for name, _ in before]
    assert all(map(isinstance, model.modules(), classes))
    assert [type(module).__name__ for module in model.modules()] == [
        its_class.__name__ for its_class in classes
    ]
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


def test_the_embedding_of_a_llama_is_a_row_of_its_table() -> None:
    model = tiny_model("llama", bits=4)
    assert mx.array_equal(TreeTarget(model).embed(nodes), model.model.embed_tokens(nodes))


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


def test_a_prompt_cache_that_has_dropped_tokens_is_refused() -> None:
    model = tiny_model("gemma3_text")
    target, caches = TreeTarget(model), make_prompt_cache(model)
    model(context[None], cache=caches)
    model(following[None], cache=caches)
    with pytest.raises(ConfigError, match="RotatingKVCache that does not keep K and V"):
        target.adopt(caches)


def test_a_prompt_cache_of_bounded_size_is_refused() -> None:
    model = tiny_model("qwen3")
    with pytest.raises(ConfigError, match=r"RotatingKVCache .* without kv_bits and max_kv_size"):
        TreeTarget(model).adopt(make_prompt_cache(model, max_kv_size=512))


def test_a_refused_prompt_cache_is_left_as_it_was() -> None:
    target = TreeTarget(tiny_model("llama"))
    caches = [KVCache(), KVCache(), KVCache(), QuantizedKVCache()]
    with pytest.raises(ConfigError, match="QuantizedKVCache that does not keep K and V"):
        target.adopt(caches)
    assert list(map(type, caches)) == [KVCache, KVCache, KVCache, QuantizedKVCache]


def test_adopting_ends_a_tree_that_an_interrupted_step_left() -> None:
    target = TreeTarget(tiny_model("llama"))
    caches, expected = target.make_cache(), target.make_cache()
    for its_caches in caches, expected:
        target.forward(context, its_caches)
    target.forward(nodes, caches, TreeInput(PARENTS))
    target.adopt(caches)
    got, right = (target.forward(following, its)[0] for its in (caches, expected))
    assert off(to_numpy(got), to_numpy(right)) < 2e-5


def test_a_prompt_cache_of_another_model_is_refused() -> None:
    target = TreeTarget(tiny_model("llama"))
    with pytest.raises(ConfigError, match="has 3 layers, and the target 4"):
        target.adopt([KVCache(), KVCache(), RotatingKVCache(8)])
