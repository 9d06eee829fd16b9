# SPDX-License-Identifier: Apache-2.0
"""What is run at start-up so that no request waits for it, or to know what it costs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.drafting import time_sizes
from vllm_redrafter.engine.cpu import costs
from vllm_redrafter.tree.policy import SearchShape


class FakeRunner:
    """A target without requests: notes how many rows its passes have, and what they read."""

    def __init__(self) -> None:
        self.passes: list[tuple[int, Tensor, Tensor]] = []
        self.seconds = 0.0
        self.table = torch.randn(50, 4)
        self.input_ids = SimpleNamespace(gpu=torch.zeros(32, dtype=torch.int32))
        self.inputs_embeds = SimpleNamespace(gpu=torch.zeros(32, 4))
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 50, model="target")
        self.supports_mm_inputs, self.enable_prompt_embeds = True, False
        self.max_num_reqs, self.max_num_tokens = 4, 32
        self.lora_config = object()  # logits are left out

    def get_model(self) -> Any:
        return SimpleNamespace(embed_input_ids=self.table.__getitem__, modules=list)

    def wait(self, *_: Any) -> None:
        self.seconds += 0.25

    def _dummy_run(self, rows: int, **_: Any) -> tuple[None, None]:
        read = self.input_ids.gpu.clone(), self.inputs_embeds.gpu.clone()
        self.passes.append((rows, *read))
        self.wait()
        return None, None


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its passes take a quarter of a second each."""
    made = FakeRunner()
    for module in (costs, time_sizes):
        monkeypatch.setattr(module, "perf_counter", lambda: made.seconds)
    return made


def test_a_large_target_meets_as_many_as_the_time_allows(runner: Any) -> None:
    costs.warm_up_sizes(runner, 100)
    rows, *_ = runner.passes[-1]
    assert rows == len(runner.passes) == 4 * costs.WARM_UP_SECONDS + 1


def test_a_target_that_reads_embeddings_is_measured_with_those_of_different_tokens(
    runner: Any,
) -> None:
    proposer: Any = SimpleNamespace(
        config=ReDrafterConfig(4, 2, 2),
        model="drafter",
        dtype=torch.float32,
        drafter=object(),
        hidden_width=4,
        shape=lambda nodes: SearchShape(2, 2),
        propose=runner.wait,
    )
    measured = costs.measure_costs(runner, proposer)
    assert {rows for rows, *_ in runner.passes} == {cost.rows for cost in measured.verify}
    assert len(measured.verify) > 1
    for _, tokens, embeddings in runner.passes:
        assert tokens.unique().numel() > 16
        assert torch.equal(embeddings, runner.table[tokens])
