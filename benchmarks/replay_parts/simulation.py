"""Recorded drafts replayed, with arithmetic for a clock: what a way of choosing would yield.

N requests are always in flight, each at a place of some answer; one that ends makes room for the
next, in an order that has every answer equally often. A step verifies what the method chooses,
every request goes on behind what was accepted of it, and the clock advances by what the step must
cost at least. Nothing is run, and reading prompts is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from step_cost_parts.floor import Arithmetic, draft_launches
from torch import Tensor

from replay_parts.traces import Searches, Traces
from vllm_redrafter.budget.batch_budget import CHAINS, PLAIN, TREES, BatchBudget
from vllm_redrafter.budget.calibration import AcceptanceEstimator, Calibration, log_odds_of
from vllm_redrafter.budget.choice import Flags, best_budget, best_shares, shares
from vllm_redrafter.budget.costs import CostTable, DraftCost, VerifyCost
from vllm_redrafter.budget.draft_lengths import LengthChoice, draft_lengths
from vllm_redrafter.budget.gate import Gate, worth_drafting
from vllm_redrafter.budget.refits import RefitsByNodes, RefitsBySteps
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.tree.policy import SearchShape, search_shape, search_tiers

ROW_STEPS = 256
"""Sizes that a table of verification costs has at most."""

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """Requests that decode together, and what this costs at least.

    Attributes:
        least: the model and the device.
        requests: N.
        context: tokens in the cache of each.
        launch_seconds: of each of a draft's kernels.
    """

    least: Arithmetic
    requests: int
    context: int
    launch_seconds: float = 0.0

    def step_seconds(self, rows: int) -> float:
        """The target's pass."""
        return self.least.forward(self.requests, self.context, rows)

    def draft_seconds(self, shape: SearchShape) -> float:
        launches = draft_launches(shape.beam_length) * self.launch_seconds
        return self.least.draft(self.requests, *shape) + launches

    @property
    def plain_rate(self) -> float:
        """Tokens per second of plain decoding."""
        return self.requests / self.step_seconds(self.requests)

    def cost_table(self, config: ReDrafterConfig) -> CostTable:
        """The table that an engine would measure, for all that the budget may choose."""
        nodes = config.num_speculative_tokens
        tiers = search_tiers(config, nodes)
        most = self.requests * (nodes + 1)
        rows = np.unique(np.linspace(self.requests, most, ROW_STEPS).astype(int)).tolist()
        return CostTable(
            target="arithmetic",
            drafter="arithmetic",
            device="arithmetic",
            draft=tuple(DraftCost(self.requests, *t, self.draft_seconds(t)) for t in tiers),
            verify=tuple(VerifyCost(size, self.step_seconds(size)) for size in rows),
        )


class Step(NamedTuple):
    """One step: seconds, and for each request the nodes verified and accepted, [N] each."""

    seconds: float
    verified: Counts
    accepted: Counts
    drafted: bool


class Method(Protocol):
    """A way to choose what a step verifies."""

    def step(self, places: Tensor, joined: Flags) -> Step:
        """Decode once, the requests standing at `places` [N] of the text, `joined` [N] bool new."""
        ...

    def settled(self) -> None:
        """The warm-up is over."""
        ...


class Fixed:
    """The same K nodes of the same search at every step."""

    def __init__(self, traces: Traces, batch: Batch, config: ReDrafterConfig) -> None:
        self.batch = batch
        self.shape = search_shape(config, config.num_speculative_tokens)
        self.verified, self.accepted = best_nodes(traces, config)

    def step(self, places: Tensor, joined: Flags) -> Step:
        verified = self.verified[places.numpy()]
        rows = self.batch.requests + int(verified.sum())
        seconds = self.batch.draft_seconds(self.shape) + self.batch.step_seconds(rows)
        return Step(seconds, verified, self.accepted[places.numpy()], drafted=True)

    def settled(self) -> None:
        """Nothing was learned."""


class Adaptive:
    """The engines' own budget, calibration and gate, which see the arithmetic as their clock."""

    def __init__(self, traces: Traces, batch: Batch, config: ReDrafterConfig) -> None:
        self.traces, self.batch = traces, batch
        self.max_nodes = config.num_speculative_tokens
        self.budget = BatchBudget(config, batch.cost_table(config), batch.requests)
        self.estimator = AcceptanceEstimator(config.beam_length)
        self._refits = RefitsByNodes()
        # The recorded answers are greedy ones.
        self._sampled = np.zeros(batch.requests, dtype=np.bool_)

    def plain_step(self) -> Step:
        """Without a draft."""
        none = np.zeros(self.batch.requests, dtype=np.int64)
        return Step(self.batch.step_seconds(self.batch.requests), none, none, drafted=False)

    def step(self, places: Tensor, joined: Flags) -> Step:
        requests = self.batch.requests
        plan = self.budget.plan(self._sampled, joined if joined.any() else None, self.max_nodes)
        if plan.shape is None:
            plain = self.plain_step()
            self.budget.stepped(PLAIN, requests, requests, plain.seconds)
            return plain
        width, length = plan.shape
        searches = self.traces.by_width[width].at(places, length)
        log_odds, survival, order = self.ranked(searches)
        ranked = survival.flatten(1).gather(1, order)
        probable = ranked.numpy()
        verified, _ = best_shares(probable, self._sampled, self.budget.terms(requests, plan))
        draft_seconds = self.batch.draft_seconds(plan.shape)
        self.budget.drafted(plan.shape, survival.numpy(), self._sampled, draft_seconds)
        accepted = self.judge(searches, log_odds, order, verified)
        chosen = np.arange(probable.shape[1]) < verified[:, None]
        self.budget.verified((float(probable[chosen].sum()), 0.0), (float(accepted.sum()), 0.0))
        rows = requests + int(verified.sum())
        seconds = self.batch.step_seconds(rows)
        kind = PLAIN if rows == requests else CHAINS if width == 1 else TREES
        self.budget.stepped(kind, requests, rows, seconds)
        return Step(draft_seconds + seconds, verified, accepted, drafted=True)

    def ranked(self, searches: Searches) -> tuple[Tensor, Tensor, Tensor]:
        """(log-odds, survival probabilities [N, L, W], and the K best nodes' places [N, K])."""
        found = searches.log_probs, searches.back_pointers
        log_odds = log_odds_of(*found)
        log_survival = self.estimator.log_survival(log_odds, *found)
        return log_odds, log_survival.exp(), _ranked(log_survival)[:, : self.max_nodes]

    def judge(
        self, searches: Searches, log_odds: Tensor, order: Tensor, verified: Counts
    ) -> Counts:
        """Learn from the verified nodes; [N] how many were accepted."""
        first = torch.arange(order.shape[1]) < torch.from_numpy(verified)[:, None]
        is_verified = torch.zeros_like(searches.accepted.flatten(1)).scatter_(1, order, first)
        is_verified = is_verified.view_as(searches.accepted)
        above = searches.accepted[:, :-1].gather(2, searches.back_pointers[:, 1:])
        reached = torch.cat([torch.ones_like(searches.accepted[:, :1]), above], dim=1)
        depths = torch.arange(1, log_odds.shape[1] + 1)[:, None].expand_as(log_odds)
        judged = is_verified & reached
        self.estimator.observe(log_odds, depths, judged, searches.accepted)
        if self.is_refit_due(int(judged.sum())):
            self.estimator.refit()
        accepted: Counts = (is_verified & searches.accepted).flatten(1).sum(dim=1).numpy()
        return accepted

    def is_refit_due(self, judged: int) -> bool:
        """As the CPU engine decides, after a step in which so many nodes were judged."""
        return self._refits.due(judged)

    def settled(self) -> None:
        self.estimator.reset_calibration()

    @property
    def calibration(self) -> Calibration:
        """The expected calibration errors since the warm-up."""
        return self.estimator.calibration()


class Graphs(Adaptive):
    """The CUDA engine's way: one width, all nodes at hand ranked together, some lengths."""

    lengths_of: Callable[[int], Sequence[int]] = staticmethod(draft_lengths)

    def __init__(self, traces: Traces, batch: Batch, config: ReDrafterConfig) -> None:
        super().__init__(traces, batch, config)
        self.width, longest = search_shape(config, self.max_nodes)
        self.choice = LengthChoice(self.lengths_of(longest), self.max_nodes)
        self.gate, self._pays, self._gain = Gate(), True, 1.0
        rows = range(batch.requests * (self.max_nodes + 1) + 1)
        self._verify = np.array([batch.step_seconds(size) for size in rows])
        shapes = [SearchShape(self.width, length) for length in self.choice.lengths]
        self._draft = np.array([batch.draft_seconds(shape) for shape in shapes])
        self._refits_by_steps = RefitsBySteps()

    def step(self, places: Tensor, joined: Flags) -> Step:
        requests, choice = self.batch.requests, self.choice
        if not self.gate.opens(self._pays, gain=self._gain):
            return self.plain_step()
        length = choice.next()
        seconds = self._draft[choice.lengths.index(length)]
        searches = self.traces.by_width[self.width].at(places, length)
        log_odds, by_beam, order = self.ranked(searches)
        survival = by_beam.flatten(1).gather(1, order).double().numpy()
        best = best_budget(survival, requests, seconds, self._verify)
        # A probe that verified nothing would find out nothing.
        budget = best.budget if self._pays else max(best.budget, requests)
        verified = shares(survival, budget)
        if length == choice.longest:
            choice.learn(survival, (order // self.width + 1).numpy())
        choice.consider(requests, requests, self._draft, self._verify)
        plain_rate = requests / self._verify[requests]
        self._gain = float(best.tokens_per_second / plain_rate)
        self._pays = worth_drafting(self._gain, self._pays)
        accepted = self.judge(searches, log_odds, order, verified)
        rows = requests + int(verified.sum())
        return Step(seconds + self._verify[rows], verified, accepted, drafted=True)

    def is_refit_due(self, judged: int) -> bool:
        """As the CUDA engine decides, which does not wait to know how many were judged."""
        return self._refits_by_steps.due()


class Longest(Graphs):
    """Likewise, with drafts of full length alone."""

    lengths_of = staticmethod(lambda longest: (longest,))


def best_nodes(traces: Traces, config: ReDrafterConfig) -> tuple[Counts, Counts]:
    """Of a tree of the K nodes that the drafter finds most probable, at each of the T places.

    Returns:
        ([T] nodes in it, [T] how many of them are accepted).
    """
    width, length = search_shape(config, config.num_speculative_tokens)
    searches = traces.by_width[width].at(torch.arange(traces.left.shape[0]), length)
    order = _ranked(searches.log_probs)[:, : config.num_speculative_tokens]
    is_node = searches.log_probs.flatten(1).gather(1, order) > -torch.inf
    accepted = searches.accepted.flatten(1).gather(1, order)
    return is_node.sum(dim=1).numpy(), accepted.sum(dim=1).numpy()


def _ranked(scores: Tensor) -> Tensor:
    """[N, L * W]: nodes by descending score, parents before children, as in `token_tree.py`."""
    return scores.flatten(1).sort(dim=1, descending=True, stable=True).indices


@dataclass(frozen=True)
class Yield:
    """What a method yields, after a warm-up.

    Attributes:
        tokens_per_second: of all requests.
        tokens_per_step: per request.
        nodes: verified, per request and step.
        undrafted: share of the steps without a draft.
    """

    tokens_per_second: float
    tokens_per_step: float
    nodes: float
    undrafted: float


def replay(
    method: Method, left: Tensor, requests: int, warm_up: int, steps: int, seed: int
) -> Yield:
    """Let a method decode.

    Args:
        method: of `requests` requests.
        left: of the traces.
        requests: N.
        warm_up: steps that do not count.
        steps: that count.
        seed: of the answers' order.
    """
    run = _steps(method, left.numpy(), requests, seed)
    for _ in range(warm_up):
        next(run)
    method.settled()
    counted = [next(run) for _ in range(steps)]
    tokens = sum(written for _, written in counted)
    return Yield(
        tokens_per_second=tokens / sum(step.seconds for step, _ in counted),
        tokens_per_step=tokens / (requests * steps),
        nodes=float(np.mean([step.verified.mean() for step, _ in counted])),
        undrafted=sum(not step.drafted for step, _ in counted) / steps,
    )


def _steps(method: Method, left: Counts, requests: int, seed: int) -> Iterator[tuple[Step, int]]:
    """Each step, and how many tokens it wrote."""
    random = np.random.default_rng(seed)
    begins = random.permutation(np.flatnonzero(np.concatenate(([True], left[:-1] == 1))))
    places = random.integers(left.shape[0], size=requests)
    following = 0
    joined = np.ones(requests, dtype=np.bool_)
    while True:
        step = method.step(torch.from_numpy(places), joined)
        # As in the engines, what is accepted beyond the end of an answer does not count.
        output = np.minimum(step.accepted + 1, left[places])
        joined = output == left[places]
        (ended,) = np.nonzero(joined)
        places = places + output
        places[ended] = begins[(following + np.arange(ended.shape[0])) % begins.shape[0]]
        following += ended.shape[0]
        yield step, int(output.sum())
