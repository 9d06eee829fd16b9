# SPDX-License-Identifier: Apache-2.0
"""What steps are expected to yield: how many nodes are worth verifying, and which drafts pay.

A step verifies the nodes that are free, and more only where measured tokens per second rise; where
drafting does not pay it is plain. Times are those that steps took (`step_times.py`); tokens follow
from survival probabilities, corrected by what was accepted.

Steps that read prompts take longer, whatever they verify. With a prompts per token of the output,
steps of t tokens each leave a share of 1 - exp(-a t) of all steps with prompts to read. So a token
brings work, too: the more so, the fewer steps read prompts anyway.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_redrafter.budget.acceptance import SurvivalProfile
from vllm_redrafter.budget.choice import Flags, Floats
from vllm_redrafter.budget.planner import MARGIN
from vllm_redrafter.engine.v2.step_times import StepTimes

Integers = npt.NDArray[np.int64]
PROMPT_STEPS = 512
"""Steps that the number of prompts per token reaches back."""
ROUNDS = 4
"""Of finding the share of steps with prompts, which depends on what steps put out."""
PROMPT_ROWS = 16
"""Steps with prompts that the mean of their rows reaches back."""


class Batch(NamedTuple):
    """A step's requests.

    Attributes:
        slots, scheduled, admissible, others: [R], draft tokens that the scheduler counts, those
            that can be verified, and other tokens.
        sampled: [R], of requests that sample.
        sampling: how many requests output a token.
        reads_prompts: a request reads more than a token.
    """

    slots: Integers
    scheduled: Integers
    admissible: Integers
    others: Integers
    sampled: Flags
    sampling: int
    reads_prompts: bool


class ThroughputModel:
    """Tokens per millisecond of a step, by its arm and by how many nodes it verifies.

    An arm is 0 for plain decoding, or the number of a draft length, from 1 on.

    Attributes:
        profile, match_profile: of searched drafts, matches included, and of matches alone.
        draft_costs: [R] ms of a draft of each length, by requests; measured at start-up.
        follow_costs: [R] ms of a step's end without one; None where there is nothing to do.
        verify_costs: [rows] ms of the target's pass; measured at start-up.
    """

    draft_costs: Sequence[Floats]
    follow_costs: Floats | None = None
    verify_costs: Floats

    def __init__(
        self,
        times: StepTimes,
        profiles: tuple[SurvivalProfile, SurvivalProfile],
        lengths: Sequence[int],
        max_nodes: int,
        trims: bool,
    ) -> None:
        """`trims`: a step can verify any number of nodes; otherwise all of a draft, or none."""
        self._times, self._lengths, self._max_nodes, self._trims = times, lengths, max_nodes, trims
        self.profile, self.match_profile = profiles
        # Tokens per ms that a node has to bring, by arm; none is known at first.
        self._required: dict[int, float] = {}
        # Prompts and tokens that are output, and rows of a step with prompts: running means.
        self._prompts, self._tokens, self._prompt_rows = 0.0, 1.0, 0.0

    def stepped(self, batch: Batch, accepted: float) -> None:
        """Count a step that is expected to accept so many nodes."""
        kept = 1.0 - 1.0 / PROMPT_STEPS
        self._prompts = kept * self._prompts + np.count_nonzero(batch.others > 1)
        self._tokens = kept * self._tokens + batch.sampling + accepted
        if batch.reads_prompts:
            rows = float(batch.others[batch.others > 1].sum())
            self._prompt_rows += (rows - self._prompt_rows) / PROMPT_ROWS

    def table(self, batch: Batch, arm: int) -> Floats:
        """[nodes + 1] ms of this step by the start-up's measures, by the number of nodes."""
        plain = int(batch.others.sum())
        verify = self.verify_costs[plain : plain + int(batch.scheduled.sum()) + 1]
        return verify + self._draft(arm, len(batch.slots))

    def best_number(self, batch: Batch, arm: int, ranked: Floats) -> int:
        """How many nodes to verify, that are as probable to be accepted, the first ones first."""
        gained = np.concatenate(([0.0], np.cumsum(ranked)))
        numbers = self._numbers(len(ranked))
        ms = self._ms(arm, len(batch.slots), batch.reads_prompts, self.table(batch, arm)[numbers])
        worth = gained[numbers] - self._required.get(arm, 0.0) * ms
        return int(numbers[worth.argmax()])

    def rates(self, batch: Batch) -> Floats:
        """Tokens per ms of each arm, for batches like this one; 0 of what has no room."""
        found = [self._rate(arm, batch) for arm in range(len(self._lengths) + 1)]
        self._required = {arm: required for arm, (_, required) in enumerate(found)}
        rates = np.array([rate for rate, _ in found])
        # Where drafting does not pay it is plain: what yields less is not kept for a margin.
        return np.where(rates < rates[0], rates / MARGIN, rates)

    def _rate(self, arm: int, batch: Batch) -> tuple[float, float]:
        """Of an arm, and what a node has to bring."""
        requests, sampling, most_rows = len(batch.slots), batch.sampling, len(self.verify_costs) - 1
        # A full step has no room for nodes: the next one is not expected to be full as well.
        prompts = max(0, min(int(self._prompt_rows), most_rows - 2 * sampling))
        ranked = self._expected_nodes(arm, batch.sampled)[: (most_rows - prompts) // sampling - 1]
        if len(ranked) < bool(arm):
            return 0.0, 0.0
        numbers = self._numbers(len(ranked))
        tokens = sampling * (1.0 + np.concatenate(([0.0], np.cumsum(ranked))))[numbers]
        rows, draft = sampling * (1 + numbers), self._draft(arm, requests)
        decode = self._ms(arm, requests, False, self.verify_costs[rows] + draft)
        mixed = self._ms(arm, requests, True, self.verify_costs[rows + prompts] + draft)
        # By numbers of nodes in steps without prompts, and in steps with some. A draft of which
        # nothing is verified in the former is for nothing.
        some = int(arm > 0)
        of_decode, decode, of_mixed = tokens[some:, None], decode[some:, None], tokens[None]
        put_out, per_token = of_decode, self._prompts / self._tokens
        for _ in range(ROUNDS):
            share = 1.0 - np.exp(-per_token * put_out)
            put_out = of_decode + share * (of_mixed - of_decode)
        rates = put_out / (decode + share * (mixed - decode))
        best = np.unravel_index(rates.argmax(), rates.shape)
        longer = max(float((mixed - decode)[best]), 0.0)
        rate = float(rates[best])
        return rate, 1.0 / (1.0 / rate - per_token * (1.0 - float(share[best])) * longer)

    def _expected_nodes(self, arm: int, sampled: Flags) -> Floats:
        """[K] survival probabilities of a request's next draft, descending."""
        if not arm:
            return np.zeros(0)
        length = self._lengths[arm - 1]
        searched, below = self.profile.mean(sampled), self.match_profile.mean(sampled)
        ranked = np.sort(np.concatenate([searched[:length], below[length:]], axis=None))[::-1]
        return ranked[: self._max_nodes]

    def _numbers(self, most: int) -> Integers:
        """The numbers of nodes that can be verified, of so many."""
        return np.arange(most + 1) if self._trims else np.unique([0, most])

    def _draft(self, arm: int, requests: int) -> float:
        costs = self.draft_costs[arm - 1] if arm else self.follow_costs
        return 0.0 if costs is None else float(costs[requests])

    def _ms(self, arm: int, requests: int, prompts: bool, table: Floats) -> Floats:
        """Of steps that take `table` ms by the start-up's measures; the first verifies nothing."""
        ms = self._times.milliseconds
        nothing = ms((arm > 0, False, prompts), requests, table[:1])
        return np.append(nothing, ms((arm > 0, True, prompts), requests, table[1:]))
