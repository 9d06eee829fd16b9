# SPDX-License-Identifier: Apache-2.0
"""A tiny random model of every class of mlx-lm, by the name of its module."""

import tomllib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from vllm_redrafter.mlx.tree_cache import TreeInput

ACCEPTED = str.split("""
    cohere2 deepseek_v2 deepseek_v3 exaone4 gemma gemma2 gemma3 gemma3_text gemma4 gemma4_text
    glm4 gpt_oss granite llama llama4_text minicpm3 mistral3 mixtral nemotron-nas
    olmo2 phi3 qwen qwen2 qwen3 qwen3_moe stablelm starcoder2
""")

REFUSED = {
    "recurrent or convolutional layers (`ArraysCache`)": "mamba",
    "several caches in one layer (`CacheList`)": "deepseek_v32",
    "caches of its own (`LayerCache`)": "deepseek_v41",
    "attention within chunks of the context (`ChunkedKVCache`)": "llama4",
    "attention to blocks of rows (`block_sparse`)": "phi3small",
    "positions applied outside of a rope module": "gpt2",
    "several hidden states for a token": "gemma3n",
    "the output layer in the module with the layers": "gpt_neox",
    "layers that are not called as modules": "iquestloopcoder",
    "a final norm outside of the module with the layers": "phixtral",
    "positions that are counted by rows in layers that share K and V": "afm7",
    "no module that returns what all layers make of a token": "plamo",
}
"""By the reason."""

SIZES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
COMMON: dict[str, Any] = {"rope_scaling": None, **SIZES["common"]}
VOCAB, WINDOW = COMMON["vocab_size"], COMMON["sliding_window"]
"""`WINDOW`: positions that layers with a sliding window see."""


def tiny_model(name: str, dtype: mx.Dtype = mx.float32, bits: int = 0, **special: Any) -> nn.Module:
    """The `Model` of `mlx_lm.models.<name>` with random weights; 0 bits: not quantised."""
    module = import_module(f"mlx_lm.models.{name}")
    mx.random.seed(0)
    given = SIZES["special"].get(name, {})
    if name in SIZES["text"]:
        given = {"text_config": {**COMMON, **SIZES["text"][name]}}
    arguments = {**COMMON, "model_type": name, **given, **special}
    model = module.Model(module.ModelArgs.from_dict(arguments))
    # What begins as zeros, such as biases, would hide what is done with it.
    model.update(tree_map(_without_zeros, model.parameters()))
    model.set_dtype(dtype)
    if bits:
        nn.quantize(model, 32, bits)
    mx.eval(model.parameters())
    return model


def _without_zeros(weights: mx.array) -> mx.array:
    if not mx.issubdtype(weights.dtype, mx.floating) or bool(mx.any(weights)):
        return weights
    return 0.1 * mx.random.normal(weights.shape)


WRONG: dict[str, Callable[[int], tuple[str, Any]]] = {
    "causal": lambda n: ("sees", np.tri(n, dtype=bool)),
    "blind": lambda n: ("sees", np.eye(n, dtype=bool)),
    "by rows": lambda n: ("depths", np.arange(n, dtype=np.int32)),
    "at the root": lambda n: ("depths", np.zeros(n, np.int32)),
}
"""Trees that are wrong, by how: what they have in place of the right mask or depths."""


def wrong_tree(parents: Any, kind: str) -> TreeInput:
    tree = TreeInput(parents)
    setattr(tree, *WRONG[kind](len(parents)))
    return tree
