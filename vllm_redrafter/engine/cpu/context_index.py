"""Where a request's last tokens stand in its text before, found without reading the text again.

The same as `find_matches` in `tree/context_matches.py`, which looks at every place: a test holds
the two equal. Here each suffix of the text, of up to LONGEST_MATCH tokens, is entered into a hash
table when the token behind it is known. A step enters what it has sampled, and looks up as many
suffixes, whatever the length of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_redrafter.tree.context_matches import LONGEST_MATCH, ContextMatches
from vllm_redrafter.utils.compiled import compiled

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]

FIRST_CAPACITY = 1024
"""Tokens of a text that there is room for at first; doubled for all when one is longer."""
MULTIPLIER = 0x9E3779B1
"""Odd, of 32 bits, with as many ones as zeros (Knuth's multiplicative hashing)."""


class ContextIndex:
    """The texts of up to `slots` requests, and where their suffixes stand.

    Of each suffix the newest places are kept, as many as there are paths, whose next tokens differ.
    """

    def __init__(self, slots: int, num_paths: int, path_length: int, vocab_size: int) -> None:
        """For M paths of D tokens; a path ends before what is no token of the vocabulary."""
        self.num_paths, self.path_length, self.vocab_size = num_paths, path_length, vocab_size
        self._slots = slots
        self._slot_of: dict[str, int] = {}
        # By slot: tokens of the text, and entries in use.
        self._lengths = np.zeros(slots, dtype=np.int64)
        self._entries = np.zeros(slots, dtype=np.int64)
        self._make_room(FIRST_CAPACITY)

    def forget(self, request: str) -> None:
        """The request has left."""
        slot = self._slot_of.pop(request, None)
        if slot is not None:
            self._lengths[slot] = self._entries[slot] = 0
            self._table[slot] = 0

    def matches(
        self, requests: Sequence[str], table: Array, rows: Ints, num_tokens: Ints
    ) -> ContextMatches:
        """Enter what the texts of R requests have become, and find the paths that go on from there.

        Args:
            requests: their names; at most as many as there are slots.
            table: [any, T] integers, texts; each begins with what was entered before.
            rows: [R], of the table.
            num_tokens: [R], how many tokens each has.
        """
        longest = int(num_tokens.max(initial=0))
        if longest > self._text.shape[1]:
            self._grow(longest)
        slots = self._slots_of(requests)
        _append(slots, table, rows, num_tokens, self.vocab_size, *self._state)
        found = _lookup(slots, self.path_length, self.vocab_size, *self._state)
        return ContextMatches(*map(torch.from_numpy, found))

    def _slots_of(self, requests: Sequence[str]) -> Ints:
        known, present = self._slot_of, set(requests)
        if not known.keys() >= present:
            free = set(range(self._slots)) - set(known.values())
            # Preempted requests are entered anew when they come back.
            absent = [request for request in known if request not in present]
            for request in requests:
                if request not in known:
                    if not free:
                        free.add(known[absent[-1]])
                        self.forget(absent.pop())
                    known[request] = free.pop()
        return np.array([known[request] for request in requests])

    @property
    def _state(self) -> tuple[Array, Array, Array, Array, Array]:
        return self._text, self._lengths, self._table, self._places, self._entries

    def _make_room(self, capacity: int) -> None:
        self._text = np.zeros((self._slots, capacity), dtype=np.int32)
        most = LONGEST_MATCH * capacity
        # At most half full: an entry is found after one or two looks.
        self._table = np.zeros((self._slots, 1 << (2 * most - 1).bit_length()), dtype=np.int32)
        # [slots, entries, 1 + M]: the tokens of a suffix, and the newest places where it ends.
        self._places = np.zeros((self._slots, most, 1 + self.num_paths), dtype=np.int32)

    def _grow(self, longest: int) -> None:
        """Enter all texts anew, with twice the room."""
        text, lengths = self._text, self._lengths.copy()
        self._make_room(1 << (longest - 1).bit_length())
        self._lengths[:] = self._entries[:] = 0
        all_of_them = np.arange(self._slots)
        _append(all_of_them, text, all_of_them, lengths, self.vocab_size, *self._state)


@compiled
def _append(
    slots: Array,
    table: Array,
    rows: Array,
    num_tokens: Array,
    vocab_size: int,
    texts: Array,
    lengths: Array,
    tables: Array,
    places: Array,
    entries: Array,
) -> None:
    """Enter what the texts have become: see `ContextIndex.matches`; the last five are its state."""
    for r in range(len(slots)):
        slot = slots[r]
        own = texts[slot]
        for at in range(lengths[slot], num_tokens[r]):
            own[at] = table[rows[r], at]
            if own[at] >= vocab_size:
                continue
            # The token before has a next one now.
            end = at - 1
            for length in range(1, min(LONGEST_MATCH, end + 1) + 1):
                cell = _cell(own, end, length, tables[slot], places[slot])
                entry = tables[slot, cell] - 1
                if entry < 0:
                    entry = entries[slot]
                    entries[slot] += 1
                    tables[slot, cell] = entry + 1
                    places[slot, entry, 0] = length
                    places[slot, entry, 1:] = -1
                _enter(own, end, places[slot, entry])
        lengths[slot] = num_tokens[r]


@compiled
def _enter(text: Array, end: int, known: Array) -> None:
    """Make `end` the newest place of a suffix, instead of the one with the same next token."""
    last = len(known) - 1
    for path in range(1, len(known)):
        if known[path] < 0 or text[known[path] + 1] == text[end + 1]:
            last = path
            break
    for path in range(last, 1, -1):
        known[path] = known[path - 1]
    known[1] = end


@compiled
def _cell(text: Array, end: int, length: int, table: Array, places: Array) -> int:
    """Where the suffix that ends at `end` is in the table, or is to be entered."""
    key = np.uint64(length)
    for back in range(length):
        key = (key ^ np.uint64(text[end - back])) * np.uint64(MULTIPLIER)
        key ^= key >> np.uint64(29)
    cell = np.int64(key & np.uint64(len(table) - 1))
    while table[cell]:
        known = places[table[cell] - 1]
        if known[0] == length:
            same = True
            for back in range(length):
                if text[known[1] - back] != text[end - back]:
                    same = False
                    break
            if same:
                break
        cell = (cell + 1) & (len(table) - 1)
    return cell  # type: ignore[return-value]


@compiled
def _lookup(
    slots: Array,
    path_length: int,
    vocab_size: int,
    texts: Array,
    lengths: Array,
    tables: Array,
    places: Array,
    entries: Array,
) -> tuple[Array, Array]:
    """See `ContextIndex.matches`: tokens [R, M, D] and lengths [R, M], int64."""
    num_paths = places.shape[2] - 1
    tokens = np.full((len(slots), num_paths, path_length), -1, dtype=np.int64)
    match_lengths = np.zeros((len(slots), num_paths), dtype=np.int64)
    for r in range(len(slots)):
        slot = slots[r]
        own, last = texts[slot], lengths[slot] - 1
        found = 0
        for length in range(min(LONGEST_MATCH, last + 1), 0, -1):
            entry = tables[slot, _cell(own, last, length, tables[slot], places[slot])] - 1
            if entry < 0:
                continue
            for path in range(1, num_paths + 1):
                place = places[slot, entry, path]
                if place < 0 or found == num_paths:
                    break
                known = False
                for other in range(found):
                    known = known or tokens[r, other, 0] == own[place + 1]
                if known:
                    continue
                for ahead in range(path_length):
                    token = own[place + 1 + ahead % (last - place)]
                    if token >= vocab_size:
                        break
                    tokens[r, found, ahead] = token
                match_lengths[r, found] = length
                found += 1
    return tokens, match_lengths
