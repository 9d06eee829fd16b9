"""The batch's budget, step by step: whether to draft, how wide and how long, how many to verify.

All of it runs on the host, once per step, on numpy arrays of a few hundred numbers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from vllm_redrafter.budget.choice import Choice, Flags, Floats, Terms, best_common_share
from vllm_redrafter.budget.costs import CostTable
from vllm_redrafter.budget.dips import Dips
from vllm_redrafter.budget.draft_costs import DraftCosts
from vllm_redrafter.budget.drift import Drift, cell
from vllm_redrafter.budget.gate import FAR, Gate, worth_drafting
from vllm_redrafter.budget.pace import Pace
from vllm_redrafter.budget.plain_looks import PlainLooks
from vllm_redrafter.budget.probes import ColdDrafts, Probes
from vllm_redrafter.budget.prospects import Prospects
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.tree.policy import SearchShape, search_shape, search_tiers

KINDS = PLAIN, CHAINS, TREES = range(3)
"""Kinds of steps, as a batch's costs distinguish them: trees take tree attention."""

FIRST_STEPS = 8
"""Plain steps that an engine begins with: whether drafts pay is a comparison with them, and where
none was seen their time would be guessed from that of steps that verify."""
FIRST_DRAFTS = 16
"""Drafts by which a drafter is judged before drafting can be found not to pay: the first half of
them by the full search, the others by chains, as steps of both kinds have to be seen to be
compared."""
SURVEY_INTERVAL, SURVEY_COST = 16, 0.005
"""Drafts from one look at another search to the next, at least: shorter and narrower ones than the
full search do not see what it would, and trees do not see what chains take; and the share of the
time that looks may take: where they are dear, they are made less often."""
PLAIN_STEPS = 3
"""Plain steps, after the first, that have to be seen before drafting can be compared with them, for
each size of the batch."""
LEARNED, LEARNING_INTERVAL = 64, 8
"""Steps of a kind, for about so many requests, and drafts for a kind of request, that are all
planned and learned from; and of further ones, one of so many: a small target waits for that."""
KEPT_STEPS, KEPT_NEW, KEPT_SHUT = 16, 4, 64
"""Steps that a search is kept, once chosen for a number of requests; the same while few steps of
its kind were seen for so many; and, where none pays, that this is believed, unless a probe is made.
"""


class Plan(NamedTuple):
    """What a step's draft is to be.

    Attributes:
        shape: the search; None to draft nothing.
        pays: it is expected to be faster than plain decoding; else it is a probe.
        steps: for how many steps it holds, this one included, while the requests stay the same.
    """

    shape: SearchShape | None
    pays: bool
    steps: int = 1


class BatchBudget:
    """Decides for one engine, and learns from its steps.

    Attributes:
        config: the maxima.
        costs: what was measured at start-up.
        learns: whether the last draft is learned from: what it took and found, and what is accepted
            of it. Others need not be told of.
    """

    def __init__(self, config: ReDrafterConfig, costs: CostTable, max_requests: int) -> None:
        """Start from measured costs.

        Args:
            config: the maxima.
            costs: measured where the engine runs, of all widths in `search_tiers`.
            max_requests: the largest batch.
        """
        self.config = config
        self.costs = costs
        self.learns = True
        self.gate = Gate()
        most = config.num_speculative_tokens
        rows = np.arange(max_requests * (most + 1) + 1)
        self._steps_seconds = Drift([costs.verify_seconds(rows)] * len(KINDS))
        shapes = {shape for nodes in range(1, most + 1) for shape in search_tiers(config, nodes)}
        self._drafts_seconds = DraftCosts(costs, shapes, max_requests)
        self._pace, self._looks, self._dips = Pace(), PlainLooks(), Dips()
        self._probes, self._cold = Probes(), ColdDrafts()
        # By the last draft, until its step is timed.
        self._draft_pace: float | None = None
        # Of requests that take the most probable token, and of those that sample: a drafter is
        # worth less to these, and a server has both, or in turn.
        self._prospects = [Prospects(config.beam_length, config.beam_width) for _ in range(2)]
        self._steps = self._again = 0
        # By search, the step of its last survey; and those to be made, from step to step.
        self._surveyed: dict[SearchShape, int] = {}
        self._surveys: dict[SearchShape, float] = {}
        # Of the batch: requests that take the most probable token, and that sample.
        self._members = (0, 0)
        # Half octave of requests, whether there are greedy ones and sampled ones, and max_nodes.
        self._considered = (-1, False, False, 0)
        self._best = SearchShape(1, 1)
        self._kept = 0
        self._pays = True
        # Tokens per second expected of the best search, over plain decoding's.
        self._gain = 1.0

    def plan(self, sampled: Flags, joined: Flags | None, max_nodes: int) -> Plan:
        """Choose the search for a batch.

        Args:
            sampled: [N] bool, of the requests that have drawn a token: those that sample it; the
                others take the most probable one.
            joined: [N] bool, those that were not in the last batch; None where all were.
            max_nodes: what the next step can verify per request; at least 1.
        """
        plan = self._planned(sampled, joined, max_nodes)
        self._cold.planned(drafts=plan.shape is not None)
        return plan

    def _planned(self, sampled: Flags, joined: Flags | None, max_nodes: int) -> Plan:
        self._pass_steps()
        self._steps += 1
        self.learns = True
        requests = sampled.shape[0]
        self._looks.step(requests)
        self._members = _by_kind(sampled)
        if joined is not None:
            for prospects, all_of, new in zip(
                self._prospects, self._members, _by_kind(sampled[joined]), strict=True
            ):
                prospects.joined(new / max(all_of, 1))
            # Where half of the batch is new, nothing of what was found is; but where drafts are far
            # from paying, they are that for most requests.
            if self._pays or self._gain >= FAR:
                self._kept = int(self._kept * max(1.0 - 2.0 * joined.mean(), 0.0))
        if self._steps <= FIRST_STEPS:
            return Plan(None, pays=True)
        present = zip(self._prospects, self._members, strict=True)
        judged = min((p.drafts for p, members in present if members), default=FIRST_DRAFTS)
        if judged < FIRST_DRAFTS:
            full = search_shape(self.config, max_nodes)
            first = full if judged < FIRST_DRAFTS // 2 else SearchShape(1, full.beam_length)
            return Plan(first, pays=True)
        # A batch that is nearly as large is no other one.
        takers, samplers = self._members
        batch = (cell(requests), takers > 0, samplers > 0, max_nodes)
        if self._dips.in_dip(not self._pays and batch[0] < self._considered[0]):
            return Plan(None, pays=False)
        if self._considered != batch or not self._kept:
            self._best, self._pays = self._best_search(requests, max_nodes)
            if self._pays or self._considered != batch:
                self._probes.end()
            self._considered = batch
            self._kept = self._keeps(requests)
        self._kept -= 1
        if not self._pays and self._probes.left:
            return Plan(self._probes.go_on(), pays=False)
        if not self.gate.opens(self._pays, kind=batch[1:3], size=batch[0], gain=self._gain):
            self._looks.shut()
            shut_for = self.gate.shut_for(kind=batch[1:3], size=batch[0])
            return Plan(None, pays=False, steps=1 + min(self._kept, shut_for))
        if self._pays and self._looks_at_plain(requests):
            return Plan(None, pays=True)
        if not self._pays:
            full = search_shape(self.config, max_nodes)
            return Plan(self._probes.begin(self._best, full, self._gain), pays=False)
        survey = self._due_survey()
        if survey is not None:
            return Plan(survey, pays=True)
        return Plan(self._best, True, 1 if self._is_new(requests, judged) else LEARNING_INTERVAL)

    def again(self) -> None:
        """A step begins for which the last plan still holds."""
        self.learns = False
        self._again += 1

    def _pass_steps(self) -> None:
        """Take note of the steps for which the last plan held, after its first."""
        steps, self._again = self._again, 0
        if not steps:
            return
        size, *kind, _ = self._considered
        self._steps += steps
        self._kept = max(self._kept - steps, 0)
        self._looks.step(sum(self._members), steps)
        if not self._pays:
            self.gate.passed(steps, kind=tuple(kind), size=size)

    def _is_new(self, requests: int, drafts: int) -> bool:
        """Is there much to be learned yet of the best search?"""
        seen = self._steps_seconds.times(_kind_of(self._best), requests)
        return min(seen, drafts) < LEARNED

    def _due_survey(self) -> SearchShape | None:
        for shape, interval in self._surveys.items():
            if self._steps - self._surveyed.get(shape, 0) >= interval:
                self._surveyed[shape] = self._steps
                return shape
        return None

    def _keeps(self, requests: int) -> int:
        """For how many steps what was found for so many requests is believed."""
        if not self._pays:
            return KEPT_SHUT
        seen = self._steps_seconds.steps(_kind_of(self._best), requests)
        return KEPT_STEPS if seen >= KEPT_STEPS else KEPT_NEW

    def _looks_at_plain(self, requests: int) -> bool:
        """Shall this step be plain although drafting pays, to see what it costs?"""
        known = self._steps_seconds.weight(PLAIN, requests, requests) >= PLAIN_STEPS
        return self._looks.wanted(known, self._gain, self._pace.now)

    def terms(self, requests: int, plan: Plan) -> Terms:
        """By what to choose which nodes are verified of what is drafted.

        Args:
            requests: N.
            plan: what is drafted for them.
        """
        assert plan.shape is not None
        kind = _kind_of(plan.shape)
        verify = self.step_seconds(requests, kind)
        # To verify nothing takes no branches, but longer than a plain step behind another one.
        chains = verify if kind == CHAINS else self.step_seconds(requests, CHAINS)
        greedy, others = self._prospects
        return Terms(
            greedy.truth,
            others.truth,
            self.draft_seconds(requests, plan.shape),
            verify,
            float(chains[requests]),
            # A probe that verified nothing would find out nothing.
            0 if plan.pays else requests,
        )

    def verified(self, expected: tuple[float, float], accepted: tuple[float, float]) -> None:
        """Learn from a step how many nodes were accepted, and how many were to be, by their
        survival probabilities: of requests that take the most probable token, and that sample."""
        for prospects, *of_kind in zip(self._prospects, expected, accepted, strict=True):
            prospects.verified(*of_kind)

    def step_seconds(self, requests: int, kind: int) -> Floats:
        """V of steps of this kind, for 0, 1, 2... rows, up to the most that the batch can have.

        As at the machine's usual pace, and so is D: only what they are to each other counts.
        """
        rows = requests * (self.config.num_speculative_tokens + 1)
        return self._steps_seconds.seconds(kind, requests)[: rows + 1]

    def plain_seconds(self, requests: int) -> float:
        """V of a plain step.

        A step that verifies does all that a plain one does. Where it is found to take less, few
        steps were seen, or a product of so few rows is slow; either way it is no gain of drafting,
        and drafts that bring nothing shall not seem to pay by it.
        """
        plain, chains = (self.step_seconds(requests, kind)[requests] for kind in (PLAIN, CHAINS))
        return float(min(plain, chains))

    def draft_seconds(self, requests: int, shape: SearchShape) -> float:
        """D of this search."""
        return self._drafts_seconds.seconds(shape, requests)

    def drafted(self, shape: SearchShape, survival: Floats, sampled: Flags, seconds: float) -> None:
        """Learn from a draft: [N, L, W] survival probabilities of what it explored, of requests
        that sample or do not, [N] bool."""
        requests = survival.shape[0]
        if not self._pays and not self._probes.left:
            # What the probe found is to be considered at once.
            self._kept = 0
        self._draft_pace = None
        if not self._cold.is_cold_draft():
            usual = self._drafts_seconds.usual(shape, requests)
            self._draft_pace = seconds / usual if usual is not None else None
            self._drafts_seconds.observe(shape, requests, self._pace.without(seconds))
        for prospects, of_kind in zip(self._prospects, (~sampled, sampled), strict=True):
            if of_kind.all():
                prospects.observe(survival, self._steps)
            elif of_kind.any():
                prospects.observe(survival[of_kind], self._steps)

    def stepped(self, kind: int, requests: int, rows: int, seconds: float) -> None:
        """Learn from a step's time, its draft's left out."""
        tells = self._looks.tells(plain=kind == PLAIN)
        if kind != PLAIN:
            tells = not self._cold.is_cold_step() and self.learns
        if not tells:
            return
        usual = self._steps_seconds.usual(kind, requests, rows)
        # While a kind of step is new, its draft tells the pace: else what is tried in a moment when
        # the machine is faster than it was would look cheap.
        pace, self._draft_pace = self._draft_pace, None
        if usual is not None:
            pace = seconds / usual
        if pace is not None:
            self._pace.observe(pace)
        if kind == PLAIN:
            usual = self._steps_seconds.usual(kind, requests, rows, least=PLAIN_STEPS)
            self._looks.learned(seconds / usual if usual is not None else self._pace.now)
        self._steps_seconds.observe(kind, requests, rows, self._pace.without(seconds))

    def _best_search(self, requests: int, max_nodes: int) -> tuple[SearchShape, bool]:
        verify = [self.step_seconds(requests, kind) for kind in KINDS]
        plain = requests / self.plain_seconds(requests)
        survival = self._survival(requests)
        found = {}
        for shape in search_tiers(self.config, max_nodes):
            nodes = survival[: shape.beam_length, : shape.beam_width]
            costs = self.draft_seconds(requests, shape), verify[_kind_of(shape)]
            found[shape] = best_common_share(nodes, max_nodes, requests, *costs)
        best = max(found, key=lambda shape: found[shape].tokens_per_second)
        self._gain = float(found[best].tokens_per_second / plain)
        self._surveys = self._surveys_beside(best, found, search_shape(self.config, max_nodes))
        doubt = self._doubt(requests, _kind_of(best), requests + found[best].budget)
        return best, worth_drafting(self._gain, self._pays, doubt)

    def _doubt(self, requests: int, kind: int, rows: int) -> float:
        """How far such steps' time over that of plain ones may be off."""
        seen = self._steps_seconds
        return math.hypot(seen.doubt(PLAIN, requests, requests), seen.doubt(kind, requests, rows))

    def _surveys_beside(
        self, best: SearchShape, found: dict[SearchShape, Choice], full: SearchShape
    ) -> dict[SearchShape, float]:
        """What to look at while the best search is made, and how many steps lie between."""
        surveys = {}
        for shape in (full, SearchShape(1, full.beam_length)):
            if shape == best or (shape != full and best.beam_width == 1):
                continue
            # What it takes beyond what its tokens take with the best one.
            lost = found[shape].seconds - found[shape].tokens / found[best].tokens_per_second
            interval = lost / (SURVEY_COST * found[best].seconds)
            surveys[shape] = max(float(SURVEY_INTERVAL), interval)
        return surveys

    def _survival(self, requests: int) -> Floats:
        """[L, W], of requests that are all like the mean of the past ones of their kind."""
        survival = np.zeros((self.config.beam_length, self.config.beam_width))
        for prospects, members in zip(self._prospects, self._members, strict=True):
            if members:
                survival += members / requests * prospects.expected(self._steps)
        return survival


def _kind_of(shape: SearchShape) -> int:
    return CHAINS if shape.beam_width == 1 else TREES


def _by_kind(sampled: Flags) -> tuple[int, int]:
    """How many requests do not sample, and how many do."""
    number = int(np.count_nonzero(sampled))
    return sampled.shape[0] - number, number
