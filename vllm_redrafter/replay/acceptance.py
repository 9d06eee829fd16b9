# SPDX-License-Identifier: Apache-2.0
"""How a drafter's nodes are accepted, for its checkpoint (`AcceptanceRecord`)."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_redrafter.budget.acceptance import AcceptanceEstimator, log_odds_of
from vllm_redrafter.checkpoints.acceptance import AcceptanceRecord, PerSampling
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.data.rows import TextRow, TextRows
from vllm_redrafter.heads.head import DraftHead
from vllm_redrafter.replay.estimate import estimate_acceptance
from vllm_redrafter.tree.beam_search import ExploredNodes

REFITS = 50
"""Damped Newton steps on all nodes: each moves a parameter by a few units at most."""
DIGITS = 4
"""Decimal places of what is recorded."""


class JudgedNodes(NamedTuple):
    """What the searches of a replay explored.

    Attributes:
        log_probs: [N, L, W] float32, of the search.
        back_pointers: [N, L, W] int64.
        judged: [N, L, W] bool: nodes whose parent was accepted, before the text ended.
        accepted: [N, L, W] bool.
    """

    log_probs: Tensor
    back_pointers: Tensor
    judged: Tensor
    accepted: Tensor


def judged_nodes(explored: ExploredNodes, written: Tensor) -> JudgedNodes:
    """Compare searches with what the text goes on with, [N, L]; -1 beyond its end."""
    nodes = explored.log_probs > -torch.inf
    known = (written >= 0).unsqueeze(2)
    matches = (explored.tokens == written.unsqueeze(2)) & nodes
    reached = torch.ones_like(nodes[:, 0])
    judged: list[Tensor] = []
    accepted: list[Tensor] = []
    for level in range(nodes.shape[1]):
        if level:
            reached = accepted[-1].gather(1, explored.back_pointers[:, level])
        judged.append(reached & nodes[:, level] & known[:, level])
        accepted.append(reached & matches[:, level])
    by_level = torch.stack(judged, dim=1).cpu(), torch.stack(accepted, dim=1).cpu()
    return JudgedNodes(explored.log_probs.cpu(), explored.back_pointers.cpu(), *by_level)


@torch.no_grad()
def measure_acceptance(
    drafter: DraftHead, target: Any, rows: TextRows, sampled: Tensor, shape: ReDrafterConfig
) -> PerSampling:
    """Replay the decoding of target-written text, and learn which nodes it accepts.

    `sampled`, [rows] bool, marks those that were sampled; the others were written greedily.
    """
    kinds = (_SomeRows(rows, of_kind) for of_kind in (~sampled, sampled))
    return PerSampling(*(_measured(drafter, target, some, shape) for some in kinds))


class _SomeRows:
    """The marked ones of other rows."""

    def __init__(self, rows: TextRows, marked: Tensor) -> None:
        self.rows, self.indices = rows, marked.nonzero().flatten().tolist()
        self.lengths = np.asarray(rows.lengths)[marked.numpy()]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int, /) -> TextRow:
        return self.rows[self.indices[index]]


def _measured(
    drafter: DraftHead, target: Any, rows: TextRows, shape: ReDrafterConfig
) -> AcceptanceRecord | None:
    parts: list[JudgedNodes] = []

    def observe(explored: ExploredNodes, written: Tensor) -> None:
        parts.append(judged_nodes(explored, written))

    estimate_acceptance(drafter, target, rows, shape, observe=observe)
    if not parts:
        return None
    nodes = JudgedNodes(*map(torch.cat, zip(*parts, strict=True)))
    return fitted(nodes) if nodes.judged.any() else None


def fitted(nodes: JudgedNodes) -> AcceptanceRecord:
    """The calibration that explains the nodes best, and the mean survival that it predicts."""
    length = nodes.log_probs.shape[1]
    log_odds = log_odds_of(nodes.log_probs, nodes.back_pointers)
    depths = torch.arange(1, length + 1)[:, None].expand_as(log_odds)
    of_judged = [part[nodes.judged] for part in (log_odds, depths, nodes.judged, nodes.accepted)]
    estimator = AcceptanceEstimator(length)
    for _ in range(REFITS):
        estimator.observe(*of_judged)
        estimator.refit()
    survival = estimator.log_survival(log_odds, nodes.log_probs, nodes.back_pointers)
    survival = survival.exp().mean(dim=0)
    return AcceptanceRecord(
        round(float(estimator.slope), DIGITS),
        tuple(round(bias, DIGITS) for bias in estimator.biases.tolist()),
        tuple(tuple(round(p, DIGITS) for p in level) for level in survival.tolist()),
    )
