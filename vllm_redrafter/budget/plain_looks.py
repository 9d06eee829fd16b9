"""When plain steps are made although drafting pays, only to see what they cost; and which tell it.

Where every step drafts, nothing says what plain decoding would take, and drafting is compared with
a guess: the machine may have become faster, or the batch larger. So some plain steps in a row are
made now and then. Those right behind a draft do not count: caches are full of other things, and a
step's time also holds what vLLM did with the tokens of the one before.
"""

from __future__ import annotations

from vllm_redrafter.budget.drift import cell

LOOK, SETTLING = 8, 3
"""Plain steps of a look; and how many of a row, behind a draft, do not count: they are slower than
those that follow by as much as some drafters gain."""
COST, INTERVAL, DOUBTFUL = 0.005, 128, 8
"""The share of what drafting yields that looks may take; the steps from one to the next, at least;
and how much sooner that is while drafting may have ceased to pay since the last one."""
NEW_SIZE, NEW_COST = 16, 0.05
"""Steps in a row with about so many requests after which a first look is made: a batch that is of
this size in passing is not worth it. More where drafting yields much by what is known of other
sizes, so that a look takes this share of it at most."""
SPELL, SHARE = 16, 8
"""Plain steps in a row after which one of SHARE is enough to learn from."""
SAME_PACE = 1.25
"""A pace slower by less than this may be the same."""


class PlainLooks:
    """Of one engine."""

    def __init__(self) -> None:
        self._pace = 1.0
        self._left = 0
        self._since = 0
        # Plain steps in a row; and steps in a row with about as many requests.
        self._row = 0
        self._size, self._of_size = -1, 0

    def step(self, requests: int, steps: int = 1) -> None:
        """A step begins, of so many requests; or some begin in a row."""
        same, self._size = self._size == cell(requests), cell(requests)
        self._of_size = self._of_size + steps if same else 0
        self._since += steps

    def shut(self) -> None:
        """Drafting does not pay: all steps are plain anyway."""
        self._left = self._since = 0

    def wanted(self, known: bool, gain: float, pace: float) -> bool:
        """Shall this step be plain although drafting pays?

        Args:
            known: plain steps of so many requests were seen before.
            gain: tokens per second expected of drafting, over plain decoding's.
            pace: the machine's at present.
        """
        if not self._left and (self._due(gain, pace) if known else self._settled(gain)):
            # Where it tells too little, another one has to wait.
            self._left, self._of_size = LOOK, 0
        if not self._left:
            return False
        self._left -= 1
        self._since = 0
        return True

    def learned(self, pace: float) -> None:
        """A plain step was learned from, at this pace of the machine (`pace.py`)."""
        self._pace = pace

    def _settled(self, gain: float) -> bool:
        return self._of_size > max(NEW_SIZE, _lost(gain) / NEW_COST)

    def _due(self, gain: float, pace: float) -> bool:
        interval = max(INTERVAL, _lost(gain) / COST)
        # Is it the machine that is slower, or are drafts dearer, by all that they gained?
        doubtful = pace / self._pace > max(SAME_PACE, gain)
        return self._since > (interval / DOUBTFUL if doubtful else interval)

    def tells(self, plain: bool) -> bool:
        """Is this step's time to be learned from? To be asked once for each step that was timed."""
        self._row = self._row + 1 if plain else 0
        if self._row > SPELL:
            return self._row % SHARE == 0
        return not 0 < self._row <= SETTLING


def _lost(gain: float) -> float:
    """Steps that a look costs: of g times plain decoding's tokens, a plain one loses 1 - 1 / g."""
    return LOOK * (1.0 - 1.0 / gain)
