"""The decoding steps of one request: verify a tree, walk it, search the next, in one evaluation.

A step's forward pass, sampling, walk, search and the rows that compaction moves are one lazy graph.
What is searched is therefore planned before the step, and ranked on the host after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import torch

from vllm_redrafter.budget.costs import CHAINS, PLAIN, TREES
from vllm_redrafter.budget.drafting import AdaptiveDrafting
from vllm_redrafter.mlx.beam_search import Explored, beam_search
from vllm_redrafter.mlx.drafter import Drafter
from vllm_redrafter.mlx.request_text import NAME, RequestText
from vllm_redrafter.mlx.sampling import NodeSampler
from vllm_redrafter.mlx.tree_cache import TreeCache, TreeInput
from vllm_redrafter.mlx.walk import accept_path
from vllm_redrafter.tree.acceptance import AcceptedPath
from vllm_redrafter.tree.policy import SearchShape

REQUEST = [NAME]


class Token(NamedTuple):
    """Of an answer.

    Attributes:
        logprobs: [V], what it was drawn from.
        from_draft: it was in a tree.
    """

    id: int
    logprobs: mx.array
    from_draft: bool


class Step(NamedTuple):
    """What a step found.

    Attributes:
        path: the nodes that were walked, root first.
        sampled: [N] int32, the target's token at each node.
        logprobs: [N, V].
        explored: of the search that the step ended with; None where it made none.
    """

    path: list[int]
    sampled: list[int]
    logprobs: mx.array
    explored: Explored | None


class Decoder:
    """Decodes a prompt whose tokens but the last are in the KV cache."""

    def __init__(
        self,
        drafter: Drafter,
        caches: Sequence[TreeCache],
        prompt: Sequence[int],
        sampler: NodeSampler,
    ) -> None:
        self._drafter, self._caches, self._sampler = drafter, list(caches), sampler
        self._drafting = drafter.drafting
        self._text = RequestText(prompt, drafter.config, drafter.target.vocab_size)
        # What logits processors see: the tokens before the root.
        self._context = mx.array(prompt[:-1], mx.uint32)
        self._root, self._tree = prompt[-1], None
        self._kind = PLAIN
        self._samples = np.array([not sampler.is_greedy])
        self._chain = torch.ones(1, dtype=torch.bool) if sampler.needs_chain else None

    def tokens(self, most: int) -> Iterator[Token]:
        """The answer, of at most so many tokens."""
        left = most
        while left > 0:
            is_settled = self._tree is None and self._drafting.skips_draft(
                REQUEST, self._max_nodes(left)
            )
            for token in self._plain_steps(left) if is_settled else self._step(left):
                left -= 1
                yield token

    def _max_nodes(self, left: int) -> int:
        """Of a tree that the step after the next one verifies: a step outputs one token at least,
        and one behind the nodes."""
        return min(self._drafter.config.num_speculative_tokens, left - 2)

    # Steps that verify a tree, or draft

    def _step(self, left: int) -> list[Token]:
        started = perf_counter()
        shape = self._plan(left)
        step = self._verify(shape)
        ids = [step.sampled[node] for node in step.path]
        self._judge(step)
        verified = 1 if self._tree is None else int(self._tree.num_nodes[0])
        self._extend_context(mx.array([self._root, *ids[:-1]], mx.uint32))
        self._append(ids)
        kind, self._tree = self._kind, None
        if shape is not None and left > len(ids):
            self._draft(step.explored, shape, left - len(ids))
        self._drafting.stepped(kind, 1, verified, perf_counter() - started - self._usual(shape))
        return [
            Token(token, step.logprobs[node], at + 1 < len(ids))
            for at, (token, node) in enumerate(zip(ids, step.path, strict=True))
        ]

    def _plan(self, left: int) -> SearchShape | None:
        """What the next step drafts; None for nothing."""
        nodes = self._max_nodes(left)
        if nodes < 1 or not self._drafting.pays(REQUEST, self._samples, nodes):
            return None
        return self._drafting.shape(nodes)

    def _usual(self, shape: SearchShape | None) -> float:
        """Seconds of a step that are its draft's: the graph is one, and nobody can time a part."""
        if shape is None or not isinstance(self._drafting, AdaptiveDrafting):
            return 0.0
        times = self._drafting.planner.times
        return times.draft_seconds(shape, 1) * times.pace

    def _verify(self, shape: SearchShape | None) -> Step:
        """The target's pass over the tree, and what follows from it, evaluated."""
        nodes, tree = [self._root], None
        if self._tree is not None:
            count = int(self._tree.num_nodes[0])
            nodes = self._tree.tokens[0, :count].tolist()
            tree = TreeInput(self._tree.parents[0, :count].numpy()) if count > 1 else None
        start, tokens = self._caches[0].length, mx.array(nodes)
        logits, hidden = self._drafter.target.forward(tokens, self._caches, tree)
        depths = [0] if tree is None else tree.depths.tolist()
        at = [start + depth for depth in depths]
        sampled, logprobs = self._sampler.sample(logits, at, self._context, tokens)
        if tree is None:
            explored = self._search(hidden[0], sampled[0], shape)
            mx.eval(sampled, explored or ())
            return Step([0], sampled.tolist(), logprobs, explored)
        parents = mx.array(self._tree.parents[0, : len(nodes)].numpy())
        walk = tokens, parents, mx.array(tree.depths), mx.array(tree.sees), sampled
        accepted = accept_path(*walk, max(depths))
        last = accepted.last_node
        explored = self._search(hidden[last], sampled[last], shape)
        is_chain = depths == [*range(len(nodes))]
        rows = [] if is_chain else [cache.rows_of(accepted.path) for cache in self._caches]
        mx.eval(sampled, accepted, explored or (), rows)
        length = int(accepted.length.item())
        for layer, cache in enumerate(self._caches):
            if is_chain:
                cache.keep_first(length)
            else:
                cache.keep(rows[layer], length)
        return Step(accepted.path.tolist()[:length], sampled.tolist(), logprobs, explored)

    def _search(
        self, hidden: mx.array, root: mx.array, shape: SearchShape | None
    ) -> Explored | None:
        """What continues the root, lazily; None where no search is planned."""
        if shape is None or not shape.beam_length:
            return None
        head, target = self._drafter.head, self._drafter.target
        assert head is not None
        return beam_search(head, target.embed, hidden, root, *shape)

    def _judge(self, step: Step) -> None:
        """Learn from the walk."""
        tree, length = self._tree, len(step.path)
        if tree is None:
            return
        slots, nodes = tree.tokens.shape[1], int(tree.num_nodes[0])
        path = torch.full((1, slots), -1)
        path[0, :length] = torch.tensor(step.path)
        output = torch.full((1, slots), -1, dtype=torch.int32)
        output[0, :length] = torch.tensor([step.sampled[node] for node in step.path])
        lengths = torch.tensor([length], dtype=torch.int32)
        accepted = AcceptedPath(output, lengths, path, torch.tensor([step.path[-1]]))
        self._drafting.judge(REQUEST, self._samples, tree, accepted)
        drafted = np.array([nodes - 1])
        self._drafter.stats.count_drafts(drafted)
        self._drafter.stats.count_sampled(drafted, lengths.numpy())

    def _draft(self, explored: Explored | None, shape: SearchShape, left: int) -> None:
        """Build the tree that the next step verifies, of what the last one searched."""
        most = min(self._drafter.config.num_speculative_tokens, left - 1)
        if most < 1:
            return
        roots = torch.tensor([self._root])
        given = REQUEST, explored, roots, self._chain, np.array([most])
        self._tree = self._drafting.draft(*given, self._text.matches())
        self._drafting.took(1, self._usual(shape))
        self._kind = CHAINS if shape.beam_width == 1 or self._chain is not None else TREES

    def _append(self, ids: list[int]) -> None:
        """Tokens are output; the last one is the next root."""
        self._text.append(ids)
        self._root = ids[-1]

    def _extend_context(self, tokens: mx.array) -> None:
        if self._sampler.needs_chain:
            self._context = mx.concatenate([self._context, tokens.astype(mx.uint32)])

    # Plain steps

    def _plain_steps(self, left: int) -> Iterator[Token]:
        """Decode without drafts while that is settled, each pass begun before the last one's token
        is read, as mlx-lm does."""
        started = perf_counter()
        following = self._begin_plain(mx.array([self._root]))
        while following is not None:
            token, logprobs = following
            left -= 1
            goes_on = left > 0 and self._drafting.skips_draft(REQUEST, self._max_nodes(left))
            following = self._begin_plain(token) if goes_on else None
            self._append([token.item()])
            self._drafter.stats.undrafted_steps += 1
            self._drafting.stepped(PLAIN, 1, 1, perf_counter() - started)
            yield Token(self._root, logprobs[0], False)
            started = perf_counter()

    def _begin_plain(self, root: mx.array) -> tuple[mx.array, mx.array]:
        """The token [1] behind a root [1], and its log-probabilities [1, V], being computed."""
        at = [self._caches[0].length]
        logits, _ = self._drafter.target.forward(root, self._caches)
        token, logprobs = self._sampler.sample(logits, at, self._context, root)
        self._extend_context(root)
        mx.async_eval(token)
        return token, logprobs
