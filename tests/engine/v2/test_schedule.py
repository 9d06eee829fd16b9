# SPDX-License-Identifier: Apache-2.0
"""K and draft lengths by batch size, and the warning of prompts that starve."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config.compilation import CUDAGraphMode

from vllm_redrafter.engine.v2 import schedule
from vllm_redrafter.engine.v2.schedule import (
    USUAL_RIDGE,
    _ridge_of,
    apply_default_schedule,
    default_schedule,
    lengths_of_drafts,
)
from vllm_redrafter.tree.policy import SearchShape
from vllm_redrafter.utils.names import METHOD

Schedule = list[tuple[int, int, int]]


def configured(
    *,
    k: int = 12,
    requests: int = 256,
    budget: int = 8192,
    adaptive: bool = False,
    given: Schedule | None = None,
    data_parallel: int = 1,
    stages: int = 1,
    mode: CUDAGraphMode = CUDAGraphMode.FULL,
) -> Any:
    """As much of a VllmConfig as is read."""
    recorded = {"model": "drafter", "num_speculative_tokens": k, "adaptive": adaptive}
    return SimpleNamespace(
        num_speculative_tokens=k,
        speculative_config=SimpleNamespace(num_speculative_tokens_per_batch_size=given),
        scheduler_config=SimpleNamespace(
            max_num_seqs=requests,
            max_num_batched_tokens=budget,
            scheduler_cls=None,
            async_scheduling=True,
        ),
        parallel_config=SimpleNamespace(
            data_parallel_size=data_parallel, pipeline_parallel_size=stages
        ),
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
        lora_config=None,
        additional_config={METHOD: recorded},
    )


def settled(**fields: Any) -> Schedule | None:
    config = configured(**fields)
    apply_default_schedule(config)
    found: Schedule | None = config.speculative_config.num_speculative_tokens_per_batch_size
    return found


@pytest.mark.parametrize(
    ("device", "ridge"),
    [
        ("NVIDIA H100 80GB HBM3", 295),
        ("NVIDIA L4", 403),
        ("NVIDIA L40S", 418),
        ("NVIDIA GH200 480GB", USUAL_RIDGE),
    ],
)
def test_the_ridge_is_operations_per_byte(device: str, ridge: int) -> None:
    assert _ridge_of(device) == ridge


@pytest.mark.parametrize("ridge", [100, 418])
@pytest.mark.parametrize("max_nodes", [1, 12, 127])
def test_k_is_the_largest_that_stays_below_the_ridge(max_nodes: int, ridge: int) -> None:
    ranges = default_schedule(max_nodes, 1024, ridge)
    found = [k for first, last, k in ranges for _ in range(first, last + 1)]
    assert len(found) == 1024
    for requests, k in enumerate(found, start=1):
        assert requests * (k + 1) <= max(ridge, requests)
        assert k == max_nodes or requests * (k + 2) > ridge


@pytest.mark.parametrize(
    "fields",
    [
        {"adaptive": True},
        {"given": [(1, 1, 12)]},
        {"requests": 15},  # 195 rows
        {"data_parallel": 2},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_nothing_is_decided_where_it_is_decided_or_not_needed(fields: dict[str, Any]) -> None:
    assert settled(**fields) == fields.get("given")


def test_where_the_budget_cannot_run_k_falls_as_without_it() -> None:
    assert settled(adaptive=True, stages=2) == settled() != settled(adaptive=True)


@pytest.mark.parametrize(
    ("fields", "warned"),
    [
        ({"adaptive": True, "budget": 2048}, True),
        ({"adaptive": True, "budget": 3328}, False),  # 256 requests of 13 rows
        ({"given": [(1, 100, 12), (101, 256, 4)], "budget": 2048}, False),
        ({"budget": 2048}, False),  # the default schedule keeps it low
    ],
)
def test_more_rows_than_a_step_may_have_are_logged(
    fields: dict[str, Any], warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    monkeypatch.setattr(schedule.logger, "warning", lambda text, *args: logged.append(text % args))
    settled(**fields)
    assert len(logged) == warned
    for part in (
        "max_num_seqs=256",
        "num_speculative_tokens=12",
        "max_num_batched_tokens=2048",
        "from 158 decoding requests on",
        "Raise --max-num-batched-tokens to more than 3328",
    ):
        assert all(part in warning for warning in logged)


@pytest.mark.parametrize(
    ("given", "lengths"),
    [
        (None, (5,)),
        ([(1, 8, 12), (9, 256, 4)], (5,)),
        ([(1, 8, 12), (9, 256, 2)], (3, 5)),
        ([(1, 8, 3), (9, 64, 1), (65, 256, 0)], (1, 3, 5)),
        (default_schedule(12, 256, ridge=206), (1, 3, 5)),
    ],
    ids=["one K", "more nodes than half", "few nodes", "none", "the default"],
)
def test_a_schedule_s_trees_have_the_levels_that_they_need(
    given: Schedule | None, lengths: tuple[int, ...]
) -> None:
    """A budget chooses among all, and matches alone; without full graphs there is one length."""
    config, shape = configured(given=given), SearchShape(4, 5)
    assert lengths_of_drafts(config, shape, fixed=True) == lengths
    assert lengths_of_drafts(config, shape, fixed=False) == (1, 3, 5)
    assert lengths_of_drafts(config, shape, fixed=False, matches=True) == (0, 1, 3, 5)
    without = configured(given=given, mode=CUDAGraphMode.NONE)
    assert lengths_of_drafts(without, shape, fixed=True) == (5,)
    assert lengths_of_drafts(without, shape, fixed=False, matches=True) == (5,)
