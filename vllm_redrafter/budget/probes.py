"""Drafts that are made although they do not seem to pay, to see whether that still holds.

Behind plain steps a draft takes longer than where every step drafts, and so do the first steps that
verify: what they read has left the caches. By such times drafting would be found not to pay where
it does. So a probe is some drafts in a row, and of the first ones no time is learned.

What a few drafts find is mostly chance: their text, and the noise of their steps. Where drafting
may pay after all, that keeps it shut for long, or opens it for nothing. So a probe is longer the
less each draft of it loses.
"""

from __future__ import annotations

from vllm_redrafter.tree.policy import SearchShape

SHORTEST, LONGEST = 4, 16
"""Drafts in a row."""
COLD_LOSS = 0.7
"""Plain steps' time that a probe is reckoned to lose by being cold: its drafts may lose as much."""
SETTLING = 3
"""Of a row, behind a plain step, drafts that are cold, and so many steps that verify them."""
FULL_PROBES = 4
"""Of so many probes one is the full search, and short; the others are the search that is nearest to
paying, which costs little more than a plain step, and tells whether the text has become easier."""


class Probes:
    """Of one engine.

    Attributes:
        left: drafts to be made of the present one.
    """

    def __init__(self) -> None:
        self.left = 0
        self._begun = 0
        self._shape = SearchShape(1, 1)

    def begin(self, nearest: SearchShape, full: SearchShape, gain: float) -> SearchShape:
        """What the first draft of a probe is.

        Args:
            nearest, full: one of these two.
            gain: tokens per second expected of the nearest, over plain decoding's.
        """
        self._begun += 1
        is_full = self._begun % FULL_PROBES == 1
        self._shape = full if is_full else nearest
        self.left = (SHORTEST if is_full else length(gain)) - 1
        return self._shape

    def go_on(self) -> SearchShape:
        """What the next draft is, of one that is not over."""
        self.left -= 1
        return self._shape

    def end(self) -> None:
        """The batch is another one, or drafting pays."""
        self.left = 0


def length(gain: float) -> int:
    """How many drafts a probe is, of a search that is expected to bring `gain` times the tokens."""
    lost = 1.0 - gain
    return LONGEST if LONGEST * lost < COLD_LOSS else max(int(COLD_LOSS / lost), SHORTEST)


class ColdDrafts:
    """Which drafts, and which steps that verify, come close behind plain steps."""

    def __init__(self) -> None:
        # In a row: drafts, and steps that verified some of them.
        self._drafts = self._steps = 0

    def planned(self, drafts: bool) -> None:
        """A step will draft, or not."""
        self._drafts = self._drafts + 1 if drafts else 0
        if self._drafts == 1:
            self._steps = 0

    def is_cold_draft(self) -> bool:
        """Is the draft that was made last one?"""
        return 0 < self._drafts <= SETTLING

    def is_cold_step(self) -> bool:
        """Is the step that verified last one? To be asked once for each."""
        self._steps += 1
        return self._steps <= SETTLING
