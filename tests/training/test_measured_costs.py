"""Recommendations by a measured table: the arithmetic, and what a table must have measured."""

from __future__ import annotations

import pytest

from vllm_redrafter.budget.costs import CostTable, DraftCost, VerifyCost
from vllm_redrafter.cli.evaluation_report import recommendation
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.training.estimate import Acceptance
from vllm_redrafter.training.evaluation import Evaluation, ShapeResult
from vllm_redrafter.training.measured_costs import MeasuredCosts, widths_of
from vllm_redrafter.training.training_config import StepCosts
from vllm_redrafter.utils.errors import ConfigError

ROW = 0.005
"""Seconds of each row beyond the first ten, which cost as much as one."""


def table() -> CostTable:
    """A draft costs 1 ms per level, beam and request; V is 20 ms, and rises from 10 rows on."""
    draft = [
        DraftCost(n, w, length, 0.001 * n * w * length)
        for n in (1, 4)
        for w in (1, 2, 4)
        for length in (1, 5)
    ]
    verify = [VerifyCost(1, 0.02), VerifyCost(10, 0.02), VerifyCost(40, 0.02 + 30 * ROW)]
    return CostTable("a target", "a drafter", "a device", tuple(draft), tuple(verify))


def test_a_step_is_its_draft_and_its_rows_over_a_plain_step_of_as_many_requests() -> None:
    alone, four = MeasuredCosts(table(), 1), MeasuredCosts(table(), 4)
    chain, tree = ReDrafterConfig(3, 1, 3), ReDrafterConfig(8, 2, 4)
    assert alone.of(chain) == pytest.approx((0.003 + 0.02) / 0.02)
    assert alone.of(tree) == pytest.approx((0.008 + 0.02) / 0.02)
    assert four.of(chain) == pytest.approx((0.012 + 0.02 + 6 * ROW) / 0.02)


def test_fewer_nodes_than_levels_are_drafted_as_a_chain() -> None:
    assert MeasuredCosts(table(), 1).of(ReDrafterConfig(2, 4, 5)) == pytest.approx(1.1)


def test_more_requests_make_smaller_trees_the_best() -> None:
    small, large = ReDrafterConfig(3, 1, 3), ReDrafterConfig(8, 2, 4)

    def best(requests: int) -> ShapeResult:
        costs = MeasuredCosts(table(), requests)
        kept = ((small, Acceptance(100, 200)), (large, Acceptance(100, 400)))
        results = [ShapeResult(shape, accepted, costs) for shape, accepted in kept]
        return Evaluation(results, accuracy=None).best  # type: ignore[arg-type]

    assert best(1).shape == large
    assert best(4).shape == small
    assert "measured (a device), with 1 request: --spec-tokens 8" in recommendation(best(1))
    # 4 * 2 tokens in 12 + 20 + 30 ms, against 4 in 20 ms.
    assert "with 4 requests at once: --spec-tokens 3" in recommendation(best(4))
    assert "(2.00 tokens per step, 0.65×). Even this is not faster" in recommendation(best(4))


def test_an_assumption_says_that_it_is_one() -> None:
    assumed = ShapeResult(ReDrafterConfig(3, 1, 3), Acceptance(100, 200), StepCosts())
    assert "0.02 of a plain step" in recommendation(assumed)
    assert "assumed and not measured (--costs)" in recommendation(assumed)
    assert "not faster" not in recommendation(assumed)


@pytest.mark.parametrize(
    ("requests", "shape", "message"),
    [
        (1, (8, 3, 5), r"no draft of beam width 3 was measured, only of 1, 2, 4: .*--beam-widths"),
        (1, (8, 4, 6), r"no draft of beam length 6 .* up to 5: choose --beam-lengths"),
        (5, (3, 1, 3), r"no draft for 5 requests .* up to 4: choose --requests .* max_num_seqs"),
        (4, (12, 4, 5), r"no step of 52 rows \(4 requests with 12 nodes each\) .* up to 40"),
    ],
)
def test_what_was_not_measured_is_not_guessed(
    requests: int, shape: tuple[int, int, int], message: str
) -> None:
    costs = MeasuredCosts(table(), requests)
    with pytest.raises(ConfigError, match=message):
        costs.check([ReDrafterConfig(3, 1, 3), ReDrafterConfig(*shape)])


def test_a_table_serves_all_that_it_has_measured() -> None:
    MeasuredCosts(table(), 4).check([ReDrafterConfig(9, 4, 5), ReDrafterConfig(2, 4, 5)])
    MeasuredCosts(table(), 1).check([ReDrafterConfig(20, 4, 5)])
    assert widths_of(table()) == [1, 2, 4]
