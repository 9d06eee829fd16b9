# SPDX-License-Identifier: Apache-2.0
"""The search on kernels finds what `beam_search` finds, as a graph too, and in few launches."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from redrafter_testing.gpu.memory_pool import MemoryPool
from redrafter_testing.gpu.recorded_graphs import RecordedGraph, graphs_recorded
from redrafter_testing.gpu.triton_interpreter import ON_GPU, import_kernels, kernels_run

FORMS_OF_HEADS = ("selector", "gated", "recurrent", "speculators", "forms")
import_kernels(*(f"heads.{name}" for name in FORMS_OF_HEADS), "draft_search")

from vllm_redrafter.budget.acceptance import AcceptanceEstimator, log_odds_of  # noqa: E402
from vllm_redrafter.engine.v2.draft_search import DraftSearch  # noqa: E402
from vllm_redrafter.engine.v2.heads.forms import fused_form  # noqa: E402
from vllm_redrafter.engine.v2.heads.gated import FusedGatedHead  # noqa: E402
from vllm_redrafter.heads.gated import GatedConfig, GatedHead  # noqa: E402
from vllm_redrafter.heads.head import DraftHead  # noqa: E402
from vllm_redrafter.heads.registry import NAMES  # noqa: E402
from vllm_redrafter.heads.speculators import LstmSpeculator, MlpSpeculator  # noqa: E402
from vllm_redrafter.tree.beam_search import ExploredNodes, beam_search  # noqa: E402
from vllm_redrafter.tree.policy import SearchShape, candidate_log_probs  # noqa: E402
from vllm_redrafter.tree.sharding import VocabularyShard  # noqa: E402
from vllm_redrafter.triton_kernels.build_tree import (  # noqa: E402
    NodeLimits,
    ScoredTrees,
    build_tree,
)
from vllm_redrafter.triton_kernels.draft_layers import MAX_ROWS  # noqa: E402

HIDDEN, VOCAB = 16, 70
HEADS = {**NAMES, "mlp": MlpSpeculator, "lstm": LstmSpeculator}
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
SHAPE = SearchShape(3, 3)
MANY = MAX_ROWS // SHAPE.beam_width + 1
"""Requests whose beams are more than the small kernels take."""


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    with kernels_run():
        yield


def head_of(name: str, **options: Any) -> DraftHead:
    """Peaked distributions, in which beams outlive and leave one another."""
    torch.manual_seed(0)
    config = HEADS[name].config_class.of_target(VOCAB, HIDDEN, **options)
    drafter = HEADS[name](config).to(DEVICE)
    for parameter in drafter.parameters():
        nn.init.normal_(parameter, std=0.5)
    if (ranked := drafter.config.draft_vocab_size) is not None:
        drafter.keep_tokens(torch.arange(ranked, device=DEVICE) * 2)
    return drafter.eval()


def embedding() -> nn.Embedding:
    torch.manual_seed(5)
    return nn.Embedding(VOCAB, HIDDEN).to(DEVICE).requires_grad_(False)


def requests(count: int, seed: int = 1, states: int = 1) -> tuple[Tensor, Tensor]:
    """(hidden states [R, n H], root tokens [R])."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, states * HIDDEN, generator=generator)
    return hidden.to(DEVICE), torch.randint(VOCAB, (count,), generator=generator).to(DEVICE)


def assert_found(
    search: DraftSearch,
    drafter: DraftHead,
    embed: Callable[[Tensor], Tensor],
    *inputs: Tensor,
    candidates: int = 0,
) -> None:
    found, log_odds = search.explore(*inputs)
    assert log_odds is None
    assert_same(found, beam_search(drafter, embed, *inputs, *SHAPE, candidates=candidates))


def assert_same(found: ExploredNodes, expected: ExploredNodes) -> None:
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.back_pointers, expected.back_pointers)
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=1e-4, atol=1e-4)


REDUCED = {"draft_vocab_size": 30}
SELECTOR = {"depths": 3, "rank": 5}
"""Of one more level than a search has."""
TIED = {"width": 24, "num_levels": 2}
UNTIED = {"width": 24, "num_levels": 5, "tied": False, "scale_input": True}
SELECTING: list[tuple[str, dict[str, Any]]] = [
    ("recurrent", {"num_draft_layers": 2, "selector": SELECTOR}),
    ("gated", {"selector": SELECTOR}),
    ("lstm", {"selector": SELECTOR, **TIED}),
    ("gated", {"num_draft_layers": 1, "selector": SELECTOR, **REDUCED}),
]


@pytest.mark.parametrize(
    ("name", "options", "count", "candidates"),
    [
        ("recurrent", {"exit_dim": 24}, 2, 0),
        ("recurrent", {"exit_dim": 24}, MANY, 0),  # the first level has few rows, the others more
        ("recurrent", {"exit_dim": 2 * HIDDEN, "num_draft_layers": 2}, 2, 0),
        ("recurrent", {"num_draft_layers": 0, **REDUCED}, 2, 0),
        ("recurrent", {"rnn": False}, 2, 0),
        ("gated", {}, 2, 0),
        ("gated", {"num_draft_layers": 2, "target_layers": (1, 2), **REDUCED}, 2, 0),
        ("mlp", UNTIED, 2, 0),
        *(("lstm", TIED | REDUCED, count, 0) for count in (2, MANY)),
        *((name, options, count, 8) for name, options in SELECTING for count in (2, MANY)),
    ],
)
@pytest.mark.parametrize("looks_up", [True, False])
def test_every_kind_of_head_is_searched(
    name: str, options: dict[str, Any], count: int, candidates: int, looks_up: bool
) -> None:
    """Reading the embedding's table, or asking for embeddings that are more than a look-up;
    whatever was in the memory of its buffers."""
    head, table = head_of(name, **options), embedding()

    def embed(tokens: Tensor) -> Tensor:
        return table(tokens) * (1.0 if looks_up else 1.5)

    pool, read = MemoryPool(), table if looks_up else None
    with pool:
        search = DraftSearch(head, embed, read, SHAPE, MANY, candidates=lambda _: candidates)
    pool.discard()
    inputs = requests(count, states=1 + len(head.config.target_layers))
    assert_found(search, head, embed, *inputs, candidates=candidates)


@pytest.mark.parametrize(("name", "options"), SELECTING)
def test_a_head_with_a_selector_may_rank_the_vocabulary(name: str, options: dict[str, Any]) -> None:
    """Another number of requests chooses among candidates."""
    head, embed = head_of(name, **options), embedding()
    search = DraftSearch(head, embed, embed, SHAPE, 3, candidates=lambda r: 0 if r > 1 else 8)
    assert_found(search, head, embed, *requests(2))
    assert_found(search, head, embed, *requests(1), candidates=8)


@pytest.mark.parametrize(
    ("name", "options", "candidates"),
    [("recurrent", {}, 0), *((name, options, 8) for name, options in SELECTING[::3])],
)
def test_ranks_find_together_what_one_finds(
    name: str, options: dict[str, Any], candidates: int
) -> None:
    """Each of its own candidates; whatever was in the memory of their buffers."""
    ranks, embed, choose = 2, embedding(), lambda _: candidates
    vocabulary = options.get("draft_vocab_size", VOCAB)
    heads = [head_of(name, **options) for _ in range(ranks)]
    inputs = requests(2)

    def found(search: Callable[[DraftHead, VocabularyShard], ExploredNodes]) -> list[ExploredNodes]:
        together = Together(ranks)
        shards = [VocabularyShard(vocabulary, r, ranks, together.gather_of(r)) for r in range(2)]

        def alone(head: DraftHead, shard: VocabularyShard) -> ExploredNodes:
            with together.computing:
                return search(head, shard)

        with ThreadPoolExecutor(ranks) as pool:
            return [*pool.map(alone, heads, shards)]

    for rank, head in enumerate(heads):
        VocabularyShard(vocabulary, rank, ranks, lambda part: part).cut(head)

    def on_kernels(head: DraftHead, shard: VocabularyShard) -> ExploredNodes:
        pool = MemoryPool()
        with pool:
            search = DraftSearch(head, embed, embed, SHAPE, 2, shard, candidates=choose)
        pool.discard()
        return search.explore(*inputs)[0]

    def in_torch(head: DraftHead, shard: VocabularyShard) -> ExploredNodes:
        return beam_search(head, embed, *inputs, *SHAPE, shard=shard, candidates=candidates)

    first, second = found(on_kernels)
    assert torch.equal(first.tokens, second.tokens)
    if candidates:
        assert_same(first, found(in_torch)[0])
    else:
        assert_same(first, beam_search(head_of(name, **options), embed, *inputs, *SHAPE))


class Together:
    """What ranks in threads exchange; one at a time computes, as the interpreter needs it."""

    def __init__(self, ranks: int) -> None:
        self._parts = [torch.empty(0)] * ranks
        self._barrier, self.computing = threading.Barrier(ranks), threading.Lock()

    def gather_of(self, rank: int) -> Callable[[Tensor], Tensor]:
        def gather(part: Tensor) -> Tensor:
            self._parts[rank] = part
            self._wait()
            gathered = torch.cat(self._parts, dim=-1)
            self._wait()
            return gathered

        return gather

    def _wait(self) -> None:
        self.computing.release()
        self._barrier.wait(120)
        self.computing.acquire()


def test_nodes_are_ranked_by_their_survival() -> None:
    """The second request samples."""
    drafter, embed = head_of("recurrent", exit_dim=24), embedding()
    estimator = AcceptanceEstimator(SHAPE.beam_length + 1, DEVICE, kinds=(2,))
    estimator.biases.copy_(torch.linspace(0.5, -1, 2 * SHAPE.beam_length + 2).view(2, -1))
    ranking = estimator.slope, estimator.biases, torch.tensor([0.0, 0.7], device=DEVICE)
    search = DraftSearch(drafter, embed, embed, SHAPE, max_requests=2, survival=ranking)
    inputs = requests(2)
    found, log_odds = search.explore(*inputs)
    expected = beam_search(drafter, embed, *inputs, *SHAPE)
    assert log_odds is not None and torch.equal(found.tokens, expected.tokens)
    scores = expected.log_probs, expected.back_pointers
    expected_log_odds = log_odds_of(*scores)
    # Those of what is nearly certain are lost in the rounding of sums.
    kept = expected_log_odds < 9
    assert kept.sum() > 5
    torch.testing.assert_close(log_odds[kept], expected_log_odds[kept], rtol=1e-3, atol=1e-2)
    survival = estimator.log_survival(expected_log_odds, *scores)
    torch.testing.assert_close(found.log_probs, survival, rtol=1e-3, atol=1e-2)


@pytest.mark.skipif(ON_GPU, reason="recordings stand for graphs on a CPU")
@pytest.mark.parametrize(
    ("name", "options", "count", "launches"),
    [
        ("recurrent", {"exit_dim": 24}, 1, 1 + 7 * 5),
        ("gated", {}, 1, 6 * 5),
        ("gated", {"num_draft_layers": 1}, 1, 7 * 5),
        ("gated", {"selector": {"depths": 4, "rank": 5}}, 1, 9 + 4 * 4),
        ("recurrent", {"selector": {"depths": 4, "rank": 5}}, 1, 11 + 6 * 4),
        ("mlp", UNTIED | {"scale_input": False}, 1, 6 * 5),
        ("lstm", TIED, MANY, 6 * 5),
    ],
)
def test_so_many_launches_draft_five_levels_in_a_graph(
    name: str, options: dict[str, Any], count: int, launches: int
) -> None:
    """Which reads what is in its inputs now."""
    head, embed, shape = head_of(name, **options), embedding(), SearchShape(4, 5)
    candidates = 8 if head.config.selected_depths else 0
    search = DraftSearch(head, embed, embed, shape, count, candidates=lambda _: candidates)
    inputs = requests(count)
    graph = RecordedGraph()
    with torch.inference_mode(), graphs_recorded(), torch.cuda.graph(graph):
        found, _ = search.explore(*inputs)
    for own, other in zip(inputs, requests(count, seed=3), strict=True):
        own.copy_(other)
    graph.replay()
    assert_same(found, beam_search(head, embed, *inputs, *shape, candidates=candidates))
    assert graph.num_nodes == launches


@pytest.mark.skipif(not ON_GPU, reason="torch's sync debug mode needs a GPU")
def test_a_draft_does_not_wait_on_a_gpu() -> None:
    search = DraftSearch(head_of("recurrent"), embedding(), embedding(), SHAPE, max_requests=3)
    inputs, trees, entries = requests(3), ScoredTrees(3, 6, DEVICE), torch.arange(3, device=DEVICE)
    limits, drafts = NodeLimits(*torch.zeros(2, 3, device=DEVICE).int()), entries.repeat(6, 1).T

    def draft() -> None:
        found, _ = search.explore(*inputs)
        scores = candidate_log_probs(found, "beams")
        explored = found.tokens, found.back_pointers, scores
        build_tree(inputs[1], *explored, trees, entries, limits, drafts.contiguous())

    draft()  # compiles the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        draft()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_form_that_a_head_of_another_package_brings_is_used() -> None:
    """One without is searched by torch: `tests/engine/test_heads.py`."""

    class Bringing(GatedHead):
        def launches(self, max_rows: int, length: int) -> FusedGatedHead:
            return FusedGatedHead(self, max_rows, length)

    head = Bringing(GatedConfig(VOCAB, HIDDEN))
    assert isinstance(fused_form(head, max_rows=3, length=2), FusedGatedHead)
