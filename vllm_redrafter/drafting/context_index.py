# SPDX-License-Identifier: Apache-2.0
"""Prompt-lookup (n-gram) matches by a hash table: `find_matches` in `tree/context_matches.py`.

Each suffix of the text, of up to LONGEST_MATCH tokens, is entered when the token behind it is
known. A step's work does not grow with the length of the text.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_redrafter.tree.context_matches import LONGEST_MATCH, ContextMatches
from vllm_redrafter.utils.compiled import compiled

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]

START, CAPACITY, TOKENS, ENTRIES = range(4)
FIRST_CAPACITY = 1024
"""Tokens of a text that there is room for at first; doubled as it grows."""
TABLE_SIZE = 8
"""Cells of a hash table for each token: LONGEST_MATCH entries, so that most are found at once."""
MULTIPLIER = 0x9E3779B1
"""Odd, of 32 bits, with as many ones as zeros (Knuth's multiplicative hashing)."""


class ContextIndex:
    """The texts of up to `slots` requests, and the newest M places of their suffixes.

    The next tokens of a suffix's places differ. A request has a region of one array: its text, a
    hash table, and the entries of the table.
    """

    def __init__(self, slots: int, num_paths: int, path_length: int, vocab_size: int) -> None:
        """For M paths of D tokens; a path ends before what is no token of the vocabulary."""
        self.num_paths, self.path_length, self.vocab_size = num_paths, path_length, vocab_size
        self._slot_of: dict[str, int] = {}
        # By slot: START, CAPACITY, TOKENS and ENTRIES.
        self._regions = np.zeros((slots, 4), dtype=np.int64)
        self._memory = np.zeros(0, dtype=np.int32)
        self._end = 0
        # Starts of free regions, by capacity.
        self._free: dict[int, list[int]] = {}

    @property
    def num_bytes(self) -> int:
        """Of all regions, in use or not."""
        return self._memory.itemsize * self._end

    def forget(self, request: str) -> None:
        slot = self._slot_of.pop(request, None)
        if slot is not None:
            self._release(slot)

    def matches(
        self, requests: Sequence[str], table: Array, rows: Ints, num_tokens: Ints
    ) -> ContextMatches:
        """Enter new tokens of R requests, and find their paths.

        Args:
            requests: their names; at most as many as there are slots.
            table: [any, T] integers, texts; each begins with what was entered before.
            rows: [R], of the table.
            num_tokens: [R], how many tokens each has.
        """
        slots = self._slots_of(requests)
        for r in np.flatnonzero(num_tokens > self._regions[slots, CAPACITY]):
            self._make_room(slots[r], int(num_tokens[r]))
        state = self.num_paths, self._regions, self._memory
        _append(slots, table, rows, num_tokens, self.vocab_size, *state)
        found = _lookup(slots, self.path_length, self.vocab_size, *state)
        return ContextMatches(*map(torch.from_numpy, found))

    def _slots_of(self, requests: Sequence[str]) -> Ints:
        known, present = self._slot_of, set(requests)
        if not known.keys() >= present:
            free = set(range(len(self._regions))) - set(known.values())
            # Preempted requests are entered anew when they come back.
            absent = [request for request in known if request not in present]
            for request in requests:
                if request not in known:
                    if not free:
                        free.add(known[absent[-1]])
                        self.forget(absent.pop())
                    known[request] = free.pop()
        return np.array([known[request] for request in requests])

    def _make_room(self, slot: int, num_tokens: int) -> None:
        """Give the slot an empty region for so many tokens."""
        self._release(slot)
        capacity = max(FIRST_CAPACITY, 1 << (num_tokens - 1).bit_length())
        free = self._free.setdefault(capacity, [])
        if not free:
            free.append(self._end)
            self._end += capacity * (1 + TABLE_SIZE + LONGEST_MATCH * (1 + self.num_paths))
            if self._end > len(self._memory):
                # Pages that nothing is written to take no memory.
                memory = np.empty(2 * self._end, dtype=np.int32)
                memory[: len(self._memory)] = self._memory
                self._memory = memory
        start = free.pop()
        self._regions[slot] = start, capacity, 0, 0
        self._memory[start + capacity : start + (1 + TABLE_SIZE) * capacity] = 0

    def _release(self, slot: int) -> None:
        start, capacity, *_ = self._regions[slot].tolist()
        if capacity:
            self._free[capacity].append(start)
        self._regions[slot] = 0


@compiled
def _parts(region: Array, num_paths: int, memory: Array) -> tuple[Array, Array, Array]:
    """A region's text; cells, 1 + an entry each or 0; and entries [any, 1 + M], the length of a
    suffix and the newest places where it ends."""
    start, capacity = region[START], region[CAPACITY]
    cells = start + capacity
    entries = cells + TABLE_SIZE * capacity
    end = entries + LONGEST_MATCH * (1 + num_paths) * capacity
    places = memory[entries:end].reshape(-1, 1 + num_paths)
    return memory[start:cells], memory[cells:entries], places


@compiled
def _append(
    slots: Array,
    table: Array,
    rows: Array,
    num_tokens: Array,
    vocab_size: int,
    num_paths: int,
    regions: Array,
    memory: Array,
) -> None:
    for r in range(len(slots)):
        region = regions[slots[r]]
        own, cells, places = _parts(region, num_paths, memory)
        for at in range(region[TOKENS], num_tokens[r]):
            own[at] = table[rows[r], at]
            if own[at] >= vocab_size:
                continue
            # The token before has a next one now.
            end = at - 1
            for length in range(1, min(LONGEST_MATCH, end + 1) + 1):
                cell = _cell(own, end, length, cells, places)
                entry = cells[cell] - 1
                if entry < 0:
                    entry = region[ENTRIES]
                    region[ENTRIES] += 1
                    cells[cell] = entry + 1
                    places[entry, 0] = length
                    places[entry, 1:] = -1
                _enter(own, end, places[entry])
        region[TOKENS] = num_tokens[r]


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
    num_paths: int,
    regions: Array,
    memory: Array,
) -> tuple[Array, Array]:
    """Paths [R, M, D] and lengths of their matches [R, M], int64."""
    tokens = np.full((len(slots), num_paths, path_length), -1, dtype=np.int64)
    match_lengths = np.zeros((len(slots), num_paths), dtype=np.int64)
    for r in range(len(slots)):
        region = regions[slots[r]]
        own, cells, places = _parts(region, num_paths, memory)
        last = region[TOKENS] - 1
        found = 0
        for length in range(min(LONGEST_MATCH, last + 1), 0, -1):
            entry = cells[_cell(own, last, length, cells, places)] - 1
            if entry < 0:
                continue
            for path in range(1, num_paths + 1):
                place = places[entry, path]
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
