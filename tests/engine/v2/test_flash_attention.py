# SPDX-License-Identifier: Apache-2.0
"""Rows that are no tree's through FlashAttention: on a GPU the real one, elsewhere plain torch."""

import re
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends import triton_attn

from redrafter_testing.gpu import torch_flash_attention
from redrafter_testing.gpu.step_metadata import step_metadata
from vllm_redrafter.engine.v2 import flash_attention
from vllm_redrafter.engine.v2.attention import TreeAttentionImpl, TreeAttentionMetadata, TreeRows

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 4, 2, 64, 16

TREES = [(20, 9), (3, 9)]
"""Context and rows of the batch's first requests, which are trees."""

OTHERS = [(0, 30), (40, 1), (50, 17)]
"""A prompt's first chunk, a plain decode, a prompt's last chunk."""


@pytest.fixture(autouse=True)
def in_torch_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not ON_GPU:
        torch_flash_attention.use(partial(monkeypatch.setattr, raising=False))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


def batch(
    trees: list[tuple[int, int]], mixed_graph: bool = False
) -> tuple[dict[str, Any], TreeAttentionMetadata, int]:
    """Tensors of a layer in bf16, the step's metadata, and its number of tree rows."""
    requests = [*trees, *OTHERS, *[(0, 0)] * mixed_graph]
    generator = torch.Generator().manual_seed(0)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float32).bfloat16().to(DEVICE)

    rows = [count for _, count in requests]
    lengths = [n + count for n, count in requests]
    width = -(-max(lengths) // BLOCK_SIZE)
    blocks = torch.randperm(len(requests) * width, generator=generator)
    layer = {
        "query": randn(sum(rows), HEADS, HEAD_SIZE),
        "key": randn(sum(rows), KV_HEADS, HEAD_SIZE),
        "value": randn(sum(rows), KV_HEADS, HEAD_SIZE),
        "kv_cache": randn(len(blocks), KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE),
    }
    table = blocks.view(len(requests), width).to(torch.int32).to(DEVICE)
    metadata = step_metadata(rows, lengths, table)
    # FlashAttention counts these, and vLLM's may be longer.
    metadata.seq_lens = torch.nn.functional.pad(metadata.seq_lens, (0, 2 if trees else 0))
    tree_rows = sum(count for _, count in trees)
    if trees or mixed_graph:
        staged: Any = None
        starts = metadata.query_start_loc
        split = TreeRows(staged, len(trees), tree_rows, 9, 1, starts[len(trees) :] - tree_rows)
        if mixed_graph:
            of_each = starts.clamp(min=tree_rows), starts.clamp(max=tree_rows)
            split = TreeRows(staged, len(requests), sum(rows), 9, 1, *of_each)
        metadata.set_trees(split)
    return layer, metadata, tree_rows


def test_rows_of_an_image_go_through_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, metadata, rows = batch(TREES)
    spans = torch.zeros(len(TREES) + len(OTHERS), 1, 2, dtype=torch.int32)
    spans[len(TREES)] = torch.tensor([2, 9])
    metadata.mm_prefix_range_tensor = spans
    forward = MagicMock()
    monkeypatch.setattr(triton_attn.TritonAttentionImpl, "forward", forward)
    out, _ = attention(layer, metadata)
    _, given, _, _, _, rest, *_ = forward.call_args.args
    images = rest.mm_prefix_range_tensor
    assert given.shape[0] == len(out) - rows
    assert images[: len(OTHERS)].tolist() == [[[2, 9]], [[0, 0]], [[0, 0]]]


def attention_layer(window: int | None = None, soft_cap: float | None = None) -> TreeAttentionImpl:
    return TreeAttentionImpl(HEADS, HEAD_SIZE, 0.2, KV_HEADS, None, window, "auto", soft_cap)


def attention(
    layer: dict[str, Any],
    metadata: TreeAttentionMetadata,
    window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What ours makes of the batch, trees' rows being 7, and all rows' attention in float64."""
    impl = attention_layer(window, soft_cap)
    assert flash_attention.flash_attention(impl) is not None
    trees: Any = SimpleNamespace(attend=lambda q, k, v, out, **_: out.fill_(7))
    metadata.tree_attention = lambda block_size: trees  # type: ignore[method-assign]
    one = torch.ones(1, device=DEVICE)
    scales = SimpleNamespace(_q_scale=one, _k_scale=one, _v_scale=one)
    out = torch.zeros_like(layer["query"])
    assert impl.forward(scales, **layer, attn_metadata=metadata, output=out) is out
    keys, values = layer["kv_cache"].transpose(1, 2).cpu().split(HEAD_SIZE, dim=-1)
    expected = torch.zeros_like(out, dtype=torch.float64, device="cpu")
    torch_flash_attention.flash_attn_varlen_func(
        q=layer["query"].cpu(),
        k=keys,
        v=values,
        out=expected,
        cu_seqlens_q=metadata.query_start_loc.cpu(),
        max_seqlen_q=metadata.max_query_len,
        seqused_k=metadata.seq_lens[: len(metadata.block_table)].cpu(),
        max_seqlen_k=metadata.max_seq_len,
        softmax_scale=0.2,
        causal=True,
        window_size=[(window or 0) - 1, 0],
        block_table=metadata.block_table.cpu(),
        softcap=soft_cap or 0.0,
        s_aux=None,
        alibi_slopes=None,
    )
    return out.cpu().double(), expected


@pytest.mark.parametrize("mixed_graph", [False, True])
@pytest.mark.parametrize("trees", [[], TREES], ids=["no trees", "beside trees"])
@pytest.mark.parametrize("variant", [{}, {"window": 12}, {"soft_cap": 3.0}, None], ids=str)
def test_prompts_and_plain_decodes_are_attention(
    trees: list[tuple[int, int]], mixed_graph: bool, variant: dict[str, Any] | None
) -> None:
    layer, metadata, rows = batch(trees, mixed_graph)
    if variant is None:  # it reads another's cache, and has no K and V of its own
        layer |= {"key": None, "value": None}
    out, expected = attention(layer, metadata, **(variant or {}))
    assert (out[:rows] == 7).all(), "the trees' rows"
    error = (out[rows:] - expected[rows:]).norm(dim=-1) / expected[rows:].norm(dim=-1)
    assert error.max() < 2e-2


def test_it_writes_the_cache_that_trees_read(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, *_ = batch(TREES)
    key, value, cache = layer["key"], layer["value"], layer["kv_cache"]
    monkeypatch.setattr(triton_attn, "triton_reshape_and_cache_flash", None)  # not asked
    slots = torch.randperm(len(cache) * BLOCK_SIZE)[: len(key)]
    slots[3] = -1  # A row of padding.
    expected = cache.clone().transpose(1, 2).flatten(0, 1)  # [slots, KV heads, K and V]
    written = slots >= 0
    expected[slots[written].to(DEVICE)] = torch.cat([key, value], dim=-1)[written.to(DEVICE)]
    one = torch.ones(1, device=DEVICE)
    scales = SimpleNamespace(_k_scale=one, _v_scale=one)
    attention_layer().do_kv_cache_update(scales, key, value, cache, slots.to(DEVICE))
    assert cache.transpose(1, 2).flatten(0, 1).equal(expected)


LAYER: dict[str, Any] = {
    "head_size": 128,
    "kv_cache_dtype": "auto",
    "sinks": None,
    "attn_type": AttentionType.DECODER,
    "sliding_window": (-1, -1),
}


@pytest.mark.parametrize(
    ("changed", "dtype", "capability", "reason"),
    [
        ({"sliding_window": (4095, 0)}, torch.float16, (8, 0), None),
        ({}, torch.float32, (9, 0), "dtype not supported"),
        ({"head_size": 512}, torch.bfloat16, (9, 0), "beyond head size 256 .this layer's is 512"),
        ({"kv_cache_dtype": "fp8"}, torch.bfloat16, (9, 0), "queries in fp8"),
        ({"sinks": torch.zeros(4)}, torch.bfloat16, (8, 0), "sink"),
    ],
)
def test_where_flash_attention_cannot_serve_a_layer_there_is_a_reason(
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, Any],
    dtype: torch.dtype,
    capability: tuple[int, int],
    reason: str | None,
) -> None:
    monkeypatch.undo()
    platform: Any = SimpleNamespace(
        is_cuda=lambda: True, get_device_capability=lambda: DeviceCapability(*capability)
    )
    monkeypatch.setattr(flash_attention, "current_platform", platform)
    layer: Any = SimpleNamespace(**LAYER | changed)
    obstacles = list(flash_attention.obstacles(layer, dtype))
    assert bool(obstacles) == (reason is not None)
    assert reason is None or re.search(reason, obstacles[0])


def test_the_log_says_which_attention_reads_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    config = SimpleNamespace(model_config=SimpleNamespace(is_mm_prefix_lm=True))
    monkeypatch.setattr(flash_attention, "get_current_vllm_config_or_none", lambda: config)
    monkeypatch.setattr(
        flash_attention.logger, "info_once", lambda text, *args: logged.append(text % args)
    )
    attention_layer()
    assert "Prompts with images are read by vLLM's Triton attention, not by" in logged[-1]
    monkeypatch.setattr(flash_attention, "obstacles", lambda *_: iter(["it needs a GPU"]))
    layer: Any = SimpleNamespace(**LAYER)
    assert flash_attention.flash_attention(layer) is None
    assert logged[-1].endswith("vLLM's Triton attention, not by FlashAttention: it needs a GPU")
