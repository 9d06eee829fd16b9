"""A drafter bound to a target: what `stream_generate` takes as its draft model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from vllm_redrafter.budget.planner import BatchPlanner
from vllm_redrafter.checkpoints.acceptance_record import NOTHING_RECORDED
from vllm_redrafter.checkpoints.drafter_files import read_config
from vllm_redrafter.checkpoints.fit import size_differences
from vllm_redrafter.checkpoints.reading import check_checkpoint, recorded_acceptance, shape_of
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.drafting.drafting import Drafting
from vllm_redrafter.drafting.stats import StepStats
from vllm_redrafter.drafting.warm_up import warm_up
from vllm_redrafter.heads.head import HeadConfig
from vllm_redrafter.mlx.beam_search import Explored
from vllm_redrafter.mlx.costs import measure_costs, search_for_nobody
from vllm_redrafter.mlx.heads import Head, load_head
from vllm_redrafter.mlx.proposer import ExploredProposer
from vllm_redrafter.mlx.target import TreeTarget
from vllm_redrafter.utils.errors import ConfigError

USUAL_NODES = 7
"""K where nobody says it: with the root 8 rows, up to which a step on Metal costs little more. By
reading of MLX's kernels (ml-explore/mlx#3826, #4265); not run."""


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
    sizes = None if drafter is None else check_checkpoint(drafter, revision)
    config = _config(drafter, revision, speculation, sizes)
    target = TreeTarget(model, () if sizes is None else sizes.target_layers)
    head, recorded = None, NOTHING_RECORDED
    if drafter is not None and sizes is not None:
        _require_fit(drafter, sizes, target)
        head = load_head(drafter, target.dtype, revision)
        recorded = recorded_acceptance(drafter, revision)
    proposer = ExploredProposer(config, head is not None, recorded)
    shape = proposer.shape(config.num_speculative_tokens)
    none = Explored(*[mx.zeros((0, 0))] * 3)
    warm_up(proposer, none if head is None else search_for_nobody(target, head, shape))
    drafting = Drafting(proposer, StepStats())
    if config.adaptive:
        costs = measure_costs(target, head, config)
        drafting.planner = BatchPlanner(config, costs, 1, recorded)
    return Drafter(target, head, config, drafting)


def _config(
    drafter: str | None, revision: str | None, given: dict[str, Any], sizes: HeadConfig | None
) -> ReDrafterConfig:
    recorded = {} if drafter is None else shape_of(read_config(drafter, revision))
    recorded.pop("candidates", None)  # vLLM's engines alone
    shape = {"num_speculative_tokens": USUAL_NODES, **recorded, **given}
    known = ("num_speculative_tokens", *ReDrafterConfig.own_keys())
    if unknown := sorted(shape.keys() - {*known}):
        raise ConfigError(f"load_drafter: no such setting: {', '.join(unknown)}; known: {known}")
    config = ReDrafterConfig(**shape)
    if "num_speculative_tokens" not in given:
        nodes = min(config.num_speculative_tokens, USUAL_NODES)
        config = replace(config, num_speculative_tokens=nodes)
    if config.candidates:
        raise ConfigError(
            f"load_drafter: candidates {config.candidates}: in MLX a draft ranks the vocabulary at "
            "every level; leave candidates out"
        )
    if sizes is not None:
        sizes.require_beam_length("load_drafter", config.beam_length)
    elif not config.context_matches:
        raise ConfigError(
            "load_drafter: without a drafter and with context_matches=0 there is nothing to "
            "verify: name a drafter, or leave context_matches out"
        )
    return config


def _require_fit(drafter: str, sizes: HeadConfig, target: TreeTarget) -> None:
    differences = size_differences(sizes, target.hidden_size, target.vocab_size)
    if differences:
        listed = "; ".join(f"{d.what}: drafter {d.drafter}, target {d.target}" for d in differences)
        raise ConfigError(
            f"the drafter {drafter!r} does not fit this target ({listed}): take the one that was "
            "trained for it"
        )
