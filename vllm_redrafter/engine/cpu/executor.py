# SPDX-License-Identifier: Apache-2.0
"""vLLM's executor with one message per step to its workers, where vLLM's own sends three.

On a CPU vLLM runs its workers in processes of their own, and a step of a small target takes no
more than a few milliseconds. It is asked to run the target, to sample, and for its drafts: three
times its answer is waited for. Our worker samples at once where no grammar has to be worked out
meanwhile, and its answer brings the drafts along, if there are any.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput


@dataclass
class DraftedOutput(ModelRunnerOutput):
    """A step's output, and what was drafted for the next one.

    Attributes:
        drafts: what the runner's `take_draft_token_ids` gives.
    """

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
        # Whoever asks has waited for it already.
        output = output.result() if isinstance(output, Future) else output
        return output.drafts if isinstance(output, DraftedOutput) else None
