# SPDX-License-Identifier: Apache-2.0
"""What the next steps run: plain decoding, or a draft by one of the searches, whichever is faster.

Each is an *arm*. What an arm yields is reckoned from costs and survival probabilities, which are
right for what was run of late, and for the others only as long as text and load stay as they were.
So the best arm is run, and now and then another one for a few steps, the one that was left alone
for longest. Its steps are compared with those around them: see `StepTimes`.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from vllm_redrafter.budget.acceptance import HORIZON, SurvivalProfile
from vllm_redrafter.budget.choice import Flags, Floats, VerifyCosts, best_budget, best_common_budget
from vllm_redrafter.budget.costs import CHAINS, PLAIN, TREES, CostTable, StepTimes, bucket
from vllm_redrafter.checkpoints.acceptance import NOTHING_RECORDED, PerSampling
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.tree.policy import MATCHES, SearchShape, search_shape

MARGIN = 1.03
"""An arm is left for one that yields so many times as much."""
BLOCK = 8
"""Steps for which a choice is kept, and that an exploration takes."""
FIRST_INTERVAL, LONGEST_INTERVAL = 64, 512
"""Steps from one exploration to the next, at first and at most; doubled while a choice stands."""
EXPLORATION_SHARE = 0.01
"""Of the time, what explorations may lose."""
UNCOUNTED = 3
"""Steps after a change between drafting and not that are slower: what they read left the caches."""
GAIN_INTERVAL = 4
"""Drafts from one update of what matches are worth to the next: an update is expensive."""


class Step(NamedTuple):
    """What a step runs.

    Attributes:
        arm: its number; 0 is plain decoding.
        explores: another arm is expected to yield more.
    """

    arm: int
    explores: bool


@dataclass
class _Bucket:
    """Batches that are planned for alike.

    Attributes:
        best: the arm that yields most.
        interval: from one exploration to the next, in steps.
        explored: when the last one ended.
        ran: when arms were run last.
    """

    best: int
    explored: float
    interval: int = FIRST_INTERVAL
    ran: dict[int, int] = field(default_factory=dict)


class ArmChoice:
    """Chooses an arm for each step, by what is expected of them, and explores."""

    def __init__(self, explored: Sequence[int], profiles: Sequence[SurvivalProfile] = ()) -> None:
        """
        Args:
            explored: arms that between them tell what there is to know of all.
            profiles: fade where nothing was drafted for long.
        """
        self._explored, self._profiles = explored, profiles
        self._buckets: dict[Hashable, _Bucket] = {}
        # The number of the step, those that its choice is kept for, and plain ones in a row.
        self._clock, self._left, self._plain = 0, 0, 0
        self._at: Hashable = None
        self._step = Step(0, False)

    def next(self, sampled: Flags, room: int, rates: Callable[[], Floats]) -> Step:
        """The step that begins; to be asked for once in each.

        Args:
            sampled: [N] bool, of the batch's requests that sample.
            room: what the next step can verify per request.
            rates: gives the tokens per second expected of each arm, 0 of what cannot be run.
        """
        at = bucket(len(sampled)), bool(sampled.any()), bool(sampled.all()), room
        self._clock += 1
        if at == self._at and self._left:
            self._left -= 1
        else:
            self._step, self._at = self._choose(at, rates()), at
            self._left = BLOCK - 1
        self._buckets[at].ran[self._step.arm] = self._clock
        if self._step.arm and self._plain > HORIZON:
            for profile in self._profiles:
                profile.fade()
        self._plain = 0 if self._step.arm else self._plain + 1
        return self._step

    def pass_plain_step(self) -> bool:
        """Whether the next step of the same batch is plain as this one, without being planned."""
        if self._step.arm or not self._left:
            return False
        self._left -= 1
        self._clock += 1
        self._plain += 1
        return True

    def _choose(self, at: Hashable, rates: Floats) -> Step:
        known = self._buckets.setdefault(at, _Bucket(self._step.arm, self._clock))
        best = int(rates.argmax())
        if rates[best] > MARGIN * rates[known.best]:
            known.best, known.interval = best, FIRST_INTERVAL
        others = [arm for arm in self._explored if arm != known.best and rates[arm] > 0]
        if not others:
            return Step(known.best, False)
        # Of arms that were never run, those that draft the most come first.
        other = max(others, key=lambda arm: (arm not in known.ran, -known.ran.get(arm, -arm)))
        lost = BLOCK * (1.0 - rates[other] / rates[known.best])
        wait = max(known.interval, lost / EXPLORATION_SHARE)
        # Begin with what drafts the most: it tells how wrong the start-up's measures are. Of plain
        # steps they tell that nothing is faster.
        if (self._clock > 1 or not other) and self._clock - known.explored < wait:
            return Step(known.best, False)
        known.explored = self._clock + BLOCK
        known.interval = min(2 * known.interval, LONGEST_INTERVAL)
        return Step(other, True)


class BatchPlanner:
    """Plans the drafts of one engine, and learns from its steps: all on the host.

    Attributes:
        config: the most that is drafted.
        times: what steps and drafts take.
        profile: what drafts are worth to greedy requests, and to sampled ones.
        shape: of the search that the last plan was; None for plain decoding.
    """

    def __init__(
        self,
        config: ReDrafterConfig,
        costs: CostTable,
        max_requests: int,
        recorded: PerSampling = NOTHING_RECORDED,
    ) -> None:
        """
        Args:
            config: the most that is drafted.
            costs: measured, of all arms in `arms_of`.
            max_requests: of a batch.
            recorded: how the drafter's nodes were accepted where it was measured.
        """
        self.config = config
        self.times = StepTimes(costs, max_requests * (config.num_speculative_tokens + 1))
        self.profile = SurvivalProfile(config.beam_length, config.beam_width, recorded)
        has_drafter = any(cost.beam_length for cost in costs.draft)
        self.arms = (None, *arms_of(config, has_drafter))
        longest = max((arm.beam_length for arm in self.arms if arm is not None), default=0)
        explored = {None, MATCHES, SearchShape(1, longest), self.arms[-1]}
        numbers = [arm for arm, shape in enumerate(self.arms) if shape in explored]
        self._choice = ArmChoice(numbers, [self.profile])
        # By how much matches raise the yield of plain steps; and how much more searches yield than
        # requests that are all alike would, matches included, by kind of step.
        self._alone = _Gain()
        self._beside = {CHAINS: _Gain(), TREES: _Gain()}
        self._matched_drafts = 0
        # Of the last plan: the requests that sample, and the most nodes of each.
        self._batch = np.zeros(1, dtype=np.bool_), config.num_speculative_tokens
        self.shape: SearchShape | None = None
        self._explores = False
        # Steps since what is run changed between drafting and not.
        self._settled = 0

    def plan(self, sampled: Flags, max_nodes: int) -> SearchShape | None:
        """Choose the search for a batch; None to draft nothing. To be asked once in each step.

        Args:
            sampled: [N] bool, of the requests that have drawn a token: those that sample it.
            max_nodes: what the next step can verify per request; at least 1.
        """
        self._batch = sampled, max_nodes
        step = self._choice.next(sampled, max_nodes, self._rates)
        shape = self.arms[step.arm]
        self._settled = self._settled + 1 if (shape is None) == (self.shape is None) else 0
        self.shape, self._explores = shape, step.explores
        return shape

    def pass_plain_step(self) -> bool:
        """Whether the next step of the same batch is plain, as the last one was."""
        passes = self._choice.pass_plain_step()
        self._settled += passes
        return passes

    def verify_costs(self, requests: int) -> VerifyCosts:
        """By what to choose which nodes are verified of what is drafted for so many requests."""
        assert self.shape is not None
        rows = requests * (self.config.num_speculative_tokens + 1)
        trees, chains = (self.times.step_seconds(k, requests)[: rows + 1] for k in (TREES, CHAINS))
        return VerifyCosts(
            self.profile.acceptance_ratio,
            self.times.draft_seconds(self.shape, requests),
            trees,
            chains,
            # An exploration that verified nothing would find out nothing.
            requests if self._explores else 0,
        )

    def drafted(self, survival: Floats, sampled: Flags, seconds: float) -> None:
        """Learn from a draft.

        Args:
            survival: [N, L, W], how probable its nodes are to be accepted.
            sampled: [N] bool, of requests that sample.
            seconds: what it took.
        """
        assert self.shape is not None
        if self._settled >= UNCOUNTED:
            self.times.drafted(self.shape, survival.shape[0], seconds)
        self.profile.drafted(survival, sampled)

    def matched(self, tokens_per_second: float, alone: Floats) -> None:
        """Learn what paths found in the text are worth.

        Args:
            tokens_per_second: expected of what is verified, of the search's nodes and of paths'.
            alone: [N, M, D], how probable the nodes of paths are to be accepted.
        """
        self._matched_drafts += 1
        if self._matched_drafts % GAIN_INTERVAL:
            return
        assert self.shape is not None
        requests = len(alone)
        draft = self.times.draft_seconds(MATCHES, requests)

        def rate(survival: Floats, kind: int) -> float:
            ranked = np.sort(survival.reshape(requests, -1), axis=1)[:, ::-1]
            nodes = ranked[:, : self.config.num_speculative_tokens]
            verify = self.times.step_seconds(kind, requests)
            return best_budget(nodes, requests, draft, verify).tokens_per_second

        best = alone.sum(axis=2).argmax(axis=1)
        rates = [rate(alone[np.arange(requests), best], CHAINS)]
        if self.config.tree != "chain":
            rates.append(rate(alone, TREES))
        self._alone.learn(max(rates) * self._plain_seconds(requests) / requests)
        if self.shape.beam_length:
            gain = tokens_per_second / self._searched_rate(self.shape)
            self._beside[_kind_of(self.shape)].learn(gain)

    def stepped(self, kind: int, requests: int, rows: int, seconds: float) -> None:
        """Learn from a step's time, its draft's left out."""
        if self._settled >= UNCOUNTED:
            self.times.stepped(kind, requests, rows, seconds, self._explores)

    def _rates(self) -> Floats:
        """Tokens per second of each arm."""
        sampled, max_nodes = self._batch
        rates = [len(sampled) / self._plain_seconds(len(sampled))]
        largest = search_shape(self.config, max_nodes)
        for arm in self.arms[1:]:
            assert arm is not None
            if not arm.beam_length:
                rates.append(rates[0] * self._alone.mean)
            elif arm.beam_width > largest.beam_width or arm.beam_length > largest.beam_length:
                rates.append(0.0)
            else:
                rates.append(self._searched_rate(arm) * self._beside[_kind_of(arm)].mean)
        return np.array(rates)

    def _searched_rate(self, arm: SearchShape) -> float:
        """Tokens per second of a search, of requests that are all alike."""
        sampled, max_nodes = self._batch
        requests, survival = len(sampled), self.profile.mean(sampled)
        nodes = survival[: arm.beam_length, : arm.beam_width]
        draft = self.times.draft_seconds(arm, requests)
        verify = self.times.step_seconds(_kind_of(arm), requests)
        return best_common_budget(nodes, max_nodes, requests, draft, verify).tokens_per_second

    def _plain_seconds(self, requests: int) -> float:
        """A step that verifies does all that a plain one does: where that seems to be slower, it is
        no gain of drafting."""
        times = (self.times.step_seconds(kind, requests) for kind in (PLAIN, CHAINS))
        return min(float(seconds[requests]) for seconds in times)


def _kind_of(shape: SearchShape) -> int:
    return CHAINS if shape.beam_width == 1 else TREES


def arms_of(config: ReDrafterConfig, has_drafter: bool) -> tuple[SearchShape, ...]:
    """What to choose among, plain decoding aside: matches alone, and searches."""
    # Of searches: a chain, half the width, all of it, by length.
    matching = (MATCHES,) if config.context_matches else ()
    if not has_drafter:
        return matching
    width, length = search_shape(config, config.num_speculative_tokens)
    widths = [1] if config.tree == "chain" else sorted({1, -(-width // 2), width})
    return matching + tuple(SearchShape(w, n) for w in widths for n in draft_lengths(length))


def draft_lengths(longest: int) -> tuple[int, ...]:
    """One level, half of them, all of them: ascending."""
    return tuple(sorted({1, -(-longest // 2), longest}))


class _Gain:
    """A running mean of ratios, over the last drafts; 1 at first."""

    def __init__(self) -> None:
        self.mean, self._seen = 1.0, 0

    def learn(self, ratio: float) -> None:
        """Move the mean towards `ratio`."""
        self._seen = min(self._seen + 1, HORIZON)
        self.mean += (ratio - self.mean) / self._seen
