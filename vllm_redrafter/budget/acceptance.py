# SPDX-License-Identifier: Apache-2.0
"""How probable it is that the target accepts a drafted node: learned from what it accepted.

A draft's log-probabilities are normalised over its 50 best tokens and overconfident. With q the
draft's probability of a node given its parent, d its depth, and f = log(q / (1 - q)),

    a = sigmoid(w f + b_d)

is the probability that the target draws the node's token, given that it reached the parent. The
survival probability of a node is the product of a along its path. The slope w and the bias of
each depth are refitted while serving, by damped Newton steps on the logistic loss over the nodes
that were judged: those verified whose parent was accepted. The model is that of vLLM's
`v1/worker/gpu/spec_decode/acceptance_estimator.py`, which knows chains; but no step is longer than
the loss is near to a parabola. On text that is easily predicted all a are near 0 or 1, where nodes
have no information (a (1 - a) is 0), and a single surprise, over next to nothing, would throw the
parameters so far that nothing is ever verified again.
"""

from functools import partial
from types import EllipsisType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm_redrafter.budget.choice import Flags, Floats
from vllm_redrafter.checkpoints.acceptance import NOTHING_RECORDED, PerSampling

MAX_LOG_ODDS = 40.0
INITIAL_SLOPE = 0.5
INITIAL_BIAS = -0.2
INITIAL_OBSERVATIONS, DAMPING_OBSERVATIONS = 5.0, 50.0
"""What a parameter was learned from counts as so many observations, at first and at most, when it
is refitted on new ones: on as many it moves half of a Newton step. The constants above count for
little: drafters differ, and a good one would be left unused for what it was thought to be."""
RIDGE = 0.5
"""Information that every parameter has beside its nodes': as of two nodes of even log_odds."""
MAX_SLOPE_STEP, MAX_BIAS_STEP = 0.3, 3.0
"""What one refit changes at most: either moves a node of log-odds 10 by 3."""
HORIZON, STARTING_WEIGHT = 64, 16
"""Drafts that a profile of survival reaches back; requests' drafts that its beginning counts as."""
LEAST_SURVIVAL = 1e-9
"""Of a node in a profile: it is what others' changes are divided by."""
EXPECTED_NODES, RATIO_NODES = 512.0, 32.0
"""Nodes that a ratio of accepted to expected ones reaches back, and as how many 1 counts in it."""


def log_odds_of(log_probs: Tensor, back_pointers: Tensor) -> Tensor:
    """The draft's log-odds of each explored node, given its parent.

    Args:
        log_probs: [R, L, W] float32, cumulative; -inf where there is no node.
        back_pointers: [R, L, W] int64, the parents' beams.

    Returns:
        [R, L, W] float32, within +-MAX_LOG_ODDS.
    """
    above = log_probs[:, :-1].gather(2, back_pointers[:, 1:])
    given_parent = torch.cat([log_probs[:, :1], log_probs[:, 1:] - above], dim=1)
    log_odds = given_parent - torch.log(-torch.expm1(given_parent.clamp(max=0.0)))
    return log_odds.nan_to_num(nan=-MAX_LOG_ODDS).clamp_(-MAX_LOG_ODDS, MAX_LOG_ODDS)


class AcceptanceEstimator:
    """The logistic model of acceptance, its statistics and its refit; of several kinds at once.

    All state lives in tensors that are changed in place, and nothing waits for the device, so
    that CUDA graphs can hold it. Sums over observations are matrix products: they come out the
    same on every rank of a tensor-parallel group.

    Attributes:
        slope: [*kinds, 1] float32, w.
        biases: [*kinds, L] float32, b of depths 1 to L.
        statistics: [*kinds, L, 6] float32, what `observe` adds to, or for kinds of requests
            `triton_kernels/observe_nodes.py`; `refit` reads it.
        learned: [*kinds, L] float32, by depth, how many observations the bias was learned from; at
            most DAMPING_OBSERVATIONS.
    """

    def __init__(
        self, max_depth: int, device: torch.device | str = "cpu", kinds: tuple[int, ...] = ()
    ) -> None:
        """For nodes of depths 1 to `max_depth`; begin with the constants."""
        self.slope = torch.full((*kinds, 1), INITIAL_SLOPE, device=device)
        self.biases = torch.full((*kinds, max_depth), INITIAL_BIAS, device=device)
        self._depths = torch.arange(1, max_depth + 1, device=device)
        # By depth: the information matrix's a, b, c, the gradient's g0, g1, and the count.
        self.statistics = torch.zeros(*kinds, max_depth, 6, device=device)
        self.learned = torch.zeros_like(self.biases)

    def start_from(self, recorded: PerSampling) -> None:
        """Begin with what was measured of two kinds; deeper nodes are as the deepest ones."""
        for kind, record in enumerate(recorded.with_fallback()):
            if record is not None:
                biases, depths = record.biases, self.biases.shape[-1]
                deeper = [biases[-1]] * (depths - len(biases))
                self.slope[kind].fill_(record.slope)
                self.biases[kind].copy_(torch.tensor([*biases[:depths], *deeper]))
                self.learned[kind].fill_(DAMPING_OBSERVATIONS)

    def log_survival(self, log_odds: Tensor, log_probs: Tensor, back_pointers: Tensor) -> Tensor:
        """The log of the survival probability of every explored node; all are [R, L, W].

        Never above the parent's; -inf where there is no node.
        """
        length = log_odds.shape[1]
        given_parent = torch.nn.functional.logsigmoid(
            self.slope[..., None] * log_odds + self.biases[..., :length, None]
        )
        levels = [given_parent[:, 0]]
        for level in range(1, length):
            above = levels[-1].gather(1, back_pointers[:, level])
            levels.append(above + given_parent[:, level])
        survival = torch.stack(levels, dim=1)
        return survival.masked_fill(log_probs == -torch.inf, -torch.inf)

    def observe(self, log_odds: Tensor, depths: Tensor, judged: Tensor, accepted: Tensor) -> None:
        """Add a step's nodes to the statistics of the only kind.

        Args:
            log_odds: [...], the draft's log-odds of each node.
            depths: [...] integers; the root's is 0.
            judged: [...] bool: a node whose parent was accepted, and which was verified. Only
                these count.
            accepted: [...] bool.
        """
        f, y = log_odds.flatten().float(), accepted.flatten().float()
        at = depths.flatten()
        # [L, N]: rows of zeros for what was not judged.
        by_depth = ((at == self._depths[:, None]) & judged.flatten()).float()
        f = f.nan_to_num(0.0)
        bias = self.biases[(at.long() - 1).clamp(0, self.biases.shape[0] - 1)]
        p = torch.sigmoid(self.slope * f + bias)
        weight, residual = p * (1 - p), y - p
        columns = [weight * f * f, weight * f, weight, residual * f, residual, torch.ones_like(f)]
        self.statistics += by_depth @ torch.stack(columns, dim=1)

    def refit(self, kind: int | EllipsisType = ...) -> None:
        """One damped Newton step of a kind, or each, on the statistics gathered since the last,
        which begin anew.

        The information matrix is an arrowhead (one slope, a bias per depth): it is solved by
        eliminating the biases.
        """
        a, b, c, g0, g1, count = self.statistics[kind].unbind(dim=-1)
        slope, biases, learned = self.slope[kind], self.biases[kind], self.learned[kind]
        c = c + RIDGE
        added = partial(torch.sum, dim=-1, keepdim=True)
        step = added(g0 - b * g1 / c) / (added(a - b * b / c) + RIDGE)
        total = added(count)
        damping = (added(learned) + INITIAL_OBSERVATIONS).clamp(max=DAMPING_OBSERVATIONS)
        step = (step * total / (total + damping)).nan_to_num(0.0, 0.0, 0.0)
        # A draft that is more probable is not less probable to be accepted.
        step = torch.maximum(step.clamp(-MAX_SLOPE_STEP, MAX_SLOPE_STEP), -slope)
        damping = (learned + INITIAL_OBSERVATIONS).clamp(max=DAMPING_OBSERVATIONS)
        bias_step = (g1 - b * step) / c * count / (count + damping)
        slope += step
        biases += bias_step.nan_to_num(0.0, 0.0, 0.0).clamp(-MAX_BIAS_STEP, MAX_BIAS_STEP)
        learned.add_(count.nan_to_num(0.0)).clamp_(max=DAMPING_OBSERVATIONS)
        self.statistics[kind].zero_()


class RefitSchedule:
    """When a calibration is fitted again: soon at first, as a new drafter is to be known soon."""

    def __init__(self, first: int, longest: int) -> None:
        """After `first` verifying steps, then after twice as many each time, up to `longest`."""
        self._steps, self._after, self._longest = 0, first, longest

    def due(self) -> bool:
        """Is it now? To be asked once per verifying step."""
        self._steps += 1
        if self._steps < self._after:
            return False
        self._steps, self._after = 0, min(2 * self._after, self._longest)
        return True


class SurvivalProfile:
    """How probable the nodes of the next search are to be accepted, before it is made: those of
    greedy requests, and of sampled ones. `survival`, [2, L, W], are running means over drafts, by
    level and rank within it.
    """

    def __init__(
        self, beam_length: int, beam_width: int, recorded: PerSampling = NOTHING_RECORDED
    ) -> None:
        """Begin with what was measured of the drafter, if it was, for searches of up to [L, W]."""
        levels, ranks = np.arange(1, beam_length + 1), np.arange(beam_width)
        # Of a drafter of which nothing is known: like the shipped one's.
        self.survival = np.stack([0.5 ** levels[:, None] * 0.35**ranks] * 2)
        for survival, record in zip(self.survival, recorded.with_fallback(), strict=True):
            if record is not None:
                _move(survival, np.array(record.survival)[:beam_length, :beam_width], 1.0)
        self._drafted = np.full(2, STARTING_WEIGHT)
        # Expected and accepted nodes, by kind.
        self._judged = np.zeros((2, 2))

    def drafted(self, survival: Floats, sampled: Flags) -> None:
        """Learn from a draft: [R, L', W'] survival probabilities of what it explored, and [R], of
        requests that sample.

        What it did not explore moves along: deeper levels with the last one explored, lower ranks
        with the best of their level. How probable a node is given its parent changes less from text
        to text than how probable the parent is.
        """
        for kind, known in enumerate(self.survival):
            explored = survival[sampled == kind]
            if requests := len(explored):
                self._drafted[kind] += requests
                rate = max(requests / self._drafted[kind], 1.0 / HORIZON)
                _move(known, explored.mean(axis=0), rate)

    def fade(self) -> None:
        """Nothing was drafted for long: what was learned before counts as little as a beginning."""
        np.minimum(self._drafted, STARTING_WEIGHT, out=self._drafted)

    def verified(self, expected: npt.ArrayLike, accepted: npt.ArrayLike) -> None:
        """Learn how many nodes were accepted where so many were expected to be; [2] each."""
        judged = np.stack([expected, accepted])
        self._judged = np.exp(-judged[0] / EXPECTED_NODES) * self._judged + judged

    @property
    def acceptance_ratio(self) -> Floats:
        """[2] what survival probabilities are to be multiplied by: those verified are the ones of
        which a calibration thinks most, by some percent too much."""
        expected, accepted = self._judged + RATIO_NODES
        return np.asarray(accepted / expected)

    def mean(self, sampled: Flags) -> Floats:
        """[L, W] of a batch's requests, of which those `sampled` [N] sample; by the ratio."""
        share = np.count_nonzero(sampled) / len(sampled)
        greedy, of_sampled = self.acceptance_ratio[:, None, None] * self.survival
        return np.asarray((1.0 - share) * greedy + share * of_sampled)


def _move(known: Floats, explored: Floats, rate: float) -> None:
    """Move [L, W] towards [L', W'] of what was explored."""
    length, width = explored.shape
    best = known[:, :1]
    before = best.copy()
    known[:length, :width] += rate * (explored - known[:length, :width])
    np.maximum(known, LEAST_SURVIVAL, out=known)
    best[length:] *= best[length - 1] / before[length - 1]
    rest = known[:, 1:]
    rest[:length, width - 1 :] *= (best / before)[:length]
    rest[length:] *= (best / before)[length:]
    np.minimum(known, 1.0, out=known)
