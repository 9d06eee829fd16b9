# SPDX-License-Identifier: Apache-2.0
"""What drafts learn of the nodes that were verified, and matches that join them, on kernels; trees
of matches are the CPU engine's.

A match is a prompt-lookup (n-gram) match: a continuation of an earlier occurrence in the text.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import chain, count, pairwise
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from redrafter_testing.algorithm.context_matches import search_and_paths
from redrafter_testing.gpu.recorded_graphs import RecordedGraph, graphs_recorded
from redrafter_testing.gpu.torch_drafting import in_torch
from redrafter_testing.gpu.triton_interpreter import ON_GPU, import_kernels, interpreted

import_kernels("earlier_answers", "context_matching", "node_confidence")

from vllm_redrafter.config import ReDrafterConfig  # noqa: E402
from vllm_redrafter.drafting import earlier_answers as on_host  # noqa: E402
from vllm_redrafter.drafting.proposer import Proposer  # noqa: E402
from vllm_redrafter.engine.cpu.v1.context_matching import ContextMatching as OnHost  # noqa: E402
from vllm_redrafter.engine.v2 import earlier_answers as on_device  # noqa: E402
from vllm_redrafter.engine.v2.context_matching import ContextMatching, ScoredNodes  # noqa: E402
from vllm_redrafter.engine.v2.node_confidence import (  # noqa: E402
    FIRST_REFIT,
    LONGEST_REFIT,
    NodeConfidence,
)
from vllm_redrafter.engine.v2.verification import Verification  # noqa: E402
from vllm_redrafter.tree.beam_search import ExploredNodes  # noqa: E402
from vllm_redrafter.tree.context_matches import LENGTH_CLASSES, LONGEST_MATCH  # noqa: E402
from vllm_redrafter.tree.policy import MATCHES, SearchShape  # noqa: E402
from vllm_redrafter.triton_kernels.build_tree import (  # noqa: E402
    NodeLimits,
    ScoredTrees,
    build_tree,
)

REQUESTS, K, LENGTH, WIDTH, VOCAB = 4, 6, 3, 3, 4
SLOT = torch.tensor([2])
"""Of the batch's only request."""
pytestmark = pytest.mark.skipif(ON_GPU, reason="recordings stand for graphs on a CPU")


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    with interpreted():
        yield


@pytest.fixture
def trees() -> ScoredTrees:
    made = ScoredTrees(REQUESTS + 1, K, "cpu")
    made.clear()
    made.log_odds[2, 1:5] = torch.tensor([2.0, 1.0, -1.0, 0.5])
    return made


@pytest.fixture
def verification() -> Verification:
    """Node 1 below the root, 2 below 1, 3 below the root, 4 below 3; the walk took 1 and 2."""
    made = Verification(REQUESTS, K, torch.device("cpu"))
    made.staged.parents[0, :5] = torch.tensor([0, 0, 1, 0, 3])
    made.staged.depths[0, :5] = torch.tensor([0, 1, 2, 1, 2])
    made.staged.num_nodes[0] = 5
    made.path[0] = torch.tensor([0, 1, 2, -1, -1, -1, -1])
    made.num_verified[:1] = made.staged.num_nodes[:1]
    return made


@pytest.fixture
def confidence(trees: ScoredTrees, verification: Verification) -> NodeConfidence:
    return NodeConfidence(trees, verification, max_depth=2)


@pytest.fixture
def matching(trees: ScoredTrees, verification: Verification) -> ContextMatching:
    """Texts of four tokens, so that most have matches, of 1, 5, 30 and 40 tokens."""
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(VOCAB, (REQUESTS, 40), generator=generator).int()
    config = ReDrafterConfig(K, WIDTH, LENGTH, context_matches=2, earlier_answers=0)
    table = SimpleNamespace(config=config, trees=trees, verification=verification)
    made = matching_of(table, texts, torch.tensor([1, 5, 30, 40]).int(), {})
    made.probabilities.uniform_(0.1, 0.9, generator=generator)
    verification.temperatures[0] = 1.0
    return made


def matching_of(table: Any, texts: Tensor, sizes: Tensor, slots: dict[str, int]) -> ContextMatching:
    states: Any = SimpleNamespace(
        max_num_reqs=REQUESTS,
        vocab_size=VOCAB,
        device=texts.device,
        all_token_ids=SimpleNamespace(gpu=texts),
        total_len=SimpleNamespace(gpu=sizes),
        req_id_to_index=slots,
    )
    searches = {0: SearchShape(0, 0), LENGTH: SearchShape(WIDTH, LENGTH)}
    return ContextMatching(table, states, searches, torch.zeros(4, dtype=torch.int64))


@pytest.fixture
def learning(matching: ContextMatching) -> ContextMatching:
    """All nodes but 4 are on paths."""
    matching.trees.match_classes[2, 1:4] = torch.tensor([5, 5, 1])
    matching.verification.temperatures.zero_()
    return matching


def recorded(function: Callable[[], Any]) -> tuple[RecordedGraph, Any]:
    """A graph of the function, and what it returned."""
    graph = RecordedGraph()
    with torch.inference_mode(), graphs_recorded(), torch.cuda.graph(graph):
        result = function()
    return graph, result


def found(length: int) -> ScoredNodes:
    """By a search for three requests; of length 0 by none."""
    explored, _ = search_and_paths(1, LENGTH, WIDTH)
    parts = explored.tokens, explored.back_pointers, explored.log_probs
    levels = (slice(3), slice(length), slice(WIDTH if length else 0))
    nodes = ExploredNodes(*(part[levels].contiguous() for part in parts))
    return ScoredNodes(nodes, torch.rand(nodes.log_probs.shape))


@pytest.mark.parametrize("length", [LENGTH, 0])
def test_kernels_join_what_torch_does_in_three_launches(
    matching: ContextMatching, length: int
) -> None:
    """Of a padded batch."""
    slots, search = torch.tensor([3, 2, REQUESTS]), found(length)
    graph, joined = recorded(lambda: matching.join(length, search, slots))
    slots[1] = 0
    graph.replay()
    of_kernels = deepcopy(joined)
    with in_torch("context_matching"):
        expected = matching.join(length, search, slots)
    assert expected.match_classes is not None and expected.match_classes[0].any()
    assert not expected.match_classes[2].any()
    for name in ("tokens", "back_pointers", "log_probs"):
        torch.testing.assert_close(getattr(of_kernels.nodes, name), getattr(expected.nodes, name))
    torch.testing.assert_close(of_kernels[1:], expected[1:])
    assert graph.num_nodes == 3


OF_REQUESTS = {}, {}, {"redrafter.salt": "a"}, {"redrafter": {"share": False}}
ADAPTERS = None, None, SimpleNamespace(lora_name="a", lora_path="/a")


@pytest.mark.parametrize("seed", range(8))
def test_trees_of_paths_are_the_cpu_engine_s_after_any_history(
    seed: int, trees: ScoredTrees, verification: Verification, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of tenants, users of an adapter, and who shares nothing; what is kept overflows, is cleared,
    and has tokens that are none of the vocabulary."""
    draw, names, slots, prompts = Random(seed), map(str, count()), {}, {}
    places, newest = draw.choice([64, 512]), draw.choice([2, 50])
    for module in (on_host, on_device):
        monkeypatch.setattr(module, "num_places", lambda _: places)
    config = ReDrafterConfig(K, earlier_answers=newest, earlier_prompts=seed % 2 > 0)
    kept = (REQUESTS, 200), (REQUESTS,), (4, REQUESTS + 1)
    texts, sizes, of_requests = (torch.zeros(size, dtype=torch.int32) for size in kept)
    table = SimpleNamespace(config=config, trees=trees, verification=verification)
    table.of_requests = SimpleNamespace(
        gpu=of_requests, stage_write=lambda row, slot, values: of_requests[row, slot].fill_(*values)
    )
    device, host = matching_of(table, texts, sizes, slots), OnHost(config, VOCAB)
    proposer: Any = type("Searchless", (Proposer,), {"explore": None})(config)
    chances = proposer.match_acceptance.probabilities
    chances[:] = device.probabilities.copy_(
        torch.tensor(draw.choices(range(1, 99), k=chances.size)).view(chances.shape) / 100
    )
    batch: Any = SimpleNamespace(token_ids_cpu=texts.numpy(), num_tokens_no_spec=sizes.numpy())
    batch.req_prompt_embeds = {}
    phrases = [draw.choices(range(VOCAB + 1), k=12) for _ in range(5)]
    seen = set[int]()
    for _ in range(20):
        finished, requests, new = {n for n in slots if draw.random() < 0.4}, {}, []
        device.earlier.finish(finished)
        for name in finished:
            text, begin = texts[slots[name], : sizes[slots.pop(name)]].tolist(), prompts[name]
            parts = {"prompt_token_ids": text[:begin], "output_token_ids": text[begin:]}
            requests[name] = SimpleNamespace(prompt_embeds=None, **parts)
        for slot in {*range(REQUESTS)} - {*slots.values()}:
            slots[name := next(names)] = slot
            sizes[slot] = prompts[name] = draw.randint(1, 12)
            texts[slot, :12] = torch.tensor(draw.choice(phrases))
            begun = SimpleNamespace(req_id=name, prompt_len=prompts[name], prompt_embeds=None)
            begun.sampling_params = SimpleNamespace(extra_args=draw.choice(OF_REQUESTS))
            begun.lora_request = draw.choice(ADAPTERS)
            new.append(begun)
            device.earlier.begin(slot, begun)
        host.update(SimpleNamespace(finished_req_ids=finished, scheduled_new_reqs=new), requests)
        if draw.random() < 0.1:
            device.earlier.clear()
            host.forget_answers()
        for slot, size in enumerate(sizes.tolist()):
            parts = [draw.choice(phrases)[draw.randint(0, 8) :] for _ in range(draw.choice([1, 6]))]
            text = [*chain.from_iterable(parts)][: 200 - size]
            texts[slot, size : size + len(text)] = torch.tensor(text)
            sizes[slot] += len(text)

        asked = draw.sample(sorted(slots), draw.randint(1, REQUESTS))
        at = torch.tensor([slots[name] for name in asked])
        temperatures = verification.temperatures[: len(at)]
        temperatures.copy_(torch.tensor(draw.choices([0, 1], k=len(at))))
        nothing = torch.zeros(len(at), 0, 0, dtype=torch.int64)
        search = ScoredNodes(ExploredNodes(nothing, nothing, nothing.float()), None)
        nodes, _, classes = device.join(0, search, at)
        of_nodes, limits = (nodes.tokens, nodes.back_pointers, nodes.log_probs), of_requests[:2]
        drafts, roots = torch.zeros(len(at), K, dtype=torch.int64), torch.zeros_like(at)
        build_tree(roots, *of_nodes, trees, at, NodeLimits(*limits), drafts, match_classes=classes)
        sampled, most = temperatures.numpy() > 0, np.full(len(at), K)
        paths = host.matches(batch, at.tolist(), asked, sampled, chances)
        draft = proposer.propose(None, roots, None, most, sampled, MATCHES, None, paths)
        used, of_tree = draft.tree.is_node, (draft.tree.tokens, draft.tree.parents)
        expected = *of_tree, *map(torch.from_numpy, (draft.match_classes, draft.survival))
        found = trees.tokens, trees.parents, trees.match_classes, trees.log_probs.exp()
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours[at][used], theirs[used], check_dtype=False)
        assert trees.log_probs[at][~used].isneginf().all()
        seen |= {*draft.match_classes.flatten().tolist()}
    of_earlier = {(of - 1) % LENGTH_CLASSES >= LONGEST_MATCH for of in seen if of}
    assert of_earlier == {False, True}, "of one source alone"


def test_kernels_learn_of_matches_what_torch_does_in_one_launch(learning: ContextMatching) -> None:
    learning.counts[1, 0, 0, 1] = 0.0  # never accepted, and faded away
    prior = learning.counts.clone()
    with in_torch("context_matching"):
        learning.learn(SLOT)
    expected = learning.counts.clone(), learning.probabilities.clone()
    graph, _ = recorded(lambda: learning.learn(SLOT))
    learning.counts.copy_(prior)
    graph.replay()
    torch.testing.assert_close((learning.counts, learning.probabilities), expected)
    assert graph.num_nodes == 1
    assert learning.probabilities.all()


def test_greedy_and_sampled_requests_are_calibrated_apart(confidence: NodeConfidence) -> None:
    """Of the same tree in one batch, a greedy request's walk took two nodes, a sampled one's none;
    kernels learn what torch does, in two launches."""
    verification, estimator = confidence.verification, confidence.estimator
    for part in (*vars(verification.staged).values(), verification.num_verified):
        part[1] = part[0]
    verification.path[1, 1:] = -1
    verification.temperatures[1] = 0.7
    slots, statistics, before = SLOT.repeat(2), estimator.statistics, estimator.biases.clone()
    with in_torch("node_confidence"):
        confidence.learn(slots)
    expected = statistics.clone()
    graph, _ = recorded(lambda: confidence.learn(slots))
    statistics.zero_()
    graph.replay()
    torch.testing.assert_close(statistics, expected)
    assert graph.num_nodes == 2
    estimator.refit()
    greedy, sampled = estimator.biases - before
    assert greedy[1] > 0, "its only judged node of depth 2 was accepted"
    assert sampled[0] < 0
    assert sampled[1] == 0, "of depth 2 it has no judged node"


def test_refits_follow_what_was_accepted_soon_and_then_as_seldom_as_vllms(
    confidence: NodeConfidence,
) -> None:
    confidence.learn(SLOT)
    of_a_step = confidence.estimator.statistics.clone()
    before, refits = confidence.estimator.biases.clone(), []
    for step in range(1, 4 * LONGEST_REFIT):
        confidence.count_step()
        if not torch.equal(confidence.estimator.biases, before):
            refits.append(step)
            after = confidence.estimator.biases
            assert after[0, 1] > before[0, 1], "all nodes of depth 2 were accepted"
            before = after.clone()
        confidence.estimator.statistics.add_(of_a_step)
    assert refits[0] == FIRST_REFIT
    waits = [later - sooner for sooner, later in pairwise(refits)]
    assert waits == [16, 32, 64, LONGEST_REFIT, LONGEST_REFIT]
