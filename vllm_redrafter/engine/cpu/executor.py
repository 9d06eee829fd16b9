# SPDX-License-Identifier: Apache-2.0
"""vLLM's executor with one message per step to its workers, where vLLM's own sends three.

A step of a small target takes a few milliseconds. Our worker samples in the same call unless a
grammar is computed meanwhile, and its answer brings the drafts.
"""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput


@dataclass
class DraftedOutput(ModelRunnerOutput):
    """A step's output, and what was drafted for the next one."""

    drafts: DraftTokenIds | None = None


class TreeExecutor(MultiprocExecutor):
    """Takes drafts from the step's output; everything else is vLLM's."""

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        self._output = super().execute_model(*args, **kwargs)
        return self._output

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        self._output = super().sample_tokens(*args, **kwargs)
        return self._output

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        output: Any = self._output
        # The caller has waited for it already.
        output = output.result() if isinstance(output, Future) else output
        return output.drafts if isinstance(output, DraftedOutput) else None
