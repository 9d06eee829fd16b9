"""The bytes that a draft reads."""

from __future__ import annotations

import torch
from cpu_parts import draft


def test_bytes_are_those_of_the_weights_that_a_draft_reads() -> None:
    hidden, vocab, levels = 8, 20, 3
    measured = draft.Draft(vocab, hidden, torch.bfloat16)
    square, bias = hidden * hidden, hidden
    cell, head = 2 * square + bias, square + bias + vocab * hidden
    # Of the input projection, the half that reads s and the bias, and once the half that reads h.
    expected = levels * (cell + square + bias + head) + square
    assert measured.num_bytes(levels) == 2 * expected
