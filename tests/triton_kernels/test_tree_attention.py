"""The attention kernel equals float64 attention along each node's own path, and touches no more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from redrafter_testing.algorithm.tree_batches import bushy, chain, poisoned, star, token_trees
from vllm_redrafter.engine.cpu.tree_attention import (
    AttentionVariant,
    TreeQueries,
    paged_tree_attention,
)
from vllm_redrafter.engine.cpu.tree_parts import Workspace
from vllm_redrafter.triton_kernels import tree_attention as tree_attention_module
from vllm_redrafter.triton_kernels.tree_attention import naive_tree_attention, tree_attention
from vllm_redrafter.triton_kernels.tree_attention_arguments import HEAD_DIMS
from vllm_redrafter.triton_kernels.tree_attention_tiles import (
    MIN_PART_KEYS,
    TILES,
    choose_parts,
    choose_tile,
    padded,
)

FP8 = torch.float8_e4m3fn
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 1e-2}
"""The largest |out - reference| / |reference|, 2-norms over head_dim, of any row and head."""

SENTINEL = 777.0
NO_BLOCK = 2**30
"""A block id far outside the cache: reading it is an access to wild memory."""

Request = tuple[int, list[int]]
"""Context length and tree; no nodes at all for a request that only fills up a batch."""


@dataclass(frozen=True)
class Shape:
    head_dim: int = 64
    kv_heads: int = 2
    group: int = 2
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    layout: str = "NHD"


def make_caches(shape: Shape, blocks: int) -> tuple[Tensor, Tensor]:
    """K and V, [blocks, block_size, KV heads, head_dim], all NaN."""
    rows, heads, dim = shape.block_size, shape.kv_heads, shape.head_dim

    def full(*size: int) -> Tensor:
        return torch.full(size, torch.nan).to(shape.cache_dtype or shape.dtype)

    if shape.layout == "NHD":
        return full(blocks, rows, heads, dim), full(blocks, rows, heads, dim)
    if shape.layout == "HND":
        key, value = full(blocks, heads, rows, dim), full(blocks, heads, rows, dim)
        return key.transpose(1, 2), value.transpose(1, 2)
    if shape.layout == "one tensor":
        key, value = full(blocks, 2, rows, heads, dim).unbind(1)
        return key, value
    assert shape.layout == "side by side"
    key, value = full(blocks, heads, rows, 2 * dim).transpose(1, 2).chunk(2, dim=-1)
    return key, value


class Launch:
    """A batch for the kernel, in which everything that it must not read or write is poisoned.

    Unused slots of used blocks, unused blocks, and query rows of no request are NaN; unused entries
    of block tables and trees are garbage. Rows and columns of `out` around those of the requests
    hold a sentinel.
    """

    ROWS_BEFORE, ROWS_AFTER = 2, 3

    def __init__(
        self,
        device: torch.device,
        requests: Sequence[Request],
        shape: Shape | None = None,
        *,
        slots: int = 0,
        caches: tuple[Tensor, Tensor] | None = None,
        first_block: int = 0,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def randn(*size: int) -> Tensor:
            return torch.randn(size, generator=generator)

        shape = shape or Shape()
        self.device, self.shape = device, shape
        context_lens = [n for n, _ in requests]
        parents = [tree for _, tree in requests]
        self.max_nodes = max(map(len, parents))
        self.max_context_len = max(n for n, tree in requests if tree)
        # A tree's tensors are wider than the launch, and there are more of them than requests.
        trees = token_trees([*parents, []], max(slots, self.max_nodes))
        self.trees = trees.select(torch.arange(len(requests)))
        self.ancestors = poisoned(trees.ancestors, trees).to(device)
        self.depths = poisoned(trees.depths, trees).to(device)
        self.context_lens = torch.tensor(context_lens, dtype=torch.int32, device=device)
        starts = torch.tensor([self.ROWS_BEFORE, *map(len, parents)]).cumsum(0)
        self.query_start_loc = starts.to(torch.int32).to(device)

        block_size = shape.block_size
        width = -(-(self.max_context_len + self.max_nodes) // block_size)
        used = [-(-(n + len(tree)) // block_size) if tree else 0 for n, tree in requests]
        free = first_block + torch.randperm(sum(used) + 2, generator=generator)
        key_cache, value_cache = caches or make_caches(shape, len(free))
        table = torch.full((len(requests) + 1, width + 2), NO_BLOCK, dtype=torch.int32)
        for request, ((n, tree), blocks) in enumerate(zip(requests, used, strict=True)):
            table[request, :blocks], free = free[:blocks], free[blocks:]
            positions = torch.arange(n + len(tree) if tree else 0)
            block = table[request, positions // block_size].long()
            for cache in (key_cache, value_cache):
                row = randn(len(positions), shape.kv_heads, shape.head_dim).to(cache.dtype)
                # As bytes: fp8 has no indexed assignment.
                bytes_of = cache.view(torch.uint8) if cache.dtype == FP8 else cache
                rows = row.view(torch.uint8) if cache.dtype == FP8 else row
                bytes_of[block, positions % block_size] = rows
        self.block_table = table.to(device)
        self.key_cache, self.value_cache = key_cache.to(device), value_cache.to(device)

        # Queries are a part of the rows of a larger product, as in a fused QKV projection.
        self.rows = slice(self.ROWS_BEFORE, int(starts[-1]))
        heads = shape.kv_heads * shape.group
        qkv = torch.full((int(starts[-1]) + self.ROWS_AFTER, heads + 2, shape.head_dim), torch.nan)
        qkv[self.rows, :heads] = randn(int(starts[-1]) - self.ROWS_BEFORE, heads, shape.head_dim)
        self.query = qkv.to(shape.dtype).to(device)[:, :heads]
        self.sinks = torch.linspace(-2.0, 3.0, heads).to(shape.dtype).to(device)

    def arguments(self) -> dict[str, Any]:
        """What every call needs."""
        return {
            "query": self.query,
            "key_cache": self.key_cache,
            "value_cache": self.value_cache,
            "block_table": self.block_table,
            "context_lens": self.context_lens,
            "query_start_loc": self.query_start_loc,
            "ancestors": self.ancestors,
            "max_nodes": self.max_nodes,
            "max_context_len": self.max_context_len,
        }

    def __call__(self, **options: Any) -> tuple[Tensor, Tensor]:
        """(out, lse) of the requests' rows; what surrounds them has been compared already."""
        rows, heads, dim = self.query.shape
        around = self.query.new_full((rows, heads + 1, dim + 16), SENTINEL)
        out = around[:, :heads, :dim]
        around_lse = self.query.new_full((rows, heads + 1), SENTINEL, dtype=torch.float32)
        lse = around_lse[:, :heads]
        options = self.arguments() | {"depths": self.depths, "out": out, "lse": lse} | options
        assert tree_attention(**options) is out
        results = out[self.rows].double().cpu(), lse[self.rows].double().cpu()
        out[self.rows] = SENTINEL
        lse[self.rows] = SENTINEL
        assert (around == SENTINEL).all(), "written outside the requests' rows"
        assert (around_lse == SENTINEL).all(), "written outside the requests' rows"
        return results

    def reference(self, **options: Any) -> tuple[Tensor, Tensor]:
        options = self.arguments() | options
        for name in ("max_nodes", "max_context_len", "num_parts", "min_requests"):
            options.pop(name, None)
        on_cpu = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in options.items()}
        out, lse = naive_tree_attention(**on_cpu)
        return out[self.rows], lse[self.rows]

    def check(self, **options: Any) -> None:
        (out, lse), (expected, expected_lse) = self(**options), self.reference(**options)
        assert_close(out, expected, TOLERANCE[self.shape.dtype])
        # Scores are sums in fp32 of products that are exact, whatever the dtype.
        torch.testing.assert_close(lse, expected_lse, rtol=2e-5, atol=2e-5)


def assert_close(out: Tensor, expected: Tensor, tolerance: float) -> None:
    error = (out - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < tolerance


@pytest.fixture(scope="module", autouse=True)
def new_tensors_hold_nan() -> Iterator[None]:
    """The launcher's own buffers are poisoned too: PyTorch fills new tensors in this mode."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def launch(device: torch.device) -> Callable[..., Launch]:
    return lambda *args, **kwargs: Launch(device, *args, **kwargs)


@pytest.fixture
def needs_fp8(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("Triton compiles fp8 e4m3 from compute capability 8.9 on")


MIXED: list[Request] = [
    (0, [0]),  # one node and nothing before it
    (37, [0]),  # a plain decode
    (0, bushy(7)),
    (5, []),  # fills up the batch
    (50, chain(10)),
    (33, star(6)),
    (100, bushy(12, seed=1)),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
names = {"ids": lambda value: str(value).removeprefix("torch.")}


def test_the_reference_is_attention_along_each_nodes_path(device: torch.device) -> None:
    """It reads bit sets; the CPU engine's attention has been tested to go by parents."""
    launch = Launch(torch.device("cpu"), [request for request in MIXED if request[1]])
    launch.block_table = launch.block_table[:-1]
    requests, slots = launch.trees.tokens.shape
    is_node = launch.trees.is_node
    rows = torch.zeros(requests, slots, dtype=torch.int64)
    rows[is_node] = torch.arange(len(launch.query))[launch.rows]
    rows = torch.where(is_node, rows, rows[:, :1])
    queries = TreeQueries(
        launch.trees,
        rows,
        launch.context_lens.long(),
        launch.block_table,
        launch.shape.block_size,
    )
    # As vLLM's CPU backend keeps it; poison would meet weights of zero there.
    keys = launch.key_cache.nan_to_num(0).permute(0, 2, 3, 1)
    values = launch.value_cache.nan_to_num(0).transpose(1, 2)
    cache = torch.cat([keys.flatten(2), values.flatten(2)], dim=2).unflatten(2, (keys.shape[3], -1))
    variant = AttentionVariant(
        scale=0.2, sliding_window=11, soft_cap=1.5, sinks=launch.sinks.float()
    )
    options = {"scale": 0.2, "sliding_window": 11, "soft_cap": 1.5, "sinks": launch.sinks}
    out = torch.empty_like(launch.query)
    paged_tree_attention(launch.query, cache, queries, variant, out, Workspace())
    assert_close(out[launch.rows].double(), launch.reference(**options)[0], 1e-5)


@pytest.mark.parametrize("num_parts", [1, 2, 5])
@pytest.mark.parametrize("dtype", DTYPES, **names)
def test_trees_and_plain_decodes_in_one_launch_are_exact(
    launch: Callable[..., Launch], dtype: torch.dtype, num_parts: int
) -> None:
    launch(MIXED, Shape(dtype=dtype)).check(num_parts=num_parts)


def test_there_may_be_more_parts_than_keys(launch: Callable[..., Launch]) -> None:
    launch([(0, [0]), (3, bushy(6)), (70, chain(2))]).check(num_parts=64)


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, **names)
def test_nan_in_the_unused_slots_of_a_used_block_stays_there(
    launch: Callable[..., Launch], dtype: torch.dtype, num_parts: int
) -> None:
    """They are in the same tile as the last keys; a weight of zero would not keep NaN out."""
    batch = launch([(20, chain(3)), (15, [0]), (17, bushy(4))], Shape(dtype=dtype))
    for request, length in enumerate((23, 16, 21)):
        last = int(batch.block_table[request, (length - 1) // 16])
        used = (length - 1) % 16 + 1
        for cache in (batch.key_cache, batch.value_cache):
            assert cache[last, :used].isfinite().all() and cache[last, used:].isnan().all()
    batch.check(num_parts=num_parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], **names)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_head_dim_is_exact(
    launch: Callable[..., Launch], head_dim: int, dtype: torch.dtype
) -> None:
    batch = launch([(45, bushy(9)), (3, chain(4))], Shape(head_dim=head_dim, dtype=dtype))
    batch.check(num_parts=1)
    batch.check(num_parts=2)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
def test_every_group_of_query_heads_shares_its_kv_head(
    launch: Callable[..., Launch], group: int
) -> None:
    batch = launch([(20, bushy(9)), (40, [0])], Shape(kv_heads=3, group=group))
    batch.check(num_parts=1)
    batch.check(num_parts=2)


@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 256])
def test_contexts_may_end_at_and_around_a_blocks_edge(
    launch: Callable[..., Launch], block_size: int
) -> None:
    """The tree then begins a block, fills its last slot, or lies on both sides of the edge."""
    ends = (block_size - 5, block_size - 1, block_size, block_size + 1)
    batch = launch([(n, bushy(5, seed=n)) for n in ends], Shape(block_size=block_size))
    batch.check(num_parts=1)
    batch.check(num_parts=3)


@pytest.mark.parametrize("context_len", [31, 32, 33, 63, 64, 65, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], **names)
def test_contexts_may_end_at_and_around_a_tiles_edge(
    launch: Callable[..., Launch], context_len: int, dtype: torch.dtype
) -> None:
    """The tree's first bit set is looked at in the tile of keys in which the tree begins."""
    batch = launch([(context_len, bushy(6)), (context_len, [0])], Shape(dtype=dtype))
    batch.check(num_parts=1)
    batch.check(num_parts=2)


@pytest.mark.parametrize("layout", ["NHD", "HND", "one tensor", "side by side"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], **names)
def test_caches_may_have_any_strides(
    launch: Callable[..., Launch], layout: str, dtype: torch.dtype
) -> None:
    shape = Shape(layout=layout, dtype=dtype, kv_heads=3, head_dim=80)
    launch([(45, bushy(9)), (16, chain(17))], shape).check(num_parts=2)


@pytest.mark.usefixtures("needs_fp8")
@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, **names)
def test_an_fp8_cache_is_scaled(
    launch: Callable[..., Launch], dtype: torch.dtype, num_parts: int
) -> None:
    batch = launch(MIXED, Shape(dtype=dtype, cache_dtype=FP8, layout="one tensor"))
    batch.check(num_parts=num_parts, key_scale=0.25, value_scale=2.5)


VARIANTS: dict[str, dict[str, Any]] = {
    "scale": {"scale": 0.7},
    "soft cap": {"soft_cap": 1.5},
    "sinks": {"sinks": True},
    "window of one": {"sliding_window": 1},
    "window within the tree": {"sliding_window": 5},
    "window from the tree into the context": {"sliding_window": 20},
    "window of a tile": {"sliding_window": 64},
    "window beyond everything": {"sliding_window": 1000},
    "all at once": {"scale": 0.7, "soft_cap": 3.0, "sinks": True, "sliding_window": 9},
}


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_every_variant_is_exact(
    launch: Callable[..., Launch], variant: dict[str, Any], num_parts: int
) -> None:
    batch = launch([*MIXED, (64, chain(20)), (3, chain(20))])
    sinks = {"sinks": batch.sinks} if "sinks" in variant else {}
    batch.check(**variant | sinks, num_parts=num_parts)


@pytest.mark.usefixtures("needs_fp8")
@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], **names)
def test_all_variants_at_once_are_exact_with_an_fp8_cache(
    launch: Callable[..., Launch], dtype: torch.dtype, num_parts: int
) -> None:
    shape = Shape(dtype=dtype, cache_dtype=FP8, head_dim=80, group=3, layout="HND")
    batch = launch([*MIXED, (64, chain(20))], shape)
    options = VARIANTS["all at once"] | {"sinks": batch.sinks, "key_scale": 0.5, "value_scale": 3.0}
    batch.check(**options, num_parts=num_parts)


@pytest.mark.parametrize("num_parts", [1, 4])
@pytest.mark.parametrize("window", [1, 9, 40])
def test_nothing_before_the_window_is_read(
    launch: Callable[..., Launch], window: int, num_parts: int
) -> None:
    """vLLM frees the blocks there: their rows are another request's by now."""
    batch = launch([(100, chain(6)), (37, bushy(8)), (64, [0])])
    for request, n in enumerate(batch.context_lens.tolist()):
        first = max(0, n - window + 1)
        for position in range(first):
            block = int(batch.block_table[request, position // 16])
            batch.key_cache[block, position % 16] = torch.nan
            batch.value_cache[block, position % 16] = torch.nan
        batch.block_table[request, : first // 16] = NO_BLOCK
    batch.check(sliding_window=window, num_parts=num_parts)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], **names)
def test_large_scores_do_not_overflow(
    launch: Callable[..., Launch], dtype: torch.dtype, num_parts: int
) -> None:
    """Scores of thousands, exact in fp32 as they are integers; e^{2s/c} of the cap is infinite."""
    batch = launch(MIXED, Shape(dtype=dtype))
    batch.query.copy_(batch.query.mul(8).round())
    batch.key_cache.copy_(batch.key_cache.mul(8).round())
    assert batch.reference(scale=1.0)[1].max() > 1000
    batch.check(scale=1.0, num_parts=num_parts)
    batch.check(scale=1.0, num_parts=num_parts, soft_cap=2.0)
    # Sinks far above the scores of some rows, which fp32 leaves at 0, and far below others.
    options = {"scale": 1.0, "sinks": batch.sinks * 500}
    out, expected = batch(**options, num_parts=num_parts)[0], batch.reference(**options)[0]
    assert (out - expected).abs().max() < TOLERANCE[dtype] * expected.abs().max()


@pytest.mark.parametrize("num_parts", [1, 5])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("shape", [chain, star, bushy])
def test_trees_of_128_nodes_are_exact(
    launch: Callable[..., Launch], shape: Callable[[int], list[int]], group: int, num_parts: int
) -> None:
    """All words of the bit sets, bit 31 included; with 4 heads to a group, 4 tiles of rows."""
    batch = launch([(29, shape(128)), (70, [0])], Shape(group=group, kv_heads=1))
    batch.check(num_parts=num_parts)


def test_rows_that_do_not_fill_their_tiles_are_exact(launch: Callable[..., Launch]) -> None:
    """3 heads of 70 nodes are 210 rows: in the second of two tiles, a node's heads are apart."""
    batch = launch([(29, bushy(70)), (12, chain(43)), (12, bushy(42))], Shape(group=3, kv_heads=1))
    batch.check(num_parts=1)
    batch.check(num_parts=2, sliding_window=30)


@pytest.mark.parametrize("num_parts", [1, 2])
def test_a_launch_may_be_larger_than_its_trees(
    launch: Callable[..., Launch], num_parts: int
) -> None:
    """As in a CUDA graph: sizes for the largest batch, most requests without nodes."""
    batch = launch([(20, bushy(5)), (0, []), (9, []), (11, chain(3)), (2**20, [])], slots=64)
    batch.max_nodes, batch.max_context_len = 64, 40
    batch.block_table = torch.nn.functional.pad(batch.block_table, (0, 6), value=NO_BLOCK)
    batch.check(num_parts=num_parts, sliding_window=12)


@pytest.mark.parametrize("num_parts", [1, 2])
def test_64_requests_are_exact(launch: Callable[..., Launch], num_parts: int) -> None:
    requests = [(n, bushy(1 + n % 4, seed=n)) for n in range(64)]
    launch(requests, Shape(kv_heads=1, group=1)).check(num_parts=num_parts)


@pytest.mark.parametrize("num_parts", [1, 3])
def test_a_repeated_launch_gives_the_same_bits(
    launch: Callable[..., Launch], num_parts: int
) -> None:
    batch = launch(MIXED)
    out, lse = torch.empty_like(batch.query), batch.query.new_empty(batch.query.shape[:2])
    results = []
    for _ in range(2):
        tree_attention(**batch.arguments(), out=out, lse=lse, num_parts=num_parts)
        results.append((out[batch.rows].clone(), lse[batch.rows].clone()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_by_default_a_tensor_is_made_and_parts_are_chosen(launch: Callable[..., Launch]) -> None:
    """600 keys and one KV head are few programs with long loops: the keys are split."""
    batch = launch([(600, bushy(9))], Shape(kv_heads=1))
    assert choose_parts(1, 609, batch.device) > 1
    out = tree_attention(**batch.arguments())
    assert out.shape == batch.query.shape and out.dtype == batch.query.dtype
    assert_close(out[batch.rows].double().cpu(), batch.reference()[0], 1e-5)


def test_parts_are_chosen_for_the_fewest_requests_that_there_may_be(
    launch: Callable[..., Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph for many requests may serve one with a long context."""
    batch = launch([(300, bushy(9)), *[(0, [0])] * 5], Shape(kv_heads=2))
    counted = []

    def choose(programs: int, *args: Any) -> int:
        counted.append(programs)
        return choose_parts(programs, *args)

    monkeypatch.setattr(tree_attention_module, "choose_parts", choose)
    batch.check(min_requests=1)
    batch.check()
    assert counted == [2, 12]
    for wrong in (0, 7):
        with pytest.raises(ValueError, match="min_requests must be between 1 and 6"):
            batch(min_requests=wrong)


@pytest.mark.parametrize("max_keys", [1, 100, 1000, 100_000])
@pytest.mark.parametrize("programs", [1, 8, 5000])
def test_parts_hold_enough_keys_each_and_are_not_too_many(
    device: torch.device, programs: int, max_keys: int
) -> None:
    parts = choose_parts(programs, max_keys, device)
    assert 1 <= parts <= 64
    assert parts == 1 or parts * MIN_PART_KEYS <= max_keys
    assert programs < 5000 or parts == 1


@pytest.mark.parametrize(
    ("nodes", "group", "rows", "tiles"),
    [
        (1, 1, 16, 1),  # as few as a matrix instruction has
        (9, 1, 16, 1),
        (9, 4, 64, 1),  # 36 rows
        (9, 7, 64, 1),
        (9, 8, 128, 1),  # 72 rows: 128 either way
        (13, 7, 128, 1),
        (17, 4, 128, 1),
        (17, 8, 64, 3),  # 136 rows: 192 instead of 256
        (33, 1, 64, 1),
        (33, 4, 64, 3),  # 132 rows likewise
        (33, 7, 128, 2),
        (33, 8, 64, 5),
        (65, 4, 64, 5),
        (128, 8, 128, 8),
    ],
)
def test_few_rows_are_padding(nodes: int, group: int, rows: int, tiles: int) -> None:
    tile = choose_tile(nodes * group, 128, torch.bfloat16)
    assert tile.rows == rows
    assert padded(nodes * group, rows) == rows * tiles


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, **names)
def test_tiles_are_what_triton_can_multiply(head_dim: int, dtype: torch.dtype) -> None:
    """`tl.dot` takes powers of two from 16 on; two warp groups have 256 threads' registers."""
    for rows in range(1, 1025):
        tile = choose_tile(rows, head_dim, dtype)
        assert tile.rows in (16, 32, 64, 128) and tile.keys in (16, 32, 64)
        accumulators = tile.rows * 2 ** (head_dim - 1).bit_length() / (32 * tile.num_warps)
        assert accumulators <= 64
        assert padded(rows, tile.rows) < rows + tile.rows


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, **names)
def test_the_table_of_tiles_is_in_order_and_has_no_tile_in_vain(
    head_dim: int, dtype: torch.dtype
) -> None:
    tiles = TILES[dtype.itemsize, 2 ** (head_dim - 1).bit_length()]
    assert [tile.rows for tile in tiles] == sorted({tile.rows for tile in tiles})
    assert {choose_tile(rows, head_dim, dtype) for rows in range(1, 1025)} == set(tiles)


@pytest.mark.usefixtures("needs_fp8")
def test_a_cache_may_be_larger_than_2_to_the_31_elements(launch: Callable[..., Launch]) -> None:
    """2 GiB of address space; only the blocks in use take memory (all of it on a GPU)."""
    shape = Shape(cache_dtype=FP8, kv_heads=1)
    blocks = 2**20 + 8
    cache = torch.empty(blocks, 2, 16, 1, 64, dtype=torch.uint8, device=launch([(0, [0])]).device)
    key_cache, value_cache = cache.view(FP8).unbind(1)
    batch = launch(
        [(20, bushy(5)), (16, [0])], shape, caches=(key_cache, value_cache), first_block=blocks - 6
    )
    assert int(batch.block_table[0, 0]) * key_cache.stride(0) >= 2**31
    batch.check(num_parts=1)


requests_of_a_batch = st.lists(
    st.tuples(
        st.integers(0, 70),
        st.lists(st.integers(0, 1000), max_size=20).map(
            lambda draws: [0, *(draw % node for node, draw in enumerate(draws, start=1))]
        ),
    ),
    min_size=1,
    max_size=4,
)
# What a kernel is compiled for varies little: on a GPU, each combination takes seconds.
shapes = st.builds(
    Shape,
    head_dim=st.sampled_from([64, 80]),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 3]),
    block_size=st.sampled_from([16, 32]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    layout=st.sampled_from(["NHD", "HND", "one tensor"]),
)


@settings(deadline=None, max_examples=30)
@given(
    requests=requests_of_a_batch,
    shape=shapes,
    num_parts=st.sampled_from([1, 2, 5]),
    window=st.just(0) | st.integers(1, 40),
    soft_cap=st.sampled_from([0.0, 2.0]),
    with_sinks=st.booleans(),
)
def test_whatever_the_batch_it_is_exact(
    device: torch.device,
    requests: list[Request],
    shape: Shape,
    num_parts: int,
    window: int,
    soft_cap: float,
    with_sinks: bool,
) -> None:
    batch = Launch(device, requests, shape)
    batch.check(
        num_parts=num_parts,
        sliding_window=window,
        soft_cap=soft_cap,
        sinks=batch.sinks if with_sinks else None,
    )


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
