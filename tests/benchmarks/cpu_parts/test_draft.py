"""The bytes that a draft reads, and its products."""

from __future__ import annotations

import pytest
import torch
from cpu_parts import draft


def test_bytes_are_those_of_the_weights_that_a_draft_reads() -> None:
    hidden, vocab, levels = 8, 20, 3
    measured = draft.Draft("recurrent", vocab, hidden, torch.bfloat16)
    square, bias = hidden * hidden, hidden
    cell, head = 2 * square + bias, square + bias + vocab * hidden
    # Of the input projection, the half that reads s and the bias, and once the half that reads h.
    expected = levels * (cell + square + bias + head) + square
    assert measured.num_bytes(levels) == 2 * expected


@pytest.mark.parametrize(("head", "once", "per_level"), [("gated", 0, 2), ("recurrent", 1, 4)])
def test_products_are_those_of_each_level(head: str, once: int, per_level: int) -> None:
    """Apple's: of h; the cell, the projection, the residual block and V. Gated: the cell and V."""
    measured = draft.Draft(head, 20, 8, torch.float32)
    products = measured.products(requests=2, width=3, length=4)
    assert len(products) == once + 4 * per_level
    rows = [x.reshape(-1, x.shape[-1]).shape[0] for _, x in products]
    assert rows == [2] * (once + per_level) + [6] * (3 * per_level)
    assert len(measured.products(1, 1, 1)) == once + per_level
