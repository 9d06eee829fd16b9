# SPDX-License-Identifier: Apache-2.0
"""The order in which K and V lie in a block is found out, on any processor."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from vllm._custom_ops import cpu_attn_reshape_and_cache

from redrafter_testing.engines.cpu_layouts import write_with
from vllm_redrafter.engine.cpu.cache_layout import as_integers, cache_layout
from vllm_redrafter.utils.errors import ConfigError

BLOCKS, KV_HEADS = 3, 2
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [(32, 32), (64, 128), (80, 64), (512, 128)]  # head size, block size


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_size", "block_size"), SIZES)
@pytest.mark.parametrize("isa", ["vec", "vec16", "amx"])
def test_rows_are_found_where_vllm_writes_them(
    isa: str, head_size: int, block_size: int, dtype: torch.dtype
) -> None:
    if isa == "amx" and (dtype != torch.bfloat16 or not torch.cpu._is_amx_tile_supported()):
        pytest.skip("AMX is for bfloat16, on processors that have it")
    layout = cache_layout(isa, head_size, block_size, dtype)
    # K and V, any bits, NaN among them.
    width = torch.int32 if dtype == torch.float32 else torch.int16
    info, shape = torch.iinfo(width), (2, BLOCKS, KV_HEADS, block_size, head_size)
    rows = torch.randint(info.min, info.max, shape, dtype=width).view(dtype)
    cache = torch.zeros(BLOCKS, KV_HEADS, block_size, 2 * head_size, dtype=dtype)
    halves = cache.view(BLOCKS, KV_HEADS, 2 * block_size, head_size).chunk(2, dim=2)
    by_slot = rows.transpose(2, 3).flatten(1, 2)
    # As the tokens of a sequence come: some, one, the others.
    for some in torch.randperm(BLOCKS * block_size).tensor_split([7, 8]):
        cpu_attn_reshape_and_cache(*by_slot[:, some], *halves, some, isa)
    numbers = as_integers(cache)[..., torch.from_numpy(layout.places)]
    assert torch.equal(numbers, as_integers(torch.cat([*rows], dim=-1)).view_as(numbers))


SHUFFLED = torch.Generator().manual_seed(1)
WRONG_ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "the last unit first": lambda rows: rows.flip(0),
    "scattered": lambda rows: rows.flatten()[torch.randperm(rows.numel(), generator=SHUFFLED)],
    "two numbers in the place of one": lambda rows: (rows.flatten() / 2).floor(),
}


@pytest.mark.parametrize("order", WRONG_ORDERS.values(), ids=WRONG_ORDERS)
@pytest.mark.parametrize("half", ["K", "V"])
def test_an_order_is_refused_out_of_which_no_unit_can_be_copied(
    order: Callable[[Tensor], Tensor], half: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = (order, torch.clone) if half == "K" else (torch.clone, order)
    write_with(monkeypatch, *orders)
    with pytest.raises(ConfigError) as refusal:
        cache_layout("new", 64, 128, torch.bfloat16)
    for named in ("instruction set 'new'", "head size 64", "block size 128", "torch.bfloat16"):
        assert named in str(refusal.value)
    assert "choose another --dtype, or run without --spec-model" in str(refusal.value)
