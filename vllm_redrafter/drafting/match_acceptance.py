# SPDX-License-Identifier: Apache-2.0
"""How probable continuations of n-gram matches are to be accepted, learned on the host."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_redrafter.budget.choice import Flags
from vllm_redrafter.budget.match_acceptance import MEMORY, PRIOR_WEIGHT, prior_acceptance


class MatchAcceptance:
    """`probabilities`, [2, LONGEST_MATCH, D] float32, of greedy and of sampled requests, by length
    of the match and by depth from 1 on; and what they were learned from."""

    def __init__(self, path_length: int) -> None:
        prior = np.stack([prior_acceptance(path_length)] * 2)
        self._judged = np.full(prior.shape, PRIOR_WEIGHT)
        self._accepted = PRIOR_WEIGHT * prior
        self.probabilities = prior.astype(np.float32)

    def observe(
        self,
        sampled: Flags,
        match_lengths: npt.NDArray[np.int64],
        depths: npt.NDArray[np.int32],
        accepted: Flags,
    ) -> None:
        """Learn from judged nodes that continue matches, [N] each."""
        if not len(match_lengths):
            return
        at = sampled.astype(np.int64), match_lengths - 1, depths - 1
        np.add.at(self._judged, at, 1.0)
        np.add.at(self._accepted, at, accepted)
        kept = np.minimum(MEMORY / self._judged, 1.0)
        self._judged *= kept
        # What was never accepted may be: a probability of 0 would never be tried again.
        self._accepted = np.maximum(self._accepted * kept, 1.0)
        self.probabilities[:] = self._accepted / self._judged
