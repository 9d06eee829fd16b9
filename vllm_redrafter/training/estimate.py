"""Tokens per target step, estimated offline: no engine, only text that the target wrote.

The acceptance walk follows what the target draws, and the text is what it drew: the token drawn
at a node of the true path is the next token of the text. So the engine's steps can be replayed:
search, build the tree, walk it along the text, go on after the accepted tokens, search again. For
greedy text this is what the engine does, step by step; for sampled text it is a fair sample of
it, with the sampling parameters that the text was written with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from vllm_redrafter.budget.match_acceptance import prior_acceptance
from vllm_redrafter.config import ReDrafterConfig, TreeKind
from vllm_redrafter.data.rows import TextRows
from vllm_redrafter.heads.head import DraftHead
from vllm_redrafter.training.batches import TextBatch, batches_by_length
from vllm_redrafter.training.distillation import predictions
from vllm_redrafter.training.target import TargetOutputs, read_target
from vllm_redrafter.tree.acceptance import accept_path
from vllm_redrafter.tree.beam_search import ExploredNodes, beam_search
from vllm_redrafter.tree.context_matches import find_matches, with_matches
from vllm_redrafter.tree.policy import candidate_log_probs, search_shape
from vllm_redrafter.tree.token_tree import TokenTree

Observer = Callable[[ExploredNodes, TextBatch, Tensor, Tensor], None]
"""Is told of a step: the searches, the text, and their roots, tokens[row, root], both [A] int64."""

Draft = Callable[[Tensor, Tensor], ExploredNodes]
"""What may be in the trees of the roots tokens[row, root], both [A] int64."""


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
    by_depth: tuple[int, ...] = field(default=())

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
    config: ReDrafterConfig,
    batch_size: int = 64,
    observe: Observer | None = None,
    matches: bool = False,
) -> Acceptance:
    """Replay the decoding of target-written text.

    Args:
        drafter: the draft head.
        target: the transformers model that wrote the text.
        rows: the text; each run of generated tokens is one answer.
        config: beam width, beam length, K and kind of tree.
        batch_size: rows read by the target at once.
        observe: is told of each step's searches.
        matches: beside the drafter's nodes, continuations found in the text.
    """
    total = Acceptance(0, 0)
    embed = target.get_input_embeddings()
    for batch in batches_by_length(rows, batch_size, embed.weight.device):
        outputs = read_target(target, batch, drafter.config.target_layers)
        total += replay(drafter, embed, outputs, batch, config, observe, matches)
    return total


def estimate_matches_alone(
    rows: TextRows, config: ReDrafterConfig, vocab_size: int, batch_size: int = 64
) -> Acceptance:
    """Replay the decoding of text without a drafter, by what its own text went on with before.

    Args:
        rows: the text; each run of generated tokens is one answer.
        config: K, and how many continuations.
        vocab_size: the target's.
        batch_size: rows replayed at once.
    """
    total = Acceptance(0, 0)
    for batch in batches_by_length(rows, batch_size, "cpu"):

        def draft(block: Tensor, at: Tensor, text: Tensor = batch.tokens) -> ExploredNodes:
            nothing = block.new_empty(len(block), 0, 0)
            explored = ExploredNodes(nothing, nothing, nothing.float())
            return _with_matches(explored, text[block], at, config, vocab_size)

        total += _replayed(batch, config, config.path_length, draft)
    return total


def replay(
    drafter: DraftHead,
    embed: Callable[[Tensor], Tensor],
    outputs: TargetOutputs,
    batch: TextBatch,
    config: ReDrafterConfig,
    observe: Observer | None = None,
    matches: bool = False,
) -> Acceptance:
    """Decode all answers at once by jumps, as the engine would.

    The first token of an answer comes from the prefill; the steps that follow output the rest.
    As in the engine, the last step's tokens beyond the end of the answer do not count.

    Args:
        drafter: the draft head.
        embed: the target's input embedding.
        outputs: the target's, for `batch`.
        batch: B blocks; each run of generated tokens has at least one token before it.
        config: beam width, beam length, K and kind of tree.
        observe: is told of each step's searches.
        matches: beside the drafter's nodes, continuations found in the text.
    """
    # The target may be of lower precision than a drafter in training.
    dtype = drafter.dtype
    hidden = outputs.hidden.to(dtype)
    shape = search_shape(config, config.num_speculative_tokens)
    vocab_size = drafter.config.vocab_size

    def embed_as_drafter(tokens: Tensor) -> Tensor:
        return embed(tokens).to(dtype)

    def draft(block: Tensor, at: Tensor) -> ExploredNodes:
        roots = batch.tokens[block, at]
        explored = beam_search(
            drafter,
            embed_as_drafter,
            hidden[block, at - 1],
            roots,
            *shape,
            candidates=config.candidates,
        )
        if observe is not None:
            observe(explored, batch, block, at)
        allowed = replace(explored, log_probs=candidate_log_probs(explored, config.tree))
        if not matches:
            return allowed
        return _with_matches(allowed, batch.tokens[block], at, config, vocab_size)

    depth = max(config.beam_length, config.path_length if matches else 0)
    return _replayed(batch, config, depth, draft)


def _replayed(batch: TextBatch, config: ReDrafterConfig, depth: int, draft: Draft) -> Acceptance:
    """Decode all answers of a batch with drafts of up to `depth` tokens."""
    row, root, last = answers(batch.generated)
    steps = tokens = 0
    by_depth = torch.zeros(depth, dtype=torch.int64)
    while (running := (root < last).nonzero().squeeze(1)).numel():
        block, at, end = row[running], root[running], last[running]
        accepted = _accepted_depth(draft(block, at), batch.tokens, block, at, end, config)
        output = torch.minimum(accepted + 1, end - at)
        root[running] += output
        steps, tokens = steps + running.numel(), tokens + int(output.sum())
        reached = torch.bincount(accepted.cpu(), minlength=depth + 1)
        by_depth += reached.flip(0).cumsum(0).flip(0)[1:]
    return Acceptance(steps, tokens, tuple(by_depth.tolist()))


def _with_matches(
    explored: ExploredNodes, text: Tensor, root: Tensor, config: ReDrafterConfig, vocab_size: int
) -> ExploredNodes:
    """The search and what the text [A, T] up to the roots went on with before."""
    sizes = config.context_matches, config.path_length
    matches = find_matches(text, root + 1, *sizes, vocab_size)
    prior = torch.from_numpy(prior_acceptance(config.path_length)).float().to(text.device)
    return with_matches(explored, matches, prior)


def answers(generated: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Runs of generated tokens in [B, T]: their block, first and last position, each [A] int64."""
    edge = generated.new_zeros(generated.shape[0], 1)
    before = torch.cat([edge, generated[:, :-1]], dim=1)
    after = torch.cat([generated[:, 1:], edge], dim=1)
    row, first = (generated & ~before).nonzero().unbind(1)
    last = (generated & ~after).nonzero()[:, 1]
    # A token without one before it has no hidden state that predicted it.
    return row, first.clamp(min=1), last


def _accepted_depth(
    explored: ExploredNodes,
    tokens: Tensor,
    row: Tensor,
    root: Tensor,
    last: Tensor,
    config: ReDrafterConfig,
) -> Tensor:
    """How many draft tokens [A] one step accepts from the roots at tokens[row, root]."""
    # Nodes off finished beams are left out before paths are joined.
    kind: TreeKind = "chain" if config.tree == "chain" else "explored"
    most = config.num_speculative_tokens
    tree = TokenTree.from_explored(tokens[row, root], explored, most, kind)
    # What the target draws at a node: right on the true path, and not read off it.
    following = root.unsqueeze(1) + tree.depths.long() + 1
    sampled = tokens[row.unsqueeze(1), following.clamp(max=tokens.shape[1] - 1)]
    sampled = sampled.masked_fill(following > last.unsqueeze(1), -1)
    return accept_path(tree, sampled).num_sampled.long() - 1


@torch.no_grad()
def top_accuracy(
    drafter: DraftHead, target: Any, rows: TextRows, num_steps: int, ranks: tuple[int, ...]
) -> Tensor:
    """How often the text's token is among the drafter's best, teacher-forced.

    Args:
        drafter: the draft head.
        target: the transformers model that wrote the text.
        rows: the text.
        num_steps: L.
        ranks: k of each top-k.

    Returns:
        [L, ranks] shares; NaN for a step that no position counts for.
    """
    hits = torch.zeros(num_steps, len(ranks))
    counts = torch.zeros(num_steps, 1)
    device = target.get_input_embeddings().weight.device
    for batch in batches_by_length(rows, 8, device, num_steps + 2):
        outputs = read_target(target, batch, drafter.config.target_layers)
        found = predictions(drafter, batch.generated, outputs, num_steps)
        labels = batch.tokens.flatten()[found.start + found.step + 1]
        for depth in range(num_steps):
            of_depth = (found.step == depth + 1).nonzero().squeeze(1)
            counts[depth] += len(of_depth)
            for part in torch.split(of_depth, 1024):
                logits = drafter.vocabulary_layer(depth)(found.features[part])
                kept = min(max(ranks), logits.shape[-1])
                best = drafter.target_tokens(logits.topk(kept, dim=-1).indices)
                hit = best == labels[part].unsqueeze(1)
                for column, rank in enumerate(ranks):
                    hits[depth, column] += int(hit[:, :rank].any(dim=1).sum())
    return hits / counts
