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

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from vllm_redrafter.budget.choice import Floats
from vllm_redrafter.checkpoints.acceptance import AcceptanceRecord

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
    """The logistic model of acceptance, its statistics and its refit.

    All state lives in tensors that are changed in place, and nothing waits for the device, so
    that CUDA graphs can hold it. Sums over observations are matrix products: they come out the
    same on every rank of a tensor-parallel group.

    Attributes:
        slope: [1] float32, w.
        biases: [L] float32, b of depths 1 to L.
        statistics: [L, 6] float32, what `observe` adds to and `refit` reads; so does
            `triton_kernels/observe_nodes.py`.
        learned: [L] float32, by depth, how many observations the bias was learned from; at most
            DAMPING_OBSERVATIONS.
    """

    def __init__(
        self,
        max_depth: int,
        device: torch.device | str = "cpu",
        record: AcceptanceRecord | None = None,
    ) -> None:
        """For nodes of depths 1 to `max_depth`: start with what was measured, or the constants."""
        make = {"dtype": torch.float32, "device": device}
        self.slope = torch.full((1,), INITIAL_SLOPE, **make)  # type: ignore[call-overload]
        self.biases = torch.full((max_depth,), INITIAL_BIAS, **make)  # type: ignore[call-overload]
        self._depths = torch.arange(1, max_depth + 1, device=device)
        # By depth: the information matrix's a, b, c, the gradient's g0, g1, and the count.
        self.statistics = torch.zeros(max_depth, 6, **make)  # type: ignore[call-overload]
        self.learned = torch.zeros(max_depth, **make)  # type: ignore[call-overload]
        if record is not None:
            self.start_from(record)

    def start_from(self, record: AcceptanceRecord) -> None:
        """Begin with what was measured; deeper nodes are as its deepest ones."""
        depths, last = self.biases.shape[0], record.biases[-1]
        biases = [*record.biases[:depths], *[last] * (depths - len(record.biases))]
        self.slope.fill_(record.slope)
        self.biases.copy_(torch.tensor(biases))
        self.learned.fill_(DAMPING_OBSERVATIONS)

    def log_survival(self, log_odds: Tensor, log_probs: Tensor, back_pointers: Tensor) -> Tensor:
        """The log of the survival probability of every explored node; all are [R, L, W].

        Never above the parent's; -inf where there is no node.
        """
        length = log_odds.shape[1]
        given_parent = torch.nn.functional.logsigmoid(
            self.slope * log_odds + self.biases[:length, None]
        )
        levels = [given_parent[:, 0]]
        for level in range(1, length):
            above = levels[-1].gather(1, back_pointers[:, level])
            levels.append(above + given_parent[:, level])
        survival = torch.stack(levels, dim=1)
        return survival.masked_fill(log_probs == -torch.inf, -torch.inf)

    def observe(self, log_odds: Tensor, depths: Tensor, judged: Tensor, accepted: Tensor) -> None:
        """Add a step's nodes to the statistics.

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
        columns = [
            weight * f * f,
            weight * f,
            weight,
            residual * f,
            residual,
            torch.ones_like(f),
        ]
        self.statistics += by_depth @ torch.stack(columns, dim=1)

    def refit(self) -> None:
        """One damped Newton step on the statistics gathered since the last, which begin anew.

        The information matrix is an arrowhead (one slope, a bias per depth): it is solved by
        eliminating the biases.
        """
        a, b, c, g0, g1, count = self.statistics.unbind(dim=1)
        c = c + RIDGE
        step = (g0.sum() - (b * g1 / c).sum()) / (a.sum() + RIDGE - (b * b / c).sum())
        total = count.sum()
        damping = (self.learned.sum() + INITIAL_OBSERVATIONS).clamp(max=DAMPING_OBSERVATIONS)
        step = (step * total / (total + damping)).nan_to_num(0.0, 0.0, 0.0)
        # A draft that is more probable is not less probable to be accepted.
        step = torch.maximum(step.clamp(-MAX_SLOPE_STEP, MAX_SLOPE_STEP), -self.slope)
        damping = (self.learned + INITIAL_OBSERVATIONS).clamp(max=DAMPING_OBSERVATIONS)
        bias_step = (g1 - b * step) / c * count / (count + damping)
        self.slope += step
        self.biases += bias_step.nan_to_num(0.0, 0.0, 0.0).clamp(-MAX_BIAS_STEP, MAX_BIAS_STEP)
        self.learned.add_(count.nan_to_num(0.0)).clamp_(max=DAMPING_OBSERVATIONS)
        self.statistics.zero_()


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
    """How probable the nodes of the next search are to be accepted, before it is made.

    Attributes:
        survival: [L, W] by level and rank within it, running means over drafts.
    """

    def __init__(
        self, beam_length: int, beam_width: int, record: AcceptanceRecord | None = None
    ) -> None:
        """Begin with what was measured of the drafter, if it was, for searches of up to [L, W]."""
        levels, ranks = np.arange(1, beam_length + 1), np.arange(beam_width)
        # Of a drafter of which nothing is known: like the shipped one's.
        self.survival = np.asarray(0.5 ** levels[:, None] * 0.35**ranks)
        if record is not None:
            self._move(np.array(record.survival)[:beam_length, :beam_width], 1.0)
        self._drafted = STARTING_WEIGHT
        self._expected = self._accepted = 0.0

    def drafted(self, survival: Floats) -> None:
        """Learn from a draft: [R, L', W'] survival probabilities of what it explored.

        What it did not explore moves along: deeper levels with the last one explored, lower ranks
        with the best of their level. How probable a node is given its parent changes less from text
        to text than how probable the parent is.
        """
        requests = survival.shape[0]
        self._drafted += requests
        self._move(survival.mean(axis=0), max(requests / self._drafted, 1.0 / HORIZON))

    def _move(self, explored: Floats, rate: float) -> None:
        """Towards [L', W'] of what was explored."""
        length, width = explored.shape
        best = self.survival[:, :1]
        before = best.copy()
        self.survival[:length, :width] += rate * (explored - self.survival[:length, :width])
        np.maximum(self.survival, LEAST_SURVIVAL, out=self.survival)
        best[length:] *= best[length - 1] / before[length - 1]
        rest = self.survival[:, 1:]
        rest[:length, width - 1 :] *= (best / before)[:length]
        rest[length:] *= (best / before)[length:]
        np.minimum(self.survival, 1.0, out=self.survival)

    def fade(self) -> None:
        """Nothing was drafted for long: what was learned before counts as little as a beginning."""
        self._drafted = min(self._drafted, STARTING_WEIGHT)

    def verified(self, expected: float, accepted: float) -> None:
        """Learn how many nodes were accepted where so many were expected to be."""
        kept = math.exp(-expected / EXPECTED_NODES)
        self._expected = kept * self._expected + expected
        self._accepted = kept * self._accepted + accepted

    @property
    def acceptance_ratio(self) -> float:
        """What survival probabilities are to be multiplied by: those verified are the ones of which
        a calibration thinks most, by some percent too much."""
        return (self._accepted + RATIO_NODES) / (self._expected + RATIO_NODES)
