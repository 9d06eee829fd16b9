"""How many levels the next draft searches, where each length is a CUDA graph of its own.

A level of a draft reads the vocabulary-wide layer once, whatever the batch: a draft of fewer levels
costs less, and what it lacks are the deepest nodes. A tree of K' nodes has at most K' levels, so
more are never needed; whether fewer pay depends on the text and on the batch.

That is seen in a draft of full length, a *survey*: of its nodes, those of the first n levels are
what a draft of n levels finds. With S_n(k) the mean over requests of the sum of its k best survival
probabilities, N requests, and D_n and V the costs of drafting and of a step of so many rows,

    n* = argmax_n max_k (N + N S_n(k)) / (D_n + V(N + N k)).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_redrafter.utils.compiled import compiled

Floats = npt.NDArray[np.floating[Any]]

SURVEY_INTERVAL = 16
"""Drafts from one survey to the next, while shorter ones are made."""
MEMORY = 32.0
"""Surveyed drafts of a request that the means reach back; before so many, all drafts are long."""
MARGIN = 0.01
"""By so much more another length has to yield, or the one so far is kept."""


def draft_lengths(longest: int) -> tuple[int, ...]:
    """One level, half of them, all of them: ascending, as `search_tiers` has them for a CPU."""
    return tuple(sorted({1, -(-longest // 2), longest}))


def length_for(lengths: Sequence[int], nodes: int) -> int:
    """The shortest length, of ascending ones, that has all levels of any tree of so many nodes."""
    return next((length for length in lengths if length >= nodes), lengths[-1])


class LengthChoice:
    """Chooses for one engine, and learns from its surveys. On the host, in arrays of a few numbers.

    Attributes:
        lengths: to choose among, ascending.
        best: what was chosen last.
    """

    def __init__(self, lengths: Sequence[int], max_nodes: int) -> None:
        """Draft at full length until enough is known.

        Args:
            lengths: ascending.
            max_nodes: K.
        """
        self.lengths = tuple(lengths)
        self.best = self.longest = self.lengths[-1]
        self._survival = np.zeros((len(self.lengths), max_nodes))
        self._seen = 0.0
        self._until_survey = 0
        # Compiled now, and not while the first requests wait.
        _rates(self._survival, 1, 1, np.ones(len(self.lengths)), np.ones(2))

    def next(self) -> int:
        """Of the draft that begins. To be asked once for each."""
        if self.best == self.longest or not self._until_survey:
            self._until_survey = SURVEY_INTERVAL
            return self.longest
        self._until_survey -= 1
        return self.best

    def learn(self, survival: Floats, depths: npt.NDArray[np.integer[Any]]) -> None:
        """Take a survey into the means.

        Args:
            survival: [R, K], the nodes' survival probabilities; 0 where there is no node.
            depths: [R, K], the nodes' levels, from 1 on.
        """
        requests = survival.shape[0]
        if not requests:
            return
        self._seen = min(self._seen, MEMORY) + requests
        for mean, length in zip(self._survival, self.lengths, strict=True):
            found = np.where(depths <= length, survival, 0.0)
            ranked = -np.sort(-found, axis=1)
            mean += (ranked.mean(axis=0) - mean) * (requests / self._seen)

    def consider(
        self, requests: int, rows: int, draft_seconds: Floats, verify_seconds: Floats
    ) -> None:
        """Choose for a batch.

        Args:
            requests: N, those that draft.
            rows: of the step without any draft tokens; at least N.
            draft_seconds: D of each length.
            verify_seconds: V of 0, 1, 2... rows.
        """
        if self._seen < MEMORY or not requests:
            return
        rates = _rates(self._survival, requests, rows, draft_seconds, verify_seconds)
        found = int(rates.argmax())
        if rates[found] > rates[self.lengths.index(self.best)] * (1.0 + MARGIN):
            self.best = self.lengths[found]


@compiled
def _rates(
    survival: Floats, requests: int, rows: int, draft_seconds: Floats, verify_seconds: Floats
) -> Floats:
    """[lengths], tokens per second with the best number of nodes for each."""
    lengths, most = survival.shape
    rates = np.zeros(lengths)
    for length in range(lengths):
        tokens = 1.0
        for nodes in range(most + 1):
            if nodes > 0:
                tokens += survival[length, nodes - 1]
            at = rows + requests * nodes
            if at >= verify_seconds.shape[0]:
                break
            rate = requests * tokens / (draft_seconds[length] + verify_seconds[at])
            rates[length] = max(rates[length], rate)
    return rates
