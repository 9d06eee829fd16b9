"""When to draft although it does not seem to pay: now and then, to see whether that still holds."""

from __future__ import annotations

MARGIN = 0.03
"""To begin to draft takes so much more than plain decoding yields: else choices would flutter."""
FIRST_PAUSE = 8
LONGEST_PAUSE = 128
"""A probe costs about a step more: below 1 % of this pause. Text changes within some 100 tokens."""


def worth_drafting(drafting: float, plain: float, so_far: bool) -> bool:
    """Is drafting expected to pay?

    Args:
        drafting: tokens per second with the best draft.
        plain: without.
        so_far: what was found last; to go on takes no margin.
    """
    return bool(drafting > plain * (1.0 if so_far else 1.0 + MARGIN))


class Gate:
    """Open while drafting pays. While it does not, it opens for one step after ever longer pauses.

    Each step that pays halves the pauses: a batch that is small for one step, while others join
    it, may pay there, and says little of the steps that follow. A paused request resumes from one
    hidden state: the drafter keeps no KV cache.
    """

    def __init__(self, first_pause: int = FIRST_PAUSE, longest_pause: int = LONGEST_PAUSE) -> None:
        """Pauses in steps: the first, and the one that the others grow up to, by doubling."""
        self.first_pause, self.longest_pause = first_pause, longest_pause
        self._pause = first_pause
        self._left = 0

    def opens(self, pays: bool) -> bool:
        """Shall this step draft? To be asked once in each step that could.

        Args:
            pays: drafting is expected to be worth its cost.
        """
        if pays:
            self._pause = max(self._pause // 2, self.first_pause)
            self._left = self._pause
            return True
        if self._left:
            self._left -= 1
            return False
        self._left = self._pause
        self._pause = min(2 * self._pause, self.longest_pause)
        return True
