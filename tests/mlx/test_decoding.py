# SPDX-License-Identifier: Apache-2.0
"""What steps cost and bring decides what they draft; and a step is one evaluation."""

from typing import Any

import mlx.core as mx
import pytest

from vllm_redrafter.budget.costs import CostTable, DraftCost
from vllm_redrafter.mlx import Drafter, drafter, load_drafter, stream_generate
from vllm_redrafter.mlx.drafter import measure_costs

QUESTION = "list values"


def with_costs(pair: Any, monkeypatch: pytest.MonkeyPatch, row: float, draft: float) -> Drafter:
    """A drafter to which a pass costs 1 s and `row` s for each row more, and a level `draft` s."""

    def costs(*of: Any) -> CostTable:
        measured = measure_costs(*of)
        return CostTable(
            tuple(
                DraftCost(1, width, length, draft * length or 1e-6)
                for _, width, length, _ in measured.draft
            ),
            tuple((rows, 1 + row * (rows - 1)) for rows in range(1, 9)),
        )

    monkeypatch.setattr(drafter, "measure_costs", costs)
    made = load_drafter(pair.drafter, pair.model, context_matches=0)
    # The table alone speaks: the steps' own times are another machine's.
    monkeypatch.setattr(made.drafting.planner.times, "stepped", lambda *_: None)
    monkeypatch.setattr(made.drafting.planner.times, "drafted", lambda *_: None)
    return made


@pytest.mark.parametrize(("row", "draft"), [(2.0, 0.0), (0.0, 20.0), (1.0, 5.0)])
def test_plain_decoding_where_drafts_do_not_pay(
    pair: Any, monkeypatch: pytest.MonkeyPatch, row: float, draft: float
) -> None:
    made = with_costs(pair, monkeypatch, row, draft)
    for _ in range(4):
        steps = len(pair.answer(made, QUESTION, 60))
    made.stats.reset()
    for _ in range(4):
        steps = sum(not response.from_draft for response in pair.answer(made, QUESTION, 60))
    assert made.stats.undrafted_steps > 0.8 * 4 * steps


def test_as_many_nodes_as_there_may_be_where_they_cost_nothing(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = with_costs(pair, monkeypatch, row=0.001, draft=0.001)
    for _ in range(4):
        pair.answer(made, QUESTION, 60)
    made.stats.reset()
    responses = pair.answer(made, QUESTION, 60)
    assert sum(response.from_draft for response in responses) > 0.6 * len(responses)
    assert made.stats.drafted_tokens > 5 * made.stats.verifications


def test_a_step_is_evaluated_once(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = load_drafter(pair.drafter, pair.model, adaptive=False)
    evaluated = []
    real = mx.eval
    monkeypatch.setattr(mx, "eval", lambda *arrays: (evaluated.append(1), real(*arrays))[1])
    responses = stream_generate(pair.model, pair.tokenizer, pair.prompt("names"), 30, made)
    steps = 0
    next(responses)
    evaluated.clear()
    for response in responses:
        steps += not response.from_draft
        # A step's tokens come after its evaluation, the last of them without `from_draft`.
        assert len(evaluated) == steps + response.from_draft
    assert 3 < steps < 15
