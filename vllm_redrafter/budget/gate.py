"""When to draft although it does not seem to pay: now and then, to see whether that still holds."""

from __future__ import annotations

from collections.abc import Hashable

BEGIN, GO_ON = 0.04, 0.02
"""To begin to draft takes so much more than plain decoding yields, and to go on: else choices would
flutter, and drafts be made for nothing where they are as fast. What the costs do not know is then
lost: requests that draft end one by one, and prompts come so, which is dearer than all at once."""
FIRST_PAUSE = 32
LONGEST_PAUSE, FAR_PAUSE = 256, 512
"""Steps until the next probe (`probes.py`), which loses what one or two steps take, 1 % of the
longest pauses at most; three or four far from paying, 1 % of the other. Text changes within some
100 tokens, and what nearly pays may pay with other text."""
GROWTH, FAR_GROWTH = 2, 4
"""How much longer each pause is than the one before."""
FAR = 0.9
"""Of plain decoding's tokens per second, what drafting yields at most where it is far from paying:
that other text makes up for it is rare."""


def worth_drafting(gain: float, so_far: bool, doubt: float = 0.0) -> bool:
    """Is drafting expected to pay?

    Args:
        gain: tokens per second expected of the best draft, over plain decoding's.
        so_far: what was found last.
        doubt: how far the one over the other may be off. On a noisy machine what pays by less than
            that may as well cost as much; and of many searches the one that seems best is the one
            that noise flatters most.
    """
    return gain > 1.0 + (GO_ON if so_far else BEGIN) + doubt


class Gate:
    """Open while drafting pays. While it does not, it opens for a probe after ever longer pauses.

    Each kind of batch and each size of it has pauses of its own: that drafting pays for one request
    says little of eight, and for greedy requests little of those that sample; a server has them in
    turn. A step that pays halves its pauses. A size that is new has half of the pauses that were
    last made for its kind. A paused request resumes from one hidden state: the drafter keeps no KV
    cache.
    """

    def __init__(
        self,
        first_pause: int = FIRST_PAUSE,
        longest_pause: int = LONGEST_PAUSE,
        far_pause: int = FAR_PAUSE,
    ) -> None:
        """Pauses in steps: the first, and the one that the others grow up to while drafting nearly
        pays; and while it is far from that."""
        self.first_pause, self.longest_pause, self.far_pause = first_pause, longest_pause, far_pause
        # By kind and size, the next pause, and what is left of the one that is made.
        self._pauses: dict[tuple[Hashable, int], tuple[int, int]] = {}
        self._last: dict[Hashable, int] = {}

    def opens(self, pays: bool, kind: Hashable = None, size: int = 0, gain: float = 1.0) -> bool:
        """Shall this step draft? To be asked once in each step that could.

        Args:
            pays: drafting is expected to be worth its cost.
            kind, size: of the batch.
            gain: tokens per second expected of drafting, over plain decoding's.
        """
        pause, left = self._pauses.get((kind, size)) or self._of_new_size(kind)
        far = gain < FAR
        longest = self.far_pause if far else self.longest_pause
        left = min(left, longest)
        opened = pays or not left
        if pays:
            left = pause = max(pause // 2, self.first_pause)
        elif left:
            left -= 1
        else:
            left, pause = pause, min((FAR_GROWTH if far else GROWTH) * pause, longest)
        self._pauses[kind, size], self._last[kind] = (pause, left), pause
        return opened

    def _of_new_size(self, kind: Hashable) -> tuple[int, int]:
        """Its next pause; and what is left, at once nothing where all of the kind is new."""
        if kind not in self._last:
            return self.first_pause, 0
        pause = max(self._last[kind] // 2, self.first_pause)
        return pause, pause

    def shut_for(self, kind: Hashable = None, size: int = 0) -> int:
        """For how many further steps it stays shut, if drafting goes on not to pay."""
        return self._pauses[kind, size][1]

    def passed(self, steps: int, kind: Hashable = None, size: int = 0) -> None:
        """So many steps passed of a pause, without being asked."""
        pause, left = self._pauses[kind, size]
        self._pauses[kind, size] = pause, max(left - steps, 0)
