"""How probable the nodes of the next search are to be accepted, before it is made.

What a drafter is worth changes with the text, from token to token and from page to page. With s
what the last drafts were worth, u what drafts are usually worth, and n the steps since the last,

    u + TRUST exp(-n / TEXT_STEPS) (s - u)

is expected of the next. Judged by s alone, a drafter would be left unused after a few hard tokens,
and for long: what is not drafted does not show that the text has become easy again.

Of requests that were not among the last drafts, these say nothing: where a share f of a batch is
new, s moves to u by f. And u is a mean over requests, not over drafts: the last requests of a queue
are often the hard ones, alone for many steps.

What is expected is a calibration's word, and the nodes that are verified are those of which it
thinks most: by some percent too much, where it has a few parameters for any text. So all of it is
multiplied by how many nodes were accepted over how many were expected to be, of those verified.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_redrafter.utils.compiled import compiled

Floats = npt.NDArray[np.floating[Any]]

RATE, LONGEST_AGE = 0.1, 4
"""Share of a new draft in the running mean of what a search's nodes are worth, per step since the
mean was last renewed; and the most steps that count so."""
USUAL_RATE, USUAL_LONGEST_AGE = 1 / 256, 8
"""The same of the mean that tells what is usual."""
LEARNING = 4
"""The n-th draft counts at least LEARNING / n in that mean, so that of what the first m drafts
said, (m / n)^LEARNING is left: a calibration that had learned nothing yet may have said anything.
"""
TRUST = 0.6
"""How far the next draft is expected to be as the last ones: some ten drafts are few, so that of
what they were better or worse than usual a part is chance."""
REMEMBERED, BELIEVED = 512.0, 32.0
"""Expected nodes after which the oldest count for 1/e in the accepted ones' share; and as how many
the calibration's word counts, before and beside what is found."""
UNCALIBRATED = 32
"""Drafts, the first ones, whose promises tell nothing of later ones: what their calibration has
learned of them since is in it, and would be taken off twice."""
TEXT_STEPS = 64
"""Steps after which the last drafts say 1/e of what they said of the text."""


class Prospects:
    """Running means over drafts of searches.

    Attributes:
        lately: [L, W] by level and rank of the beam, how probable a node was to be accepted, in
            the last drafts.
    """

    def __init__(self, beam_length: int, beam_width: int) -> None:
        """Expect nothing: the first draft counts whole."""
        self.lately = np.zeros((beam_length, beam_width))
        self._usual = np.zeros_like(self.lately)
        self._seen_at = np.zeros_like(self.lately)
        self._drafted_at = 0
        self._requests = 0.0
        # Nodes, of those verified.
        self._expected = self._accepted = 0.0
        self.drafts = 0

    def joined(self, share: float) -> None:
        """Since the last draft, this share of the batch has been exchanged for new requests."""
        self.lately += share * (self._usual - self.lately)

    def observe(self, survival: Floats, step: int) -> None:
        """Learn from a draft: [R, L', W'] survival probabilities of what it explored."""
        age = min(step - self._drafted_at, USUAL_LONGEST_AGE)
        forgotten = max(1.0 - (1.0 - USUAL_RATE) ** age, LEARNING / (self.drafts + LEARNING))
        requests = survival.shape[0]
        self._requests += forgotten * (requests - self._requests)
        # With f forgotten: u = EMA(R s) / EMA(R), both of rate f.
        moved = forgotten * requests / self._requests
        _observe(self.lately, self._usual, self._seen_at, survival, step, self.drafts, moved)
        self._drafted_at = step
        self.drafts += 1

    def verified(self, expected: float, accepted: float) -> None:
        """Learn how many nodes were accepted where so many were expected to be."""
        if self.drafts <= UNCALIBRATED:
            return
        kept = math.exp(-expected / REMEMBERED)
        self._expected = kept * self._expected + expected
        self._accepted = kept * self._accepted + accepted

    @property
    def truth(self) -> float:
        """What survival probabilities are to be multiplied by."""
        return (self._accepted + BELIEVED) / (self._expected + BELIEVED)

    def expected(self, step: int) -> Floats:
        """[L, W] survival probabilities of a search at this step."""
        still = TRUST * math.exp((self._drafted_at - step) / TEXT_STEPS)
        return np.asarray(self.truth * (still * self.lately + (1.0 - still) * self._usual))


@compiled
def _observe(
    lately: Floats,
    usual: Floats,
    seen_at: Floats,
    survival: Floats,
    step: int,
    drafts: int,
    moved: float,
) -> None:
    """Take a draft into the running means [L, W]: see `Prospects`; `usual` moves by that share."""
    _renew(lately, seen_at, survival, step, drafts)
    for level in range(usual.shape[0]):
        for beam in range(usual.shape[1]):
            usual[level, beam] += moved * (lately[level, beam] - usual[level, beam])


@compiled
def _renew(profile: Floats, seen_at: Floats, survival: Floats, step: int, drafts: int) -> None:
    """Survival [R, L', W'] of what a draft explored, taken into the profile [L, W].

    What it did not explore moves along: deeper levels with the last level explored, lower ranks
    with the best of their level. How probable a node is given its parent changes less from text
    to text than how probable the parent is.
    """
    requests, length, width = survival.shape
    moved = 1.0
    for level in range(profile.shape[0]):
        if level < length:
            before = profile[level, 0]
            for beam in range(width):
                # What was not looked at for a while counts for less when it is.
                age = min(step - seen_at[level, beam], LONGEST_AGE)
                rate = max(1.0 - (1.0 - RATE) ** age, 1.0 / (drafts + 1))
                mean = survival[:, level, beam].sum() / requests
                profile[level, beam] += rate * (mean - profile[level, beam])
                seen_at[level, beam] = step
            moved = profile[level, 0] / before if before > 0 else 1.0
        for beam in range(width if level < length else 0, profile.shape[1]):
            profile[level, beam] = min(profile[level, beam] * moved, 1.0)
