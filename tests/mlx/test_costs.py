# SPDX-License-Identifier: Apache-2.0
"""What is measured when a drafter is loaded."""

from typing import Any

import pytest

mx = pytest.importorskip("mlx.core")

from vllm_redrafter.budget.planner import arms_of
from vllm_redrafter.mlx import load_drafter


@pytest.mark.parametrize("has_drafter", [True, False])
def test_every_arm_and_every_number_of_rows_has_a_cost(pair: Any, has_drafter: bool) -> None:
    made = load_drafter(pair.drafter if has_drafter else None, pair.model)
    table = made.drafting.planner.times.table  # type: ignore[attr-defined]
    for arm in arms_of(made.config, has_drafter):
        assert table.draft_seconds(1, *arm) > 0
    assert (table.verify_seconds(range(1, 9)) > 0).all()
    assert [*table.verify][-1].rows <= 8
