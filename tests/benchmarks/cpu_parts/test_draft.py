"""The bytes that a draft reads, and its products."""

from __future__ import annotations

import pytest
import torch
from cpu_parts import draft


def test_bytes_are_those_of_the_weights_that_a_draft_reads() -> None:
    hidden, vocab, levels = 8, 20, 3
    measured = draft.Draft("recurrent", vocab, hidden, levels, 0, torch.bfloat16)
    square, bias = hidden * hidden, hidden
    cell, head = 2 * square + bias, square + bias + vocab * hidden
    # Of the input projection, the half that reads s, and once the bias and the half that reads h.
    expected = levels * (cell + square + head) + square + bias
    assert measured.num_bytes(2, 3, levels) == 2 * expected


def test_with_candidates_the_vocabulary_is_read_once_and_rows_of_it_at_every_level_below() -> None:
    hidden, vocab, levels, width, count = 8, 999, 3, 4, 32
    measured = draft.Draft("gated", vocab, hidden, levels, count, torch.float32)
    rank, below = hidden // 4, levels - 1
    level = (2 * hidden + 1) * 2 * hidden
    root = level + below * ((hidden + 1) * rank + rank * hidden) + vocab * hidden
    for requests in (1, 2):
        expected = root + below * (level + requests * count * hidden)
        assert measured.num_bytes(requests, width, levels) == 4 * expected


@pytest.mark.parametrize(("head", "once", "per_level"), [("gated", 0, 2), ("recurrent", 1, 4)])
def test_products_are_those_of_each_level(head: str, once: int, per_level: int) -> None:
    """Apple's: of h; the cell, the projection, the residual block and V. Gated: the cell and V."""
    measured = draft.Draft(head, 20, 8, 4, 0, torch.float32)
    products = measured.products(requests=2, width=3, length=4)
    assert len(products) == once + 4 * per_level
    rows = [x.reshape(-1, x.shape[-1]).shape[0] for _, x, _ in products]
    assert rows == [2] * (once + per_level) + [6] * (3 * per_level)
    assert len(measured.products(1, 1, 1)) == once + per_level


def test_a_head_that_chooses_among_candidates_has_a_selector() -> None:
    """The cell and V; Down and Up of each depth below; then the cell alone."""
    measured = draft.Draft("gated", 300, 8, 4, 32, torch.float32)
    assert measured.config.selected_depths == 3
    assert len(measured.products(requests=2, width=3, length=4)) == 2 + 4 + 3
