"""What is run at start-up so that no request waits for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_redrafter.engine.cpu import costs


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of the target's passes, each of which takes a quarter of a second."""
    made: list[int] = []
    monkeypatch.setattr(costs, "_target_pass", lambda _, rows: made.append(rows))
    monkeypatch.setattr(costs, "perf_counter", lambda: 0.25 * len(made))
    return made


def test_each_number_of_rows_is_met_once(passes: list[int]) -> None:
    costs.warm_up_sizes(None, 3)  # type: ignore[arg-type]
    assert passes == [1, 2, 3]


def test_a_large_target_meets_as_many_as_the_time_allows(passes: list[int]) -> None:
    costs.warm_up_sizes(None, 100)  # type: ignore[arg-type]
    assert passes[-1] == len(passes) == 4 * costs.WARM_UP_SECONDS + 1


def test_a_target_that_reads_embeddings_is_measured_with_those_of_different_tokens() -> None:
    table = torch.randn(50, 4)
    runner: Any = SimpleNamespace(
        input_ids=SimpleNamespace(gpu=torch.zeros(32, dtype=torch.int32)),
        inputs_embeds=SimpleNamespace(gpu=torch.zeros(32, 4)),
        model_config=SimpleNamespace(get_vocab_size=lambda: 50),
        supports_mm_inputs=True,
        enable_prompt_embeds=False,
        get_model=lambda: SimpleNamespace(embed_input_ids=table.__getitem__, modules=list),
    )
    costs._fill_inputs(runner)
    tokens = runner.input_ids.gpu
    assert tokens.unique().numel() > 16
    assert torch.equal(runner.inputs_embeds.gpu, table[tokens])
