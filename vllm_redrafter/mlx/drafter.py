# SPDX-License-Identifier: Apache-2.0
"""A drafter bound to a target: what `stream_generate` takes as its draft model."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch
from torch import Tensor

from vllm_redrafter.budget.planner import BatchPlanner
from vllm_redrafter.checkpoints.acceptance import NOTHING_RECORDED
from vllm_redrafter.checkpoints.fit import misfits, require_fit
from vllm_redrafter.checkpoints.reading import Checkpoint
from vllm_redrafter.checkpoints.speculation import NODES
from vllm_redrafter.checkpoints.speculation import speculation as settled
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.drafting.drafting import Drafting
from vllm_redrafter.drafting.proposer import Proposer
from vllm_redrafter.drafting.stats import StepStats
from vllm_redrafter.drafting.warm_up import warm_up
from vllm_redrafter.mlx.beam_search import Explored
from vllm_redrafter.mlx.costs import dummy_search, measure_costs
from vllm_redrafter.mlx.heads import Head, load_head
from vllm_redrafter.mlx.target import TreeTarget
from vllm_redrafter.tree.beam_search import ExploredNodes
from vllm_redrafter.tree.policy import SearchShape
from vllm_redrafter.utils.errors import ConfigError

USUAL_NODES = 7
"""K where nobody says it: with the root 8 rows, up to which a step on Metal costs little more. By
reading of MLX's kernels (ml-explore/mlx#3826, #4265); not run."""


class ExploredProposer(Proposer[Explored]):
    """For one request, whose search is made and evaluated before it is proposed."""

    def explore(self, states: Explored, root_tokens: Tensor, shape: SearchShape) -> ExploredNodes:
        """The same nodes on the host, [1, L, W]; they are of this root and this search."""
        tokens, back_pointers = (
            torch.from_numpy(np.array(part, dtype=np.int64))[None]
            for part in (states.tokens, states.back_pointers)
        )
        log_probs = torch.from_numpy(np.array(states.log_probs, dtype=np.float32))[None]
        return ExploredNodes(tokens, back_pointers, log_probs)


class Drafter:
    """A head for one target, and what is learned while it drafts. It serves one request at a time.

    Attributes:
        target: prepared for trees.
        head: None where only what the text repeats is verified.
        config: the most that is drafted.
        drafting: decides what each step drafts, and learns.
        stats: counters of the steps.
        layers: none; mlx-lm counts those of draft models.
    """

    layers: tuple[()] = ()

    def __init__(
        self,
        target: TreeTarget,
        head: Head | None,
        config: ReDrafterConfig,
        drafting: Drafting,
    ) -> None:
        self.target, self.head, self.config, self.drafting = target, head, config, drafting
        self.stats = drafting.stats

    def make_cache(self) -> list[Any]:
        """mlx-lm's server makes one of each draft model; this one keeps no state."""
        return []


def load_drafter(
    drafter: str | None, model: nn.Module, *, revision: str | None = None, **speculation: Any
) -> Drafter:
    """Read a drafter for a model of mlx-lm, and measure what drafts and steps cost here.

    Args:
        drafter: a checkpoint: a folder or a hub id. None to verify continuations found in the text
            alone.
        model: the target, as `mlx_lm.load` returns it; prepared in place.
        revision: of the drafter's hub repository.
        speculation: fields of `ReDrafterConfig`. What is not said is the checkpoint's, but at most
            7 `num_speculative_tokens`.

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
    warm_up(proposer, none if head is None else dummy_search(target, head, shape))
    drafting = Drafting(proposer, StepStats())
    if config.adaptive:
        costs = measure_costs(target, head, config)
        drafting.planner = BatchPlanner(config, costs, 1, recorded)
    return Drafter(target, head, config, drafting)


def _config(checkpoint: Checkpoint | None, given: dict[str, Any]) -> ReDrafterConfig:
    known = (NODES, *ReDrafterConfig.own_keys())
    if unknown := sorted(given.keys() - {*known}):
        raise ConfigError(f"load_drafter: no such setting: {', '.join(unknown)}; known: {known}")
    if given.get("candidates"):
        raise ConfigError(
            f"load_drafter: candidates {given['candidates']}: in MLX a draft ranks the vocabulary "
            "at every level; leave candidates out"
        )
    asked = {**given, "candidates": 0}
    return settled(checkpoint, asked, lambda: USUAL_NODES, "load_drafter")
