# SPDX-License-Identifier: Apache-2.0
"""When the CPU engine measures costs for the batch's budget, and when it cannot."""

from types import SimpleNamespace

import pytest

from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.engine.cpu import runner
from vllm_redrafter.engine.cpu.runner import CPUTreeModelRunner


@pytest.mark.parametrize(("adaptive", "ranks"), [(False, 1), (True, 2)])
def test_nothing_is_measured_where_k_is_fixed_or_ranks_step_together(
    adaptive: bool, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings = []
    monkeypatch.setattr(runner.logger, "warning", lambda text, *args: warnings.append(text % args))
    fixed = object()
    engine = SimpleNamespace(
        proposer=SimpleNamespace(config=ReDrafterConfig(12, adaptive=adaptive)),
        parallel_config=SimpleNamespace(data_parallel_size=ranks),
        drafting=fixed,
    )
    monkeypatch.setattr(runner, "measure_costs", lambda *args: pytest.fail("measured"))
    CPUTreeModelRunner.prepare_budget(engine)  # type: ignore[arg-type]
    assert engine.drafting is fixed
    assert [("num_speculative_tokens=12" in w) for w in warnings] == [True] * adaptive
