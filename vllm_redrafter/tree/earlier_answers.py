# SPDX-License-Identifier: Apache-2.0
"""Matches in earlier answers: what other, finished requests were answered, and how it went on.

Requests of one kind are answered alike. The newest answers are kept; a *match* is a place in one
of them where the text's last tokens stand, at least SHORTEST_EARLIER of them, and which goes on.
Of the newest EARLIER_PLACES such places the longest matches count, of these the newest; their paths
end with their answer. Texts belong to *partitions*: no draft depends on an answer of another one,
except on how much room it took.

Answers are kept in a ring with hash chains: `drafting/earlier_answers.py` on the host,
`triton_kernels/earlier_answers.py` on the device.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable

EARLIER_PLACES = 32
"""Places of a text's last SHORTEST_EARLIER tokens that are compared, the newest."""
FEWEST_PLACES, MOST_PLACES = 4096, 1 << 20
ANSWER_PLACES = 256
"""Room for an answer, on average."""
SEPARATOR = -1
"""The token before each answer."""


def num_places(most_answers: int) -> int:
    """C, the places of a ring for N answers, each a token or a separator; a power of two."""
    wanted = min(max(ANSWER_PLACES * most_answers, FEWEST_PLACES), MOST_PLACES)
    return 1 << (wanted - 1).bit_length()


class Partitions:
    """Whose answers each request may see, as a number; and whose are entered.

    As many of those who may see each other's are remembered as answers, used last. No number is
    given twice: who comes back after being forgotten finds nothing.

    Attributes:
        of: by request that has begun and not finished; below 0 where it shares nothing.
    """

    def __init__(self, most_answers: int) -> None:
        self._most, self._next = most_answers, 0
        self._ids: OrderedDict[Hashable, int] = OrderedDict()
        self.of: dict[str, int] = {}
        self._began_before_reset = set[str]()

    def begin(self, request: str, key: Hashable | None) -> int:
        """A new request's partition, that of all with this key; without a key it shares nothing."""
        self.of[request] = -1 if key is None else self._id_of(key)
        return self.of[request]

    def finish(self, requests: Iterable[str]) -> list[tuple[str, int]]:
        """Those of the finished requests, with their partitions, whose answers are to be entered.

        A set of names has another order in each process, and all must draft the same.
        """
        finished = [(name, self.of.pop(name, -1)) for name in sorted(requests)]
        return [each for each in finished if each[0] not in self._began_before_reset]

    def reset(self) -> None:
        """All answers are forgotten: those of requests that began before, too, as some may have
        finished, of which engines are told with the next step."""
        self._began_before_reset = {*self.of}

    def _id_of(self, key: Hashable) -> int:
        if key not in self._ids:
            self._ids[key] = self._next
            self._next += 1
            if len(self._ids) > self._most:
                self._ids.popitem(last=False)
        self._ids.move_to_end(key)
        return self._ids[key]
