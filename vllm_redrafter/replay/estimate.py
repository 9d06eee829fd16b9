# SPDX-License-Identifier: Apache-2.0
"""Tokens per target step, estimated offline: no engine, only text that the target wrote.

The acceptance walk follows what the target draws, and the text is what it drew: the token drawn
at a node of the true path is the next token of the text. So the engine's steps can be replayed:
search, build the tree, walk it along the text, go on after the accepted tokens. For greedy text
this is what the engine does, step by step; for sampled text it is a fair sample of it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from vllm_redrafter.budget.match_acceptance import prior_acceptance
from vllm_redrafter.config import ReDrafterConfig, TreeKind
from vllm_redrafter.data.rows import ListRows, TextRows
from vllm_redrafter.drafting.earlier_answers import AnswerStore
from vllm_redrafter.drafting.joining import joined_nodes
from vllm_redrafter.drafting.own_matches import own_matches
from vllm_redrafter.heads.head import DraftHead
from vllm_redrafter.replay.batches import TextBatch, batches_by_length
from vllm_redrafter.replay.target import TargetOutputs, read_target
from vllm_redrafter.tree.acceptance import accept_path
from vllm_redrafter.tree.beam_search import ExploredNodes, beam_search
from vllm_redrafter.tree.context_matches import joint_scores
from vllm_redrafter.tree.policy import candidate_log_probs, search_shape
from vllm_redrafter.tree.token_tree import TokenTree
from vllm_redrafter.utils.compiled import Array

COUNTS = (32, 64, 128, 256, 512)
"""Numbers of candidates that are compared."""
LOSS_ALLOWED = 0.005
"""Share of the tokens per step that fewer candidates may lose."""

Search = Callable[[Tensor, Tensor], ExploredNodes]
"""Callback(row, root), the places tokens[row, root] of A roots, both [A] int64."""
Observer = Callable[[ExploredNodes, Tensor], None]
"""Callback(explored, written), with the text behind the roots: [A, L], -1 beyond its end."""


@dataclass(frozen=True)
class Acceptance:
    """Verification steps of a replay, and the tokens that they output; `by_depth`, [L], in how many
    of the steps the draft token of depth 1 .. L was accepted."""

    steps: int
    tokens: int
    by_depth: tuple[int, ...] = ()

    @property
    def tokens_per_step(self) -> float:
        """1 is plain decoding, and the value without a step."""
        return self.tokens / self.steps if self.steps else 1.0

    def __add__(self, other: Self) -> Self:
        shorter, longer = sorted((self.by_depth, other.by_depth), key=len)
        padded = shorter + (0,) * (len(longer) - len(shorter))
        by_depth = tuple(a + b for a, b in zip(padded, longer, strict=True))
        return type(self)(self.steps + other.steps, self.tokens + other.tokens, by_depth)


def estimate_acceptance(
    drafter: DraftHead,
    target: Any,
    rows: TextRows,
    shape: ReDrafterConfig,
    batch_size: int = 16,
    observe: Observer | None = None,
) -> Acceptance:
    """Replay the decoding of target-written text; see `estimate_shapes`."""
    [acceptance] = estimate_shapes(drafter, target, rows, [shape], batch_size, observe)
    return acceptance


def estimate_shapes(
    drafter: DraftHead,
    target: Any,
    rows: TextRows,
    shapes: Sequence[ReDrafterConfig],
    batch_size: int = 16,
    observe: Observer | None = None,
    on_replay: Callable[[], None] = lambda: None,
    earlier: AnswerStore | None = None,
    continued: int | None = None,
) -> list[Acceptance]:
    """Replay the decoding of text that the transformers model `target` wrote, in several shapes.

    Args:
        rows: the text; each run of generated tokens is one answer.
        shapes: with `context_matches`, prompt-lookup (n-gram) matches are drafted besides.
        batch_size: rows read by the target at once.
        observe: is called with each step's searches.
        on_replay: called when a batch has been replayed with a shape.
        earlier: answers of partition 0, from which shapes with `earlier_answers` draft too.
        continued: how many beams go on below each level, as in `beam_search`.
    """
    totals = [Acceptance(0, 0)] * len(shapes)
    embed, vocab_size = target.get_input_embeddings(), drafter.config.vocab_size
    for batch in batches_by_length(rows, batch_size, embed.weight.device):
        outputs = read_target(target, batch, drafter.config.target_layers)
        for index, shape in enumerate(shapes):
            search = _search(drafter, embed, outputs, batch, shape, continued)
            totals[index] += _replay(batch, shape, vocab_size, search, observe, earlier)
            on_replay()
    return totals


def estimate_matches(
    rows: TextRows, shape: ReDrafterConfig, vocab_size: int, earlier: AnswerStore | None = None
) -> Acceptance:
    """Replay the decoding of text with prompt-lookup matches alone, without a drafter."""
    batches = batches_by_length(rows, 64, "cpu")
    replays = (_replay(batch, shape, vocab_size, earlier=earlier) for batch in batches)
    return sum(replays, Acceptance(0, 0))


def estimate_stream(
    drafter: DraftHead, target: Any, rows: TextRows, shape: ReDrafterConfig, block: int
) -> dict[str, list[Acceptance]]:
    """Replay a stream by blocks of rows, each with the answers of the blocks before it.

    Acceptance in each block, by what drafts: the drafter; beside it the matches of `shape`, of own
    text alone and of earlier answers too; and these without a drafter.
    """
    own, vocab_size = replace(shape, earlier_answers=0), drafter.config.vocab_size
    alone = replace(own, context_matches=0)
    found: dict[str, list[Acceptance]] = {}
    earlier = AnswerStore(max(shape.earlier_answers, 1), vocab_size)
    for start in range(0, len(rows), block):
        some = ListRows(rows[at] for at in range(start, min(start + block, len(rows))))
        drafted = estimate_shapes(drafter, target, some, [alone, own, shape], earlier=earlier)
        by_name = {
            "drafter": drafted[0],
            "drafter, own text": drafted[1],
            "drafter, own text, earlier answers": drafted[2],
            "own text": estimate_matches(some, own, vocab_size),
            "own text, earlier answers": estimate_matches(some, shape, vocab_size, earlier),
        }
        for name, acceptance in by_name.items():
            found.setdefault(name, []).append(acceptance)
        for row in some:
            _, firsts, lasts = _answers(row.generated[None])
            for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
                earlier.enter(row.tokens[first : last + 1].int().numpy(), 0)
    return found


def estimate_chains(
    drafter: DraftHead, target: Any, rows: TextRows, shapes: Sequence[ReDrafterConfig]
) -> dict[str, list[Acceptance]]:
    """Replay what `draft` would make of a drafter that drafts one chain, by what is beside it.

    Nothing; the W - 1 runner-ups of each token of the chain; matches in own text; both. Of each of
    the shapes, which have matches.
    """
    chains = [replace(shape, beam_width=1) for shape in shapes]
    both = [*chains, *shapes]
    alone = [replace(shape, context_matches=0) for shape in both]
    found = iter(estimate_shapes(drafter, target, rows, [*alone, *both], continued=1))
    names = "chain", "chain, runner-ups", "chain, matches", "chain, runner-ups, matches"
    return {name: [next(found) for _ in shapes] for name in names}


def compare_candidates(
    drafter: DraftHead, target: Any, rows: TextRows, shape: ReDrafterConfig
) -> dict[int, Acceptance]:
    """Replay the decoding of target-written text, by number of candidates; 0 is all tokens.

    Empty where the head selects no candidates for drafts of this length.
    """
    config = drafter.config
    if not 1 < shape.beam_length <= 1 + config.selected_depths:
        return {}
    counts = [0, *(c for c in COUNTS if shape.beam_width <= c < config.num_ranked_tokens)]
    shapes = [replace(shape, candidates=count) for count in counts]
    return dict(zip(counts, estimate_shapes(drafter, target, rows, shapes), strict=True))


def fewest(by_count: Mapping[int, Acceptance]) -> int:
    """The smallest number that loses no more than LOSS_ALLOWED; 0 where none does."""
    counts = [count for count in by_count if count]
    least = (1 - LOSS_ALLOWED) * by_count[0].tokens_per_step if counts else 0.0
    return min((c for c in counts if by_count[c].tokens_per_step >= least), default=0)


def _search(
    drafter: DraftHead,
    embed: Callable[[Tensor], Tensor],
    outputs: TargetOutputs,
    batch: TextBatch,
    shape: ReDrafterConfig,
    continued: int | None,
) -> Search:
    # The target may be of lower precision than a drafter in training.
    dtype = drafter.dtype
    hidden = outputs.hidden.to(dtype)
    size = search_shape(shape, shape.num_speculative_tokens)

    def search(row: Tensor, root: Tensor) -> ExploredNodes:
        start = hidden[row, root - 1], batch.tokens[row, root]
        return beam_search(
            drafter,
            lambda x: embed(x).to(dtype),
            *start,
            *size,
            candidates=shape.candidates,
            continued=continued,
        )

    return search


def _replay(
    batch: TextBatch,
    shape: ReDrafterConfig,
    vocab_size: int,
    search: Search | None = None,
    observe: Observer | None = None,
    earlier: AnswerStore | None = None,
) -> Acceptance:
    """Decode all answers of a batch at once, as the engine would.

    The prefill outputs an answer's first token. Tokens beyond the answer's end do not count.
    """
    of_matches = shape.path_length if shape.context_matches else 0
    depth = max(shape.beam_length if search else 0, of_matches)
    rows, roots, lasts = _answers(batch.generated)
    ahead = torch.arange(1, depth + 2, device=batch.tokens.device)
    texts = batch.tokens.int().cpu().numpy()
    steps = tokens = 0
    by_depth = torch.zeros(depth, dtype=torch.int64)
    while (running := (roots < lasts).nonzero().squeeze(1)).numel():
        row, root, last = rows[running], roots[running], lasts[running]
        at = root.unsqueeze(1) + ahead
        written = batch.tokens[row.unsqueeze(1), at.clamp(max=texts.shape[1] - 1)]
        written = written.masked_fill(at > last.unsqueeze(1), -1)
        nothing = row.new_empty(len(row), 0, 0)
        explored = ExploredNodes(nothing, nothing, nothing.float())
        if search is not None:
            explored = search(row, root)
            if observe is not None:
                observe(explored, written[:, : explored.tokens.shape[1]])
            explored = replace(explored, log_probs=candidate_log_probs(explored, shape.tree))
        if shape.context_matches:
            places = texts, row.cpu().numpy(), (root + 1).cpu().numpy()
            explored = _with_matches(explored, places, shape, vocab_size, earlier)
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
    explored: ExploredNodes,
    texts: tuple[Array, Array, Array],
    shape: ReDrafterConfig,
    vocab_size: int,
    earlier: AnswerStore | None,
) -> ExploredNodes:
    """The search and the matches of A texts, each of which ends at its root; see `own_matches`."""
    paths, requests = (shape.context_matches, shape.path_length), len(texts[1])
    matches = own_matches(*texts, paths, vocab_size)
    prior = np.stack([prior_acceptance(shape.path_length)] * 2).astype(np.float32)
    if earlier is not None and shape.earlier_answers:
        alike = np.zeros(requests, dtype=np.int64), np.zeros(requests, dtype=np.bool_)
        matches = earlier.with_earlier(matches, texts, *alike, prior)
    device = explored.tokens.device
    of_search = explored.tokens, explored.back_pointers, explored.log_probs
    tokens, pointers, log_probs = (part.cpu().contiguous().numpy() for part in of_search)
    of_paths = matches.tokens.numpy(), matches.classes.numpy()
    found = joined_nodes(tokens, pointers, log_probs, *of_paths)
    *nodes, match_classes = (torch.from_numpy(part).to(device) for part in found)
    both = ExploredNodes(*nodes)
    scores = joint_scores(both, match_classes, torch.from_numpy(prior[0]).to(device))
    return replace(both, log_probs=scores)


def _accepted_depth(
    explored: ExploredNodes, roots: Tensor, written: Tensor, shape: ReDrafterConfig
) -> Tensor:
    """[A] draft tokens that a step accepts whose text goes on with `written` [A, depths]."""
    # Nodes off finished beams were left out before paths were joined.
    kind: TreeKind = "chain" if shape.tree == "chain" else "explored"
    tree = TokenTree.from_explored(roots, explored, shape.num_speculative_tokens, kind)
    # What the target draws at a node: right on the true path, and not read off it.
    sampled = written.gather(1, tree.depths.long())
    return accept_path(tree, sampled).num_sampled.long() - 1
