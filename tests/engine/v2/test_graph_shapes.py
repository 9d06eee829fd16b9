"""What CUDA graphs hold is right: padded drafts, and steps of tree rows alone.

The graphs themselves need a GPU; the code that they capture does not.
"""

from __future__ import annotations

from typing import Any

import inside_worker
import pytest
import small_workloads
import workloads
from interpreted_engine import InterpretedEngine

pytestmark = pytest.mark.engine


def test_padding_changes_no_draft(oracle: InterpretedEngine) -> None:
    assert oracle.rpc(inside_worker.padded_draft_differs) == [[]]


def test_steps_of_tree_rows_alone(
    oracle: InterpretedEngine, plain_v2: dict[str, list[Any]]
) -> None:
    few = workloads.Workload(small_workloads.GREEDY.prompts[:4], small_workloads.GREEDY.params[:4])
    oracle.rpc(inside_worker.attend_as_in_graphs)
    answers = oracle.run(few)
    (steps,) = oracle.rpc(inside_worker.stop_attending_as_in_graphs)
    assert steps > 2
    assert [list(a.outputs[0].token_ids) for a in answers] == [
        list(a.outputs[0].token_ids)[: small_workloads.GREEDY_TOKENS]
        for a in plain_v2["greedy"][:4]
    ]
