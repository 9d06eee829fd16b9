"""How slow the machine is at present, so that steps of different moments can be compared.

Where a machine is shared, all of a step takes half as long again for a second, and then not. Tree
steps that were seen in such a second and plain ones that were seen after it would say that trees
do not pay, and while they are not used nothing says that they do again. Whatever slows all of a
step down cancels out of the comparison when each step is divided by the pace of its moment.

A step's pace is its time over what its like took of late. With every step divided by all of its
pace, nothing would hold that scale: an error in it would be learned by the kind of step that is
run, and not by the others. So a step is divided by the pace to the power of HELD, and a machine
that stays slow becomes the usual one.
"""

from __future__ import annotations

from collections import deque
from statistics import median

WINDOW = 7
"""Steps that the pace is the median of: a disturbance of three is none of the machine's."""


HELD = 0.95
"""How much of the pace is taken out: what is left makes it the usual one, over some hundreds of
steps."""


class Pace:
    """Seconds of a step over those that a step of its kind and size usually takes.

    Attributes:
        now: of the last steps; 1 as usual, 2 at half the speed.
    """

    def __init__(self) -> None:
        self.now = 1.0
        self._latest = deque([1.0] * WINDOW, maxlen=WINDOW)

    def observe(self, pace: float) -> None:
        """A step's seconds over what is usual for its like at pace 1."""
        self._latest.append(pace)
        self.now = median(self._latest)

    def without(self, seconds: float) -> float:
        """What a step that took `seconds` would usually take."""
        return float(seconds / self.now**HELD)
