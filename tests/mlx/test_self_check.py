# SPDX-License-Identifier: Apache-2.0
"""The check at load refuses what is wrong, also in low precision."""

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import llama
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from redrafter_testing.models.mlx_models import WRONG, tiny_model, wrong_tree
from vllm_redrafter.mlx import self_check, taps, target
from vllm_redrafter.mlx.target import TreeTarget
from vllm_redrafter.mlx.tree_cache import TreeCache
from vllm_redrafter.utils.errors import ConfigError

PRECISIONS = [("float32", 0), ("bfloat16", 0), ("float16", 0), ("bfloat16", 4), ("float16", 8)]


@pytest.mark.parametrize(("dtype", "bits"), PRECISIONS)
@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_tree_is_refused(
    kind: str, dtype: str, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_check, "TreeInput", partial(wrong_tree, kind=kind))
    model = tiny_model("llama", getattr(mx, dtype), bits)
    with pytest.raises(ConfigError, match=r"a tree's logits are .* off"):
        TreeTarget(model)


def test_a_wrong_compaction_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    first = partial(mx.arange, len(self_check.LEAVES[-1]))
    rows_of = TreeCache.rows_of
    monkeypatch.setattr(TreeCache, "rows_of", lambda cache, path: rows_of(cache, first()))
    with pytest.raises(ConfigError, match=r"the logits behind a kept path are .* off"):
        TreeTarget(tiny_model("llama"))


def test_ropes_without_positions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "take_positions", lambda model: None)
    with pytest.raises(ConfigError, match=r"it fails on a small one: \[rope\] offset"):
        TreeTarget(tiny_model("llama"))
    monkeypatch.setattr(target, "take_positions", taps.take_positions)
    TreeTarget(tiny_model("llama"))


def with_head(model: Any, head: Callable[[Any, Any], Any]) -> Any:
    """The same model, whose logits are made of tokens and of what its layers end in."""

    class Other(llama.Model):
        def __call__(self, inputs: Any, cache: Any = None) -> Any:
            return head(inputs, self.model(inputs, cache))

    model.__class__ = Other
    return model


@pytest.mark.parametrize(
    ("reads_tokens", "message"),
    [
        (True, r"its logits do not come from the output .* alone"),
        (False, "the final norm is not in the module"),
    ],
)
def test_logits_of_more_than_the_normed_hidden_states_are_refused(
    reads_tokens: bool, message: str
) -> None:
    model = tiny_model("llama")
    norm, table = model.model.norm, model.model.embed_tokens

    def head(tokens: Any, hidden: Any) -> Any:
        return table.as_linear(hidden + table(tokens) if reads_tokens else norm(hidden))

    with pytest.raises(ConfigError, match=message):
        TreeTarget(with_head(model, head))


class Looped(llama.LlamaModel):
    """Runs its layers twice."""

    def __call__(self, inputs: Any, cache: Any = None, input_embeddings: Any = None) -> Any:
        hidden, caches = self.embed_tokens(inputs), cache or [None] * 2 * len(self.layers)
        mask = create_attention_mask(hidden, caches[0])
        for layer, its_cache in zip(2 * self.layers, caches, strict=True):
            hidden = layer(hidden, mask, its_cache)
        return self.norm(hidden)


def test_a_layer_that_runs_twice_cannot_be_read() -> None:
    model = tiny_model("llama", layer_types=None)
    model.model.__class__ = Looped
    other = with_head(model, lambda _, hidden: model.model.embed_tokens.as_linear(hidden))
    type(other).make_cache = lambda self: [KVCache() for _ in 2 * self.layers]
    assert len(TreeTarget(other).make_cache()) == 8
    with pytest.raises(ConfigError, match="its layers run more than once in a pass"):
        TreeTarget(other, (1,))
