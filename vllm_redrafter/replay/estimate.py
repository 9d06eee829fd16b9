# SPDX-License-Identifier: Apache-2.0
"""Tokens per target step, estimated offline: no engine, only text that the target wrote.

The acceptance walk follows what the target draws, and the text is what it drew: the token drawn
at a node of the true path is the next token of the text. So the engine's steps can be replayed:
search, build the tree, walk it along the text, go on after the accepted tokens, search again. For
greedy text this is what the engine does, step by step; for sampled text it is a fair sample of
it, with the sampling parameters that the text was written with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vllm_redrafter.budget.match_acceptance import prior_acceptance
from vllm_redrafter.config import ReDrafterConfig, TreeKind
from vllm_redrafter.data.rows import TextRows
from vllm_redrafter.heads.head import DraftHead
from vllm_redrafter.replay.batches import TextBatch, batches_by_length
from vllm_redrafter.replay.target import TargetOutputs, read_target
from vllm_redrafter.tree.acceptance import accept_path
from vllm_redrafter.tree.beam_search import ExploredNodes, beam_search
from vllm_redrafter.tree.context_matches import find_matches, with_matches
from vllm_redrafter.tree.policy import candidate_log_probs, search_shape
from vllm_redrafter.tree.token_tree import TokenTree

COUNTS = (32, 64, 128, 256, 512)
"""Numbers of candidates that are compared."""
LOSS_ALLOWED = 0.005
"""Of the tokens per step that ranking the vocabulary at every level gives."""

Search = Callable[[Tensor, Tensor], ExploredNodes]
"""From the places tokens[row, root] of A roots, both [A] int64, to what the drafter explores."""
Observer = Callable[[ExploredNodes, Tensor], None]
"""Receives each step's searches, and what the text goes on with: [A, L], -1 beyond its end."""


@dataclass(frozen=True)
class Acceptance:
    """What replayed decoding needed.

    Attributes:
        steps: verifications by the target.
        tokens: what these steps output.
        by_depth: [L], in how many of the steps the draft token of depth 1 .. L was accepted.
    """

    steps: int
    tokens: int
    by_depth: tuple[int, ...] = ()

    @property
    def tokens_per_step(self) -> float:
        """1 is plain decoding; it is also the value where there is no step."""
        return self.tokens / self.steps if self.steps else 1.0

    def __add__(self, other: Acceptance) -> Acceptance:
        shorter, longer = sorted((self.by_depth, other.by_depth), key=len)
        padded = shorter + (0,) * (len(longer) - len(shorter))
        by_depth = tuple(a + b for a, b in zip(padded, longer, strict=True))
        return Acceptance(self.steps + other.steps, self.tokens + other.tokens, by_depth)


def estimate_acceptance(
    drafter: DraftHead,
    target: Any,
    rows: TextRows,
    shape: ReDrafterConfig,
    batch_size: int = 16,
    observe: Observer | None = None,
) -> Acceptance:
    """Replay the decoding of target-written text; see `estimate_shapes`."""
    [found] = estimate_shapes(drafter, target, rows, [shape], batch_size, observe)
    return found


def estimate_shapes(
    drafter: DraftHead,
    target: Any,
    rows: TextRows,
    shapes: Sequence[ReDrafterConfig],
    batch_size: int = 16,
    observe: Observer | None = None,
    on_replay: Callable[[], None] = lambda: None,
) -> list[Acceptance]:
    """Replay the decoding of target-written text with several shapes.

    Args:
        drafter: the draft head.
        target: the transformers model that wrote the text.
        rows: the text; each run of generated tokens is one answer.
        shapes: with `context_matches`, matches of the text are drafted beside the drafter's nodes.
        batch_size: rows read by the target at once.
        observe: is called with each step's searches.
        on_replay: called when a batch has been replayed with a shape.
    """
    totals = [Acceptance(0, 0)] * len(shapes)
    embed = target.get_input_embeddings()
    for batch in batches_by_length(rows, batch_size, embed.weight.device):
        outputs = read_target(target, batch, drafter.config.target_layers)
        for index, shape in enumerate(shapes):
            search = _search(drafter, embed, outputs, batch, shape)
            totals[index] += _replay(batch, shape, drafter.config.vocab_size, search, observe)
            on_replay()
    return totals


def estimate_matches(rows: TextRows, shape: ReDrafterConfig, vocab_size: int) -> Acceptance:
    """Replay the decoding of text without a drafter: matches of the text are all that is drafted.

    Args:
        rows: the text; each run of generated tokens is one answer.
        shape: K, and how many matches.
        vocab_size: the target's.
    """
    batches = batches_by_length(rows, 64, "cpu")
    return sum((_replay(batch, shape, vocab_size) for batch in batches), Acceptance(0, 0))


def compare_candidates(
    drafter: DraftHead, target: Any, rows: TextRows, shape: ReDrafterConfig
) -> dict[int, Acceptance]:
    """Replay the decoding of target-written text with various numbers of candidates.

    Args:
        drafter, target, rows: see `estimate_shapes`.
        shape: in which the drafter is served.

    Returns:
        By C, 0 for the whole draft vocabulary; nothing where the head selects no candidates for
        drafts of this length.
    """
    config = drafter.config
    if not 1 < shape.beam_length <= 1 + config.selected_depths:
        return {}
    counts = [0, *(c for c in COUNTS if shape.beam_width <= c < config.num_ranked_tokens)]
    shapes = [replace(shape, candidates=count) for count in counts]
    return dict(zip(counts, estimate_shapes(drafter, target, rows, shapes), strict=True))


def fewest(found: Mapping[int, Acceptance]) -> int:
    """The smallest C that loses no more than LOSS_ALLOWED; 0 where none does."""
    if not found:
        return 0
    least = (1 - LOSS_ALLOWED) * found[0].tokens_per_step
    enough = [count for count in found if count and found[count].tokens_per_step >= least]
    return min(enough, default=0)


def _search(
    drafter: DraftHead,
    embed: Callable[[Tensor], Tensor],
    outputs: TargetOutputs,
    batch: TextBatch,
    shape: ReDrafterConfig,
) -> Search:
    """The beam search that the engines make, from the target's outputs for the batch."""
    # The target may be of lower precision than a drafter in training.
    dtype = drafter.dtype
    hidden = outputs.hidden.to(dtype)
    size = search_shape(shape, shape.num_speculative_tokens)

    def search(row: Tensor, root: Tensor) -> ExploredNodes:
        return beam_search(
            drafter,
            lambda tokens: embed(tokens).to(dtype),
            hidden[row, root - 1],
            batch.tokens[row, root],
            *size,
            candidates=shape.candidates,
        )

    return search


def _replay(
    batch: TextBatch,
    shape: ReDrafterConfig,
    vocab_size: int,
    search: Search | None = None,
    observe: Observer | None = None,
) -> Acceptance:
    """Decode all answers of a batch at once by jumps, as the engine would.

    The first token of an answer comes from the prefill; the steps that follow output the rest.
    As in the engine, the last step's tokens beyond the end of the answer do not count.
    """
    of_matches = shape.path_length if shape.context_matches else 0
    depth = max(shape.beam_length if search else 0, of_matches)
    rows, roots, lasts = _answers(batch.generated)
    ahead = torch.arange(1, depth + 2, device=batch.tokens.device)
    steps = tokens = 0
    by_depth = torch.zeros(depth, dtype=torch.int64)
    while (running := (roots < lasts).nonzero().squeeze(1)).numel():
        row, root, last = rows[running], roots[running], lasts[running]
        at = root.unsqueeze(1) + ahead
        text = batch.tokens[row]
        written = text.gather(1, at.clamp(max=text.shape[1] - 1))
        written = written.masked_fill(at > last.unsqueeze(1), -1)
        if search is None:
            nothing = row.new_empty(len(row), 0, 0)
            explored = ExploredNodes(nothing, nothing, nothing.float())
        else:
            explored = search(row, root)
            if observe is not None:
                observe(explored, written[:, : explored.tokens.shape[1]])
            explored = replace(explored, log_probs=candidate_log_probs(explored, shape.tree))
        if shape.context_matches:
            explored = _with_matches(explored, text, root, shape, vocab_size)
        accepted = _accepted_depth(explored, batch.tokens[row, root], written, shape)
        output = torch.minimum(accepted + 1, last - root)
        roots[running] += output
        steps, tokens = steps + running.numel(), tokens + int(output.sum())
        reached = torch.bincount(accepted.cpu(), minlength=depth + 1)
        by_depth += reached.flip(0).cumsum(0).flip(0)[1:]
    return Acceptance(steps, tokens, tuple(by_depth.tolist()))


def _answers(generated: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Runs of generated tokens in [B, T]: their block, first and last position, each [A] int64."""
    edge = generated.new_zeros(generated.shape[0], 1)
    before = torch.cat([edge, generated[:, :-1]], dim=1)
    after = torch.cat([generated[:, 1:], edge], dim=1)
    row, first = (generated & ~before).nonzero().unbind(1)
    last = (generated & ~after).nonzero()[:, 1]
    # A token without one before it has no hidden state that predicted it.
    return row, first.clamp(min=1), last


def _with_matches(
    explored: ExploredNodes, text: Tensor, root: Tensor, shape: ReDrafterConfig, vocab_size: int
) -> ExploredNodes:
    """The search and the matches of the texts [A, T], of which each ends at its root."""
    sizes = shape.context_matches, shape.path_length
    matches = find_matches(text, root + 1, *sizes, vocab_size)
    prior = torch.from_numpy(prior_acceptance(shape.path_length)).float().to(text.device)
    return with_matches(explored, matches, prior)


def _accepted_depth(
    explored: ExploredNodes, roots: Tensor, written: Tensor, shape: ReDrafterConfig
) -> Tensor:
    """How many draft tokens [A] a step accepts whose text goes on with `written` [A, depths]."""
    # Nodes off finished beams were left out before paths were joined.
    kind: TreeKind = "chain" if shape.tree == "chain" else "explored"
    most = shape.num_speculative_tokens
    tree = TokenTree.from_explored(roots, explored, most, kind)
    # What the target draws at a node: right on the true path, and not read off it.
    sampled = written.gather(1, tree.depths.long())
    return accept_path(tree, sampled).num_sampled.long() - 1
