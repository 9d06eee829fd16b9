# SPDX-License-Identifier: Apache-2.0
"""What the attention kernel refuses, by name."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from redrafter_testing.algorithm.tree_batches import bushy, chain, strided
from redrafter_testing.gpu.tree_attention_launch import (
    Launch,
    Shape,
)
from vllm_redrafter.triton_kernels.tree_attention import tree_attention

pytestmark = pytest.mark.usefixtures("new_tensors_hold_nan")


def meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


def small(**sizes: int) -> Callable[[Tensor], Tensor]:
    """Narrow the dimensions, named d0, d1, ..., to these sizes."""

    def cut(tensor: Tensor) -> Tensor:
        for dim, size in sizes.items():
            tensor = tensor.narrow(int(dim[1:]), 0, size)
        return tensor

    return cut


TENSORS = (
    *("query", "key_cache", "value_cache", "block_table", "context_lens", "query_start_loc"),
    *("ancestors", "out", "depths", "sinks", "lse"),
)
REFUSED: list[tuple[str, Callable[[Any], Any]]] = [
    *((name, strided) for name in TENSORS),
    *((name, meta) for name in TENSORS[1:]),
    *((name, Tensor.half) for name in ("key_cache", "value_cache", "out", "lse")),
    *((name, Tensor.long) for name in (*TENSORS[3:7], "depths")),
    *((name, small(d0=1)) for name in (*TENSORS[2:5], "ancestors", "out", "depths", "sinks")),
    ("query", Tensor.double),
    ("query", lambda query: query[0]),
    ("query", lambda query: query[..., :48]),
    ("key_cache", lambda cache: cache.view(torch.int32)),
    ("key_cache", lambda cache: cache.to(torch.float8_e5m2)),
    ("key_cache", lambda cache: cache[0]),
    ("key_cache", lambda cache: cache.repeat(1, 1, 3, 1)),
    ("value_cache", lambda cache: cache[..., :32]),
    ("value_cache", small(d1=8)),
    ("value_cache", small(d2=1)),
    ("block_table", small(d1=1)),
    ("query_start_loc", small(d0=2)),
    ("ancestors", small(d1=4)),
    ("ancestors", small(d2=1)),
    ("depths", small(d1=4)),
    ("lse", small(d1=1)),
    ("depths", lambda _: None),
    ("sinks", Tensor.int),
    ("max_nodes", lambda _: 0),
    ("max_nodes", lambda _: 129),
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
