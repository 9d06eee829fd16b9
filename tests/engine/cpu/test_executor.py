# SPDX-License-Identifier: Apache-2.0
"""One message per step: drafts come with the output, and are not asked for."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.worker import cpu_worker

from vllm_redrafter.engine.cpu.executor import DraftedOutput, TreeExecutor
from vllm_redrafter.engine.cpu.v1.worker import ReDrafterCPUWorker

DRAFTS = DraftTokenIds(["a"], [[1, 2]])
PLAIN = ModelRunnerOutput(["a"], {"a": 0}, [[7]])
DRAFTED = DraftedOutput(**vars(PLAIN), drafts=DRAFTS)


def test_drafts_come_with_the_output_that_has_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("execute_model", "sample_tokens"):
        monkeypatch.setattr(MultiprocExecutor, name, lambda self, output, **kwargs: output)
    monkeypatch.delattr(MultiprocExecutor, "take_draft_token_ids", raising=False)
    executor = object.__new__(TreeExecutor)

    def execute(output: Any) -> Any:
        made: Future[Any] = Future()
        made.set_result(output)
        return executor.execute_model(made, non_block=True).result()

    execute(DRAFTED)
    assert executor.take_draft_token_ids() is DRAFTS
    # Where a grammar was waited for.
    assert execute(None) is None
    assert executor.sample_tokens(DRAFTED) is DRAFTED
    assert executor.take_draft_token_ids() is DRAFTS
    execute(PLAIN)
    assert executor.take_draft_token_ids() is None


@pytest.mark.parametrize("grammars", [False, True])
def test_the_worker_samples_at_once_unless_a_grammar_is_worked_out(
    grammars: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_worker.CPUWorker, "execute_model", lambda self, step: None)
    monkeypatch.setattr(cpu_worker.CPUWorker, "sample_tokens", lambda self, grammar: PLAIN)
    monkeypatch.setattr(ReDrafterCPUWorker, "take_draft_token_ids", lambda self: DRAFTS)
    worker = object.__new__(ReDrafterCPUWorker)
    worker.publisher = None
    output = worker.execute_model(SimpleNamespace(has_structured_output_requests=grammars))
    assert output == (None if grammars else DRAFTED)
    assert worker.sample_tokens(None) == DRAFTED
