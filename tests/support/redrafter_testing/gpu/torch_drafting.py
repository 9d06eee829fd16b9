# SPDX-License-Identifier: Apache-2.0
"""What kernels do in a draft, by torch: faster on a CPU; tests/triton_kernels compares them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from redrafter_testing.algorithm.context_matches import joined
from redrafter_testing.algorithm.earlier_answers import found_in, slow_merged
from redrafter_testing.gpu.kernel_references import naive_top_candidates
from redrafter_testing.gpu.recorded_graphs import as_one_node
from vllm_redrafter.budget.acceptance import AcceptanceEstimator, log_odds_of
from vllm_redrafter.drafting.own_matches import own_matches
from vllm_redrafter.heads.head import DraftHead
from vllm_redrafter.tree.beam_search import ExploredNodes, beam_search
from vllm_redrafter.tree.context_matches import (
    LENGTH_CLASSES,
    LONGEST_MATCH,
    ContextMatches,
    joint_scores,
)
from vllm_redrafter.tree.policy import SearchShape
from vllm_redrafter.tree.sharding import VocabularyShard


class TorchSearch:
    """See `DraftSearch`."""

    table = None

    def __init__(
        self,
        drafter: DraftHead,
        embed: Callable[[Tensor], Tensor],
        table: nn.Module | None,
        shape: SearchShape,
        max_requests: int,
        shard: VocabularyShard | None = None,
        survival: tuple[Tensor, Tensor, Tensor] | None = None,
        candidates: Callable[[int], int] | None = None,
    ) -> None:
        self.shape, self._survival = shape, survival
        self._drafter, self._embed, self._shard = drafter, embed, shard
        self._candidates = candidates

    def explore(self, hidden: Tensor, root_tokens: Tensor) -> tuple[ExploredNodes, Tensor | None]:
        explored = self.explored(hidden, root_tokens)
        if self._survival is None:
            return explored, None
        found = explored.log_probs, explored.back_pointers
        log_odds = log_odds_of(*found)
        slopes, biases, temperatures = self._survival
        kinds = (temperatures[: len(root_tokens)] > 0).long()
        by_request = AcceptanceEstimator(biases.shape[1])
        by_request.slope, by_request.biases = slopes[kinds], biases[kinds]
        survival = by_request.log_survival(log_odds, *found)
        return replace(explored, log_probs=survival), log_odds

    def explored(self, hidden: Tensor, roots: Tensor) -> ExploredNodes:
        """By the drafter's log-probabilities."""
        count = 0 if self._candidates is None else self._candidates(len(roots))
        given = self._drafter, self._embed, hidden, roots
        return beam_search(*given, *self.shape, self._shard, count)


@as_one_node
def find_matches(text: Tensor, num_tokens: Tensor, entries: Tensor, vocab: int, out: Any) -> None:
    requests = len(entries)
    _, num_paths, path_length = out.tokens.shape
    is_text, rows = entries < len(text), entries.clamp(max=len(text) - 1)
    lengths = num_tokens.index_select(0, rows).clamp(min=1).long().numpy()
    paths = num_paths, path_length
    found = own_matches(text.numpy(), rows.long().numpy(), lengths, paths, vocab)
    for to, part, none in ((out.tokens, found.tokens, -1), (out.classes, found.classes, 0)):
        to[:requests].copy_(part.masked_fill(~is_text[:, None, None], none))


@as_one_node
def find_earlier(
    entries: Tensor, temperatures: Tensor, probabilities: Tensor, vocab: int, store: Any, out: Any
) -> None:
    (end, count), begins, places = store.state[:2].tolist(), store.state[3:], store.ring.shape[1]
    first = int(begins[count % len(begins)]) if count >= len(begins) else 0
    kept = store.ring[:, torch.arange(max(first, end - places), end) % places].T.tolist()
    for request, slot in enumerate(entries.tolist()):
        if slot == len(store.text):
            continue
        text = store.text[slot, : store.num_tokens[slot]].tolist(), int(store.origins[0, slot])
        earlier = found_in(kept, text, out.tokens.shape[1:], vocab)
        own = out.tokens[request].tolist(), out.classes[request].tolist()
        paths = slow_merged(own, earlier, probabilities[int(temperatures[request] > 0)])
        out.tokens[request], out.classes[request] = map(torch.tensor, paths)


@as_one_node
def join_matches(
    search: Any, paths: Any, probabilities: Tensor, temperatures: Tensor, out: Any
) -> None:
    explored, requests = ExploredNodes(*search[:3]), len(temperatures)
    matches = ContextMatches(paths.tokens[:requests], paths.classes[:requests].long())
    nodes, match_classes = joined(explored, matches)
    by_request = probabilities.index_select(0, (temperatures > 0).long())
    out.tokens[:requests].copy_(nodes.tokens)
    out.back_pointers[:requests].copy_(nodes.back_pointers)
    out.scores[:requests].copy_(joint_scores(nodes, match_classes, by_request))
    out.match_classes[:requests].copy_(match_classes)
    if search.log_odds is not None:
        (levels, columns), (length, width) = out.scores.shape[1:], search.tokens.shape[1:]
        below = (0, columns - width, 0, levels - length)
        out.log_odds[:requests].copy_(pad(search.log_odds, below, value=-torch.inf))


def observe_matches(
    entries: Tensor,
    match_classes: Tensor,
    trees: Any,
    memory: float,
    counts: Tensor,
    probabilities: Tensor,
    totals: Tensor,
) -> None:
    _, matches, depth = probabilities.shape
    classes = match_classes.index_select(0, entries).long()
    judged, accepted = judged_and_accepted(trees, len(entries))
    on_path = judged & (classes > 0)
    verified = torch.arange(classes.shape[1]) < trees.num_verified[: len(entries), None]
    of_length, counted = (classes - 1) % LENGTH_CLASSES, (verified, on_path & accepted)
    of_earlier = (classes > 0) & (of_length >= LONGEST_MATCH)
    sources = (classes > 0) & ~of_earlier, of_earlier
    totals += torch.stack([(of & nodes).sum() for of in sources for nodes in counted])
    kinds = (trees.temperatures[: len(entries)] > 0).long()[:, None]
    at = (kinds * matches + classes - 1) * depth + trees.depths[: len(entries)] - 1
    added = torch.stack([on_path, on_path & accepted], dim=-1).float()
    counts.view(-1, 2).index_add_(0, at.masked_fill(~on_path, 0).flatten(), added.flatten(0, 1))
    counts *= (memory / counts[..., :1]).clamp(max=1.0)
    counts[..., 1].clamp_(min=1.0)
    torch.div(counts[..., 1], counts[..., 0], out=probabilities)


def observe_nodes(
    entries: Tensor,
    log_odds: Tensor,
    trees: Any,
    slopes: Tensor,
    biases: Tensor,
    sums: Tensor,
    statistics: Tensor,
) -> None:
    own = log_odds.index_select(0, entries)
    judged, accepted = judged_and_accepted(trees, len(entries))
    # Of what the drafter did not find, only the text tells.
    known = judged & (own != -torch.inf)
    own = own.masked_fill(~known, 0.0)
    samples = trees.temperatures[: len(entries), None] > 0
    for kind, state in enumerate(zip(slopes, biases, statistics, strict=True)):
        estimator = AcceptanceEstimator(biases.shape[1], biases.device)
        estimator.slope, estimator.biases, estimator.statistics = state
        estimator.observe(own, trees.depths[: len(entries)], known & (samples == kind), accepted)


def judged_and_accepted(trees: Any, requests: int) -> tuple[Tensor, Tensor]:
    """[requests, K+1] bool each: verified nodes below an accepted one; accepted nodes."""
    tokens, parents, _, num_verified, path = (part[:requests] for part in trees[:5])
    accepted = torch.zeros_like(tokens, dtype=torch.bool)
    # Behind the path's end: the root once more.
    accepted.scatter_(1, path.clamp(min=0).long(), True)
    node = torch.arange(tokens.shape[1], device=tokens.device)
    verified = (node > 0) & (node < num_verified[:, None]) & (tokens >= 0)
    return verified & accepted.gather(1, parents.long()), accepted


STAND_INS: dict[str, dict[str, Any]] = {
    "trunk": {"DraftSearch": TorchSearch},
    "chain_trunk": {"top_candidates": naive_top_candidates},
    "node_confidence": {"observe_nodes": observe_nodes},
    "context_matching": {
        "find_earlier": find_earlier,
        "find_matches": find_matches,
        "join_matches": join_matches,
        "observe_matches": observe_matches,
    },
}
"""By module of `engine/v2`."""

_kernels: list[tuple[Any, str, Any]] = []


def use(_worker: Any = None, *names: str) -> None:
    """From here on these modules, or all of them, draft by torch in this process."""
    for name in names or STAND_INS:
        # By name: a test may have imported it afresh, for kernels that are interpreted.
        module = import_module(f"vllm_redrafter.engine.v2.{name}")
        for function, stand_in in STAND_INS[name].items():
            _kernels.append((module, function, getattr(module, function)))
            setattr(module, function, stand_in)


def use_kernels(_worker: Any = None) -> None:
    """Undo `use`."""
    while _kernels:
        setattr(*_kernels.pop())


@contextmanager
def in_torch(*names: str) -> Iterator[None]:
    """In the body, these modules draft by torch."""
    use(None, *names)
    try:
        yield
    finally:
        use_kernels()
