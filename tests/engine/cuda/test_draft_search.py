# SPDX-License-Identifier: Apache-2.0
"""The search on kernels finds what `beam_search` finds, as a graph too, and in few launches."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from redrafter_testing.gpu.memory_pool import MemoryPool
from redrafter_testing.gpu.recorded_graphs import RecordedGraph, graphs_recorded
from redrafter_testing.gpu.triton_interpreter import import_interpreted, interpreted

ON_GPU = torch.cuda.is_available()
KERNELS = (
    "ordered_keys",
    "top_candidates",
    "candidates",
    "grow_beams",
    "draft_layers",
    "gated_layer",
    "gather_dot",
)
FORMS_OF_HEADS = ("features", "selector", "gated", "medusa", "recurrent", "forms")
if not ON_GPU:
    import_interpreted(
        *(f"vllm_redrafter.triton_kernels.{name}" for name in KERNELS),
        *(f"vllm_redrafter.engine.cuda.heads.{name}" for name in FORMS_OF_HEADS),
        "vllm_redrafter.engine.cuda.draft_ranking",
        "vllm_redrafter.engine.cuda.draft_search",
    )

from vllm_redrafter.budget.acceptance import AcceptanceEstimator, log_odds_of  # noqa: E402
from vllm_redrafter.engine.cuda.draft_search import DraftSearch  # noqa: E402
from vllm_redrafter.engine.cuda.heads.forms import FORMS, fused_form  # noqa: E402
from vllm_redrafter.engine.cuda.heads.gated import FusedGatedHead  # noqa: E402
from vllm_redrafter.heads.gated import GatedConfig, GatedHead  # noqa: E402
from vllm_redrafter.heads.head import DraftHead  # noqa: E402
from vllm_redrafter.heads.medusa import MedusaConfig, MedusaHead  # noqa: E402
from vllm_redrafter.heads.recurrent import RecurrentConfig, RecurrentHead  # noqa: E402
from vllm_redrafter.heads.registry import NAMES, new_head  # noqa: E402
from vllm_redrafter.tree.beam_search import ExploredNodes, beam_search  # noqa: E402
from vllm_redrafter.tree.policy import SearchShape  # noqa: E402
from vllm_redrafter.tree.sharding import VocabularyShard  # noqa: E402
from vllm_redrafter.triton_kernels.draft_layers import MAX_ROWS  # noqa: E402

HIDDEN, VOCAB = 16, 70
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
SHAPE = SearchShape(3, 3)
MANY = MAX_ROWS // SHAPE.beam_width + 1
"""Requests whose beams are more than the small kernels take."""
Head = TypeVar("Head", bound=DraftHead)


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    """On a CPU, interpreted."""
    if ON_GPU:
        yield
    else:
        with interpreted():
            yield


def drafter_of(seed: int = 0, **sizes: Any) -> RecurrentHead:
    """Peaked distributions, in which beams outlive and leave one another."""
    torch.manual_seed(seed)
    config = RecurrentConfig(VOCAB, HIDDEN, **({"exit_dim": 24} | sizes))
    return random_weights(RecurrentHead(config).to(DEVICE))


def random_weights(drafter: Head) -> Head:
    for parameter in drafter.parameters():
        nn.init.normal_(parameter, std=0.5)
    if (ranked := drafter.config.draft_vocab_size) is not None:
        drafter.keep_tokens(torch.arange(ranked, device=DEVICE) * 2)
    return drafter.eval()


def embedding() -> nn.Embedding:
    torch.manual_seed(5)
    return nn.Embedding(VOCAB, HIDDEN).to(DEVICE).requires_grad_(False)


def requests(count: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """(hidden states [R, H], root tokens [R])."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, HIDDEN, generator=generator)
    return hidden.to(DEVICE), torch.randint(VOCAB, (count,), generator=generator).to(DEVICE)


def assert_found(
    search: DraftSearch,
    drafter: DraftHead,
    embed: Callable[[Tensor], Tensor],
    *inputs: Tensor,
    candidates: int = 0,
) -> None:
    found, log_odds = search.explore(*inputs)
    expected = beam_search(drafter, embed, *inputs, *SHAPE, candidates=candidates)
    assert log_odds is None
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.back_pointers, expected.back_pointers)
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"exit_dim": 2 * HIDDEN, "num_draft_layers": 2},
        {"num_draft_layers": 0, "draft_vocab_size": 30},
        {"rnn": False},
    ],
    ids=["projection", "Apple's", "reduced vocabulary", "no RNN"],
)
def test_every_kind_of_head_is_searched(sizes: dict[str, Any]) -> None:
    drafter, embed = drafter_of(**sizes), embedding()
    search = DraftSearch(drafter, embed, embed, SHAPE, max_requests=3)
    assert_found(search, drafter, embed, *requests(2))


def gated_of(**sizes: Any) -> GatedHead:
    torch.manual_seed(0)
    return random_weights(GatedHead(GatedConfig(VOCAB, HIDDEN, **sizes)).to(DEVICE))


@pytest.mark.parametrize(
    ("sizes", "looks_up"),
    [
        ({}, False),
        ({"num_draft_layers": 2, "draft_vocab_size": 30, "target_layers": (1, 2)}, True),
    ],
    ids=["embeddings", "blocks, several layers, table"],
)
def test_a_gated_head_is_searched_on_kernels(
    sizes: dict[str, Any], looks_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, embed = gated_of(**sizes), embedding()
    search = DraftSearch(head, embed, embed if looks_up else None, SHAPE, max_requests=3)
    hidden, roots = requests(2)
    further = [requests(2, seed)[0] for seed in range(2, 2 + len(head.config.target_layers))]
    inputs = torch.cat([hidden, *further], dim=-1), roots
    assert_found(search, head, embed, *inputs)
    for name in ("start", "advance", "features"):  # torch's, which kernels stand for
        monkeypatch.setattr(head, name, None)
    search.explore(*inputs)


SELECTOR = {"depths": 3, "rank": 5}
"""Of one more level than a search has."""


def telling(name: str, **options: Any) -> DraftHead:
    """A head that tells candidates."""
    torch.manual_seed(0)
    head = new_head(name, VOCAB, HIDDEN, SHAPE.beam_length, selector=SELECTOR, **options)
    return random_weights(head.to(DEVICE))


TELLING: list[tuple[str, dict[str, Any]]] = [
    ("recurrent", {"num_draft_layers": 2}),
    ("gated", {}),
    ("gated", {"num_draft_layers": 1, "draft_vocab_size": 30}),
]


@pytest.mark.parametrize("count", [2, MANY], ids=["kernels", "torch below the root"])
@pytest.mark.parametrize(("name", "options"), TELLING)
def test_nodes_choose_among_the_candidates_of_their_depth(
    name: str, options: dict[str, Any], count: int
) -> None:
    head, embed, candidates = telling(name, **options), embedding(), 8
    search = DraftSearch(head, embed, embed, SHAPE, MANY, candidates=lambda _: candidates)
    assert_found(search, head, embed, *requests(count), candidates=candidates)


@pytest.mark.parametrize(("name", "options"), TELLING)
def test_a_head_that_tells_candidates_may_rank_the_vocabulary(
    name: str, options: dict[str, Any]
) -> None:
    """Another number of requests chooses among candidates."""
    head, embed = telling(name, **options), embedding()
    search = DraftSearch(head, embed, embed, SHAPE, 3, candidates=lambda r: 0 if r > 1 else 8)
    assert_found(search, head, embed, *requests(2))
    assert_found(search, head, embed, *requests(1), candidates=8)


def medusa_of(**sizes: Any) -> MedusaHead:
    torch.manual_seed(0)
    config = MedusaConfig(VOCAB, HIDDEN, num_heads=SHAPE.beam_length, **sizes)
    return random_weights(MedusaHead(config).to(DEVICE))


@pytest.mark.parametrize("count", [2, MANY], ids=["kernels", "torch"])
@pytest.mark.parametrize("sizes", [{"bias": True}, {"num_draft_layers": 3, "draft_vocab_size": 30}])
def test_a_head_that_sees_no_token_ranks_once_for_all_beams(
    sizes: dict[str, Any], count: int
) -> None:
    drafter = medusa_of(**sizes)
    search = DraftSearch(drafter, embedding(), embedding(), SHAPE, max_requests=count + 1)
    rows: list[int] = []
    for layer in drafter.vocabulary_layers:
        layer.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    search.explore(*requests(count))
    assert rows == [count] * SHAPE.beam_length
    assert_found(search, drafter, embedding(), *requests(count))


def test_an_embedding_that_is_no_lookup_is_asked() -> None:
    drafter, table = drafter_of(), embedding()

    def embed(tokens: Tensor) -> Tensor:
        return table(tokens) * 1.5

    search = DraftSearch(drafter, embed, None, SHAPE, max_requests=2)
    assert_found(search, drafter, embed, *requests(2))


def test_more_rows_than_the_small_kernels_take_are_torch_s() -> None:
    """The first level has few rows, the others more."""
    drafter, embed = drafter_of(), embedding()
    search = DraftSearch(drafter, embed, embed, SHAPE, max_requests=MANY)
    assert_found(search, drafter, embed, *requests(MANY))


def shard_s_search(embed: nn.Embedding, pool: MemoryPool | None = None) -> DraftSearch:
    """Of the first of two ranks, which run one after the other here; its memory is the pool's."""
    shards = [VocabularyShard(VOCAB, rank, 2, lambda part: part) for rank in range(2)]
    parts = [drafter_of() for _ in shards]
    for part, shard in zip(parts, shards, strict=True):
        shard.cut(part)

    layers = [part.vocabulary_layers[0] for part in parts]
    read: list[Tensor] = []  # by the first rank's layer, which the second's has to read, too
    layers[0].register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))

    def gather(_: Tensor) -> Tensor:
        features = read[-1]
        told = [s.best_here(layer(features)) for s, layer in zip(shards, layers, strict=True)]
        return torch.cat(told, dim=-1)

    shard = VocabularyShard(VOCAB, 0, 2, gather)
    with pool or nullcontext():
        return DraftSearch(parts[0], embed, embed, SHAPE, max_requests=2, shard=shard)


@pytest.mark.parametrize(("name", "options"), TELLING[::2])
def test_ranks_choose_among_the_candidates_of_each(name: str, options: dict[str, Any]) -> None:
    """Against the same in torch."""
    ranks, embed, count = 2, embedding(), 8
    vocabulary = options.get("draft_vocab_size", VOCAB)
    heads = [telling(name, **options) for _ in range(ranks)]
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
        search = DraftSearch(head, embed, embed, SHAPE, 2, shard, candidates=lambda _: count)
        return search.explore(*inputs)[0]

    def in_torch(head: DraftHead, shard: VocabularyShard) -> ExploredNodes:
        return beam_search(head, embed, *inputs, *SHAPE, shard=shard, candidates=count)

    first, second = found(on_kernels)
    expected, _ = found(in_torch)
    assert torch.equal(first.tokens, second.tokens)
    assert torch.equal(first.tokens, expected.tokens)
    assert torch.equal(first.back_pointers, expected.back_pointers)
    torch.testing.assert_close(first.log_probs, expected.log_probs, rtol=1e-4, atol=1e-4)


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


def test_a_shard_s_search_is_the_whole_s() -> None:
    embed = embedding()
    assert_found(shard_s_search(embed), drafter_of(), embed, *requests(2))


@pytest.mark.parametrize(
    ("new", "candidates"),
    [
        (drafter_of, 0),
        (gated_of, 0),
        (medusa_of, 0),
        (lambda: telling("gated"), 8),
    ],
    ids=["recurrent", "gated", "medusa", "selector"],
)
def test_a_search_needs_nothing_of_what_was_in_its_memory(
    new: Callable[[], DraftHead], candidates: int
) -> None:
    drafter, embed, pool = new(), embedding(), MemoryPool()
    with pool:
        search = DraftSearch(drafter, embed, embed, SHAPE, 2, candidates=lambda _: candidates)
    pool.discard()
    assert_found(search, drafter, embed, *requests(2), candidates=candidates)


def test_a_shard_s_search_needs_nothing_of_what_was_in_its_memory() -> None:
    embed, pool = embedding(), MemoryPool()
    search = shard_s_search(embed, pool)
    pool.discard()
    assert_found(search, drafter_of(), embed, *requests(2))


def test_nodes_are_ranked_by_their_survival() -> None:
    drafter, embed = drafter_of(), embedding()
    estimator = AcceptanceEstimator(SHAPE.beam_length + 1, DEVICE)
    estimator.biases.copy_(torch.linspace(0.5, -1, SHAPE.beam_length + 1))
    search = DraftSearch(drafter, embed, embed, SHAPE, max_requests=2, survival=estimator)
    inputs = requests(2)
    found, log_odds = search.explore(*inputs)
    expected = beam_search(drafter, embed, *inputs, *SHAPE)
    assert torch.equal(found.tokens, expected.tokens)
    assert log_odds is not None
    expected_log_odds = log_odds_of(expected.log_probs, expected.back_pointers)
    # Those of what is nearly certain are lost in the rounding of sums.
    sure = expected_log_odds < 9
    assert sure.sum() > 5
    torch.testing.assert_close(log_odds[sure], expected_log_odds[sure], rtol=1e-3, atol=1e-2)
    survival = estimator.log_survival(expected_log_odds, expected.log_probs, expected.back_pointers)
    torch.testing.assert_close(found.log_probs, survival, rtol=1e-3, atol=1e-2)


@pytest.mark.skipif(ON_GPU, reason="recordings stand for graphs on a CPU")
@pytest.mark.parametrize(
    ("new", "launches"),
    [
        (drafter_of, 1 + 7 * SHAPE.beam_length),
        (gated_of, 6 * SHAPE.beam_length),
        (lambda: gated_of(num_draft_layers=1), 7 * SHAPE.beam_length),
    ],
    ids=["recurrent", "gated", "gated, a block"],
)
def test_a_graph_of_a_search_reads_what_is_in_its_inputs_now(
    new: Callable[[], DraftHead], launches: int
) -> None:
    drafter, embed = new(), embedding()
    search = DraftSearch(drafter, embed, embed, SHAPE, max_requests=1)
    inputs = requests(1)
    graph = RecordedGraph()
    with torch.inference_mode(), graphs_recorded(), torch.cuda.graph(graph):
        found, _ = search.explore(*inputs)
    for own, new in zip(inputs, requests(1, seed=3), strict=True):
        own.copy_(new)
    graph.replay()
    expected = beam_search(drafter, embed, *inputs, *SHAPE)
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=1e-4, atol=1e-4)
    assert graph.num_nodes == launches


FIVE = SearchShape(4, 5)


@pytest.mark.skipif(ON_GPU, reason="recordings stand for graphs on a CPU")
@pytest.mark.parametrize(
    ("name", "options", "launches"),
    [
        ("gated", {}, 6 * 5),
        ("gated", {"selector": {"depths": 4, "rank": 5}}, 9 + 4 * 4),
        ("recurrent", {"selector": {"depths": 4, "rank": 5}}, 11 + 6 * 4),
    ],
    ids=["gated", "gated with a selector", "recurrent with a selector"],
)
def test_so_many_launches_draft_five_levels(
    name: str, options: dict[str, Any], launches: int
) -> None:
    """In a graph, which reads what is in its inputs now."""
    torch.manual_seed(0)
    head = new_head(name, VOCAB, HIDDEN, 5, **options)
    head, embed = random_weights(head.to(DEVICE)), embedding()
    candidates = 8 if head.config.selected_depths else 0
    search = DraftSearch(head, embed, embed, FIVE, 1, candidates=lambda _: candidates)
    inputs = requests(1)
    graph = RecordedGraph()
    with torch.inference_mode(), graphs_recorded(), torch.cuda.graph(graph):
        found, _ = search.explore(*inputs)
    for own, other in zip(inputs, requests(1, seed=3), strict=True):
        own.copy_(other)
    graph.replay()
    expected = beam_search(head, embed, *inputs, *FIVE, candidates=candidates)
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=1e-4, atol=1e-4)
    assert graph.num_nodes == launches


@pytest.mark.parametrize("name", NAMES)
def test_a_head_without_a_form_of_its_own_is_searched_by_torch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(FORMS, NAMES[name])
    torch.manual_seed(0)
    head = random_weights(new_head(name, VOCAB, HIDDEN).to(DEVICE))
    embed = embedding()
    search = DraftSearch(head, embed, embed, SHAPE, max_requests=3)
    assert_found(search, head, embed, *requests(2))


def test_a_form_that_a_head_of_another_package_brings_is_used() -> None:
    class Bringing(GatedHead):
        def launches(self, table: nn.Module | None, max_rows: int, length: int) -> FusedGatedHead:
            return FusedGatedHead(self, table, max_rows, length)

    head = Bringing(GatedConfig(VOCAB, HIDDEN))
    assert isinstance(fused_form(head, None, max_rows=3, length=2), FusedGatedHead)
