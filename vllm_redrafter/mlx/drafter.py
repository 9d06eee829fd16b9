# SPDX-License-Identifier: Apache-2.0
"""A drafter bound to a target: what `stream_generate` takes as its draft model."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch
from torch import Tensor

from vllm_redrafter.budget.costs import CostTable
from vllm_redrafter.budget.planner import BatchPlanner, arms_of
from vllm_redrafter.checkpoints.acceptance import NOTHING_RECORDED
from vllm_redrafter.checkpoints.fit import misfits, require_fit
from vllm_redrafter.checkpoints.reading import Checkpoint
from vllm_redrafter.checkpoints.speculation import NODES
from vllm_redrafter.checkpoints.speculation import speculation as settled
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.drafting.drafting import Drafting, warm_up
from vllm_redrafter.drafting.proposer import Proposer
from vllm_redrafter.drafting.stats import StepStats
from vllm_redrafter.drafting.time_sizes import time_drafts, time_sizes
from vllm_redrafter.mlx.beam_search import Explored, beam_search
from vllm_redrafter.mlx.heads import Head, load_head
from vllm_redrafter.mlx.target import TreeTarget
from vllm_redrafter.mlx.tree_cache import TreeInput
from vllm_redrafter.tree.beam_search import ExploredNodes
from vllm_redrafter.tree.policy import SearchShape
from vllm_redrafter.utils.errors import ConfigError

DEFAULT_NODES = 7
"""With the root 8 rows, up to which a step on Metal costs little more. By reading of MLX's kernels
(ml-explore/mlx#3826, #4265); not run."""
CONTEXT = 64
"""Tokens before the timed trees; the cost of longer contexts is learned from the steps."""
TIMING_SECONDS = 3.0
"""For verification, and as much for drafts."""


class ExploredProposer(Proposer[Explored]):
    """For one request, whose search is evaluated before it is proposed."""

    def explore(self, states: Explored, root_tokens: Tensor, shape: SearchShape) -> ExploredNodes:
        """The same nodes on the host, [1, L, W]."""
        tokens, back_pointers = (
            torch.from_numpy(np.array(part, dtype=np.int64))[None]
            for part in (states.tokens, states.back_pointers)
        )
        log_probs = torch.from_numpy(np.array(states.log_probs, dtype=np.float32))[None]
        return ExploredNodes(tokens, back_pointers, log_probs)


class Drafter:
    """A head for one target, and its learned state. It serves one request at a time.

    Without a `head`, prompt-lookup (n-gram) matches alone are verified.
    """

    layers: tuple[()] = ()  # mlx-lm counts those of draft models

    def __init__(
        self, target: TreeTarget, head: Head | None, config: ReDrafterConfig, drafting: Drafting
    ) -> None:
        self.target, self.head, self.config, self.drafting = target, head, config, drafting
        self.stats = drafting.stats

    def make_cache(self) -> list[Any]:
        """None: mlx-lm's server makes one of each draft model."""
        return []


def load_drafter(
    drafter: str | None, model: nn.Module, *, revision: str | None = None, **speculation: Any
) -> Drafter:
    """Read a drafter for a model of mlx-lm, and measure what drafts and steps cost here.

    Args:
        drafter: a checkpoint: a folder or a hub id. None to verify matches in the text alone.
        model: the target, as `mlx_lm.load` returns it; prepared in place.
        speculation: fields of `ReDrafterConfig`. The others are the checkpoint's, but at most 7
            `num_speculative_tokens`.

    Raises:
        ConfigError: the checkpoint is broken or does not fit, a value is out of range, or the
            model cannot verify trees.
    """
    checkpoint = None if drafter is None else Checkpoint.open(drafter, revision).checked()
    config = _config(checkpoint, speculation)
    target = TreeTarget(model, () if checkpoint is None else checkpoint.head.target_layers)
    head, recorded = None, NOTHING_RECORDED
    if checkpoint is not None:
        reasons = misfits(checkpoint.head, target.hidden_size, target.vocab_size)
        require_fit(f"the drafter {drafter!r}", None, [*reasons])
        head, recorded = load_head(checkpoint, target.dtype), checkpoint.acceptance
    proposer = ExploredProposer(config, head is not None, recorded)
    shape = proposer.shape(config.num_speculative_tokens)
    none = Explored(*[mx.zeros((0, 0))] * 3)
    warm_up(proposer, none if head is None else _dummy_search(target, head, shape))
    drafting = Drafting(proposer, StepStats())
    if config.adaptive:
        costs = measure_costs(target, head, config)
        drafting.planner = BatchPlanner(config, costs, 1, recorded)
    return Drafter(target, head, config, drafting)


def _config(checkpoint: Checkpoint | None, given: dict[str, Any]) -> ReDrafterConfig:
    known = (NODES, *ReDrafterConfig.own_keys())
    if unknown := sorted(given.keys() - {*known}):
        raise ConfigError(f"load_drafter: no such setting: {', '.join(unknown)}; known: {known}")
    keeps_none = "no answers of other requests are kept"
    absent = {"earlier_answers": keeps_none, "earlier_prompts": keeps_none}
    absent["candidates"] = "a draft ranks the vocabulary at every level"
    if name := next(filter(given.get, absent), None):
        reason = f"in MLX {absent[name]}; leave {name} out"
        raise ConfigError(f"load_drafter: {name} {given[name]}: {reason}")
    asked = {**given, "candidates": 0, "earlier_answers": 0}
    return settled(checkpoint, asked, lambda: DEFAULT_NODES, "load_drafter")


def measure_costs(target: TreeTarget, head: Head | None, config: ReDrafterConfig) -> CostTable:
    """Time passes of 1 to K + 1 rows, and drafts of the shortest and the longest search."""
    caches = target.make_cache()
    rng = np.random.default_rng(0)
    max_rows = config.num_speculative_tokens + 1
    tokens = mx.array(rng.integers(target.vocab_size, size=CONTEXT + max_rows))
    mx.eval(target.forward(tokens[:CONTEXT], caches))

    def verify(rows: int) -> None:
        tree = TreeInput(np.maximum(np.arange(rows) - 1, 0))
        logits, _ = target.forward(tokens[CONTEXT : CONTEXT + rows], caches, tree)
        mx.eval(logits.argmax(axis=-1))
        for cache in caches:
            cache.trim_to(CONTEXT)

    def draft(shape: SearchShape, _: int) -> None:
        if head is not None and shape.beam_length:
            mx.eval(_dummy_search(target, head, shape))

    arms, limits = arms_of(config, head is not None), (lambda: None, TIMING_SECONDS)
    drafts = tuple(time_drafts(arms, 1, draft, *limits))
    passes = time_sizes(max_rows, verify, *limits)
    return CostTable(drafts, tuple(passes))


def _dummy_search(target: TreeTarget, head: Head, shape: SearchShape) -> Explored:
    """A search as steps make it, behind a hidden state of zeros; lazy."""
    hidden = mx.zeros(head.config.hidden_width, target.dtype)
    return beam_search(head, target.embed, hidden, mx.array(0), *shape)
