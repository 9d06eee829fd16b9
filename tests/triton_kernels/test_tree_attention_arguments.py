# SPDX-License-Identifier: Apache-2.0
"""What the attention kernel refuses, by name."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from redrafter_testing.algorithm.tree_batches import bushy, chain
from redrafter_testing.gpu.tree_attention_launch import (
    Launch,
    Shape,
)
from vllm_redrafter.triton_kernels.tree_attention import tree_attention

pytestmark = pytest.mark.usefixtures("new_tensors_hold_nan")


def strided(tensor: Tensor) -> Tensor:
    """The same numbers, with a last dimension that is not contiguous."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


def meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


def small(**sizes: int) -> Callable[[Tensor], Tensor]:
    """Narrow the dimensions, named d0, d1, ..., to these sizes."""

    def cut(tensor: Tensor) -> Tensor:
        for dim, size in sizes.items():
            tensor = tensor.narrow(int(dim[1:]), 0, size)
        return tensor

    return cut


REFUSED: list[tuple[str, Callable[[Any], Any]]] = [
    ("query", Tensor.double),
    ("query", Tensor.int),
    ("query", strided),
    ("query", lambda query: query[0]),
    ("query", lambda query: query[..., :48]),
    ("key_cache", Tensor.half),
    ("key_cache", lambda cache: cache.view(torch.int32)),
    ("key_cache", lambda cache: cache.to(torch.float8_e5m2)),
    ("key_cache", strided),
    ("key_cache", meta),
    ("key_cache", lambda cache: cache[0]),
    ("key_cache", lambda cache: cache[..., :32]),
    ("key_cache", lambda cache: cache.repeat(1, 1, 3, 1)),
    ("value_cache", Tensor.half),
    ("value_cache", strided),
    ("value_cache", meta),
    ("value_cache", lambda cache: cache[..., :32]),
    ("value_cache", small(d0=1)),
    ("value_cache", small(d1=8)),
    ("value_cache", small(d2=1)),
    ("block_table", Tensor.long),
    ("block_table", strided),
    ("block_table", meta),
    ("block_table", small(d1=1)),
    ("block_table", lambda table: table[0]),
    ("block_table", small(d0=1)),
    ("context_lens", Tensor.long),
    ("context_lens", strided),
    ("context_lens", meta),
    ("context_lens", small(d0=1)),
    ("query_start_loc", Tensor.long),
    ("query_start_loc", strided),
    ("query_start_loc", meta),
    ("query_start_loc", small(d0=2)),
    ("ancestors", Tensor.long),
    ("ancestors", strided),
    ("ancestors", meta),
    ("ancestors", small(d0=1)),
    ("ancestors", small(d1=4)),
    ("ancestors", small(d2=1)),
    ("ancestors", lambda bits: bits[0]),
    ("max_nodes", lambda _: 0),
    ("max_nodes", lambda _: 129),
    ("out", Tensor.half),
    ("out", strided),
    ("out", meta),
    ("out", small(d0=1)),
    ("depths", lambda _: None),
    ("depths", Tensor.long),
    ("depths", strided),
    ("depths", meta),
    ("depths", small(d0=1)),
    ("depths", small(d1=4)),
    ("sinks", Tensor.int),
    ("sinks", strided),
    ("sinks", meta),
    ("sinks", small(d0=1)),
    ("lse", Tensor.half),
    ("lse", strided),
    ("lse", meta),
    ("lse", small(d1=1)),
    ("num_parts", lambda _: 0),
]


@pytest.fixture(scope="module")
def good_arguments(device: torch.device) -> dict[str, Any]:
    launch = Launch(device, [(20, bushy(40)), (3, chain(5))], Shape(group=1))
    arguments = launch.arguments() | {
        "out": torch.empty_like(launch.query).contiguous(),
        "depths": launch.depths,
        "sliding_window": 3,
        "sinks": launch.sinks,
        "lse": launch.query.new_empty(launch.query.shape[:2]),
        "num_parts": 2,
    }
    tree_attention(**arguments)
    return arguments


@pytest.mark.parametrize(("name", "spoil"), REFUSED, ids=[name for name, _ in REFUSED])
def test_what_does_not_fit_is_refused_by_name(
    good_arguments: dict[str, Any], name: str, spoil: Callable[[Any], Any]
) -> None:
    bad = good_arguments | {name: spoil(good_arguments[name])}
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        tree_attention(**bad)


def test_a_block_table_too_short_for_the_context_is_refused(
    good_arguments: dict[str, Any],
) -> None:
    width = good_arguments["block_table"].shape[1]
    with pytest.raises(ValueError, match=r"^block_table: .* which need"):
        tree_attention(**good_arguments | {"max_context_len": width * 16})


def test_a_query_head_dim_without_a_kernel_is_refused(device: torch.device) -> None:
    shape = replace(Shape(), head_dim=72)
    with pytest.raises(ValueError, match="head_dim 72 is not supported"):
        tree_attention(**Launch(device, [(3, [0])], shape).arguments())
