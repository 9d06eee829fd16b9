"""Batches that are smaller for a moment."""

from __future__ import annotations

from vllm_redrafter.budget.dips import DIP, Dips


def test_a_smaller_batch_is_a_dip_for_some_steps() -> None:
    dips = Dips()
    assert [dips.in_dip(True) for _ in range(DIP + 2)] == [True] * DIP + [False] * 2


def test_a_batch_that_is_no_smaller_is_none() -> None:
    dips = Dips()
    assert not any(dips.in_dip(False) for _ in range(DIP))


def test_each_dip_is_counted_anew() -> None:
    dips = Dips()
    for _ in range(3):
        assert all(dips.in_dip(True) for _ in range(DIP))
        assert not dips.in_dip(False)
