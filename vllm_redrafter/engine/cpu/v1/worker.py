# SPDX-License-Identifier: Apache-2.0
"""The worker that runs CPUTreeModelRunner; vLLM finds it by `worker_cls` (engine/selection.py)."""

from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_redrafter.drafting.drafting import warm_up
from vllm_redrafter.drafting.walk import Walk, moves
from vllm_redrafter.engine.cpu import tree_sequences
from vllm_redrafter.engine.cpu.executor import DraftedOutput
from vllm_redrafter.engine.cpu.v1.proposer import TreeProposer
from vllm_redrafter.engine.cpu.v1.runner import CPUTreeModelRunner
from vllm_redrafter.engine.cpu.verification import verification_step
from vllm_redrafter.engine.log import logger
from vllm_redrafter.engine.published import Publisher
from vllm_redrafter.engine.replacement import swap
from vllm_redrafter.engine.speculation import Settings
from vllm_redrafter.utils.names import CPU_TREE_ATTENTION
from vllm_redrafter.utils.patching import patched
from vllm_redrafter.utils.processor import advice_on


class ReDrafterCPUWorker(cpu_worker.CPUWorker):
    """vLLM's CPU worker with our model runner and attention backend."""

    model_runner: CPUTreeModelRunner

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if Settings.of(self.vllm_config).config.tree != "chain":
            # The CPU platform always asks for CPU_ATTN; only this process sees the override.
            register_backend(AttentionBackendEnum.CPU_ATTN, CPU_TREE_ATTENTION)
        # All ranks of an engine count the same.
        engine = self.parallel_config.data_parallel_index
        self.publisher = Publisher.if_wanted(engine) if self.rank == 0 else None

    def init_device(self) -> None:
        if self.rank == 0 and (advice := advice_on(self.model_config.dtype)):
            logger.warning("ReDrafter: %s", advice)
        # vLLM has no hook for the runner's class; it is looked up in the worker's module.
        with patched(cpu_worker, CPUModelRunner=CPUTreeModelRunner):
            super().init_device()

    def compile_or_warm_up_model(self) -> CompilationTimes:
        times = super().compile_or_warm_up_model()
        _warm_up(self.model_runner.proposer)
        self.model_runner.prepare_budget()
        # As vLLM does after its own warm-up: sampling begins where plain decoding would.
        set_random_seed(self.model_config.seed, self.parallel_config.data_parallel_index)
        return times

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """As vLLM does; and sample at once, where no grammar is computed meanwhile."""
        output = super().execute_model(scheduler_output)
        waits_for_grammar = scheduler_output.has_structured_output_requests
        return self.sample_tokens(None) if output is None and not waits_for_grammar else output

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output = super().sample_tokens(*args, **kwargs)
        if self.publisher is not None:
            self.publisher.publish(self.model_runner.stats)
        is_output = isinstance(output, ModelRunnerOutput)
        if is_output and (drafts := self.take_draft_token_ids()) is not None:
            return DraftedOutput(**vars(output), drafts=drafts)
        return output

    def redrafter_stats(self) -> dict[str, float]:
        """Counters since the last reset, for `LLM.collective_rpc`."""
        return asdict(self.model_runner.stats)

    def redrafter_costs(self) -> dict[str, list[tuple[float, ...]]]:
        """The costs measured at start-up, for `LLM.collective_rpc`; empty without `adaptive`.

        Returns:
            "draft": requests, beam width, beam length, seconds of each draft; "verify": rows and
            seconds of each step.
        """
        costs = self.model_runner.costs
        if costs is None:
            return {}
        return {"draft": [*map(tuple, costs.draft)], "verify": [*map(tuple, costs.verify)]}

    def redrafter_swap(self, model: str, revision: str | None = None) -> dict[str, str] | None:
        """See `swap`; `model` is a folder on this machine, or a hub id."""
        return swap(self.model_runner.proposer, model, revision, None)

    def reset_earlier_answers(self) -> None:
        """Forget them, when vLLM forgets cached prefixes."""
        if self.model_runner.matching is not None:
            self.model_runner.matching.forget_answers()

    def reset_redrafter_stats(self) -> None:
        """Zero the counters, for `LLM.collective_rpc`."""
        stats = self.model_runner.stats
        if self.publisher is not None:
            self.publisher.carry(stats)
        stats.reset()


def _warm_up(proposer: TreeProposer) -> None:
    """Run a step's compiled loops: draft for one request, and accept nothing of it."""
    tree = warm_up(proposer, torch.zeros(1, proposer.hidden_width, dtype=proposer.dtype))
    links = np.stack([tree.parents[0].numpy(), tree.depths[0].numpy()])
    rows = int(tree.num_nodes)
    step = verification_step(
        [links],
        [rows - 1],
        np.array([rows], dtype=np.int32),
        tree.tokens[0].numpy(),
        np.arange(rows, dtype=np.int64),
        rows,
    )
    walk = Walk(step.tree)
    walk.go_on(torch.full((1,), -1, dtype=torch.int32))
    moves(walk.accepted.path, step.root_rows)
    tree_sequences.warm_up(proposer.dtype)
