# SPDX-License-Identifier: Apache-2.0
"""What drafts and steps cost here, measured at start-up."""

from collections.abc import Callable
from functools import partial
from time import perf_counter

import numpy as np
import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_redrafter.budget.costs import CostTable
from vllm_redrafter.budget.planner import arms_of
from vllm_redrafter.drafting.own_matches import own_matches
from vllm_redrafter.drafting.time_sizes import time_drafts, time_sizes
from vllm_redrafter.engine.cpu.v1.proposer import TreeProposer
from vllm_redrafter.engine.embedding import shared_embedding
from vllm_redrafter.tree.policy import SearchShape

MAX_SECONDS = 4.0
"""Of verification, and of drafts; costs of larger sizes are extrapolated."""
WARM_UP_SECONDS = 1.0


def measure_costs(runner: CPUModelRunner, proposer: TreeProposer) -> CostTable:
    """Time drafts, and passes of the target without context, of growing size.

    What else a step costs is learned from the steps themselves (`budget/costs.py`). Afterwards no
    small step waits for oneDNN, which compiles for each number of rows.
    """
    config = proposer.config
    requests = runner.max_num_reqs
    _fill_inputs(runner)
    draft = _drafts(proposer, requests, runner.model_config.get_vocab_size())
    rows = min(requests * (config.num_speculative_tokens + 1), runner.max_num_tokens)
    arms = arms_of(config, proposer.drafter is not None)
    of_one = partial(_target_pass, runner, 1)
    drafts = tuple(time_drafts(arms, requests, draft, of_one, MAX_SECONDS))
    passes = time_sizes(
        rows,
        partial(_target_pass, runner),
        before=lambda: draft(proposer.shape(config.num_speculative_tokens), 1),
        seconds=MAX_SECONDS,
    )
    table = CostTable(drafts, tuple(passes))
    ends = perf_counter() + WARM_UP_SECONDS
    for few in range(1, min(config.num_speculative_tokens + 1, runner.max_num_tokens) + 1):
        if perf_counter() > ends:
            break
        _target_pass(runner, few)
    return table


def _drafts(proposer: TreeProposer, requests: int, vocab_size: int) -> Callable[..., None]:
    """Draft by a search, for so many requests."""
    config = proposer.config
    hidden = torch.zeros(requests, proposer.hidden_width, dtype=proposer.dtype)
    roots = torch.zeros(requests, dtype=torch.int64)
    most = np.full(requests, config.num_speculative_tokens)
    greedy = np.zeros(requests, dtype=np.bool_)
    # Texts of one token over and over, in which everything matches.
    paths, texts = (config.context_matches, config.path_length), np.zeros((requests, 16), np.int32)
    rows, num_tokens = np.arange(requests), np.full(requests, texts.shape[1])

    def draft(shape: SearchShape, size: int) -> None:
        matches = None
        if config.context_matches:
            matches = own_matches(texts, rows[:size], num_tokens[:size], paths, vocab_size)
        of_requests = hidden[:size], roots[:size], None, most[:size], greedy[:size]
        proposer.propose(*of_requests, shape, None, matches)

    return draft


@torch.inference_mode()
def _fill_inputs(runner: CPUModelRunner) -> None:
    """Random tokens for passes without requests: of token 0 alone, few experts are needed."""
    generator = torch.Generator().manual_seed(0)
    tokens = runner.input_ids.gpu
    tokens.random_(runner.model_config.get_vocab_size(), generator=generator)
    # What targets read that take images or prompts of embeddings.
    if runner.supports_mm_inputs or runner.enable_prompt_embeds:
        runner.inputs_embeds.gpu.copy_(shared_embedding(runner.get_model())(tokens))


def _target_pass(runner: CPUModelRunner, rows: int) -> None:
    # Else the rows count as padding, which no expert computes. Their K and V go nowhere.
    hidden, _ = runner._dummy_run(rows, skip_eplb=True, is_profile=True)
    # vLLM's layers for adapters expect the logits rows of a step that they were told about.
    if runner.lora_config is None:
        runner.model.compute_logits(hidden[:rows]).argmax(dim=-1)
