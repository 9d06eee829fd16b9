"""Drafts that are made although they do not seem to pay, to see whether that still holds.

Behind plain steps a draft takes longer than where every step drafts, and so does the step that
verifies it: what they read has left the caches. By such times drafting would be found not to pay
where it does. So a probe is some drafts in a row, and of the first no time is learned.
"""

from __future__ import annotations

from vllm_redrafter.policy import SearchShape

PROBE = 3
"""Drafts in a row."""
FULL_PROBES = 4
"""Of so many probes one is the full search; the others are the search that is nearest to paying,
which costs little more than a plain step, and tells whether the text has become easier."""


class Probes:
    """Of one engine.

    Attributes:
        left: drafts to be made of the present one.
    """

    def __init__(self) -> None:
        self.left = 0
        self._begun = 0
        self._shape = SearchShape(1, 1)

    def begin(self, nearest: SearchShape, full: SearchShape) -> SearchShape:
        """What the first draft of a probe is, of these two."""
        self._begun += 1
        self._shape = full if self._begun % FULL_PROBES == 1 else nearest
        self.left = PROBE - 1
        return self._shape

    def go_on(self) -> SearchShape:
        """What the next draft is, of one that is not over."""
        self.left -= 1
        return self._shape

    def end(self) -> None:
        """The batch is another one, or drafting pays."""
        self.left = 0


class ColdDrafts:
    """Which drafts, and which steps that verify, come behind plain steps."""

    def __init__(self) -> None:
        self._drafts = self._draft_is_cold = self._step_is_cold = False

    def planned(self, drafts: bool) -> None:
        """A step will draft, or not."""
        self._draft_is_cold = drafts and not self._drafts
        self._step_is_cold |= self._draft_is_cold
        self._drafts = drafts

    def is_cold_draft(self) -> bool:
        """Is the draft that was made last one?"""
        return self._draft_is_cold

    def is_cold_step(self) -> bool:
        """Is the step that verified last one? To be asked once for each."""
        cold, self._step_is_cold = self._step_is_cold, False
        return cold
