# SPDX-License-Identifier: Apache-2.0
"""One decoding step: verify a tree, walk it, search the next one, in a single evaluation.

The forward pass, sampling, the walk, the search and the rows that compaction moves are one lazy
graph. So what is searched is planned before the step, and ranked on the host after it.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import mlx.core as mx

from vllm_redrafter.mlx.beam_search import Explored, beam_search
from vllm_redrafter.mlx.drafter import Drafter
from vllm_redrafter.mlx.sampling import NodeSampler
from vllm_redrafter.mlx.tree_cache import TreeCache, TreeInput
from vllm_redrafter.tree.policy import SearchShape
from vllm_redrafter.tree.token_tree import TokenTree


class Step(NamedTuple):
    """Accepted nodes, root first; the target's tokens there; log-probabilities [N, V] of all nodes;
    and what the search at the end of the step explored, if there was one."""

    path: list[int]
    tokens: list[int]
    logprobs: mx.array
    explored: Explored | None


class AcceptedPath(NamedTuple):
    """All int32: accepted nodes [D+1], root first and filled with the last one; their number []."""

    path: mx.array
    length: mx.array
    last_node: mx.array


def accept_path(
    tokens: mx.array,
    parents: mx.array,
    depths: mx.array,
    sees: mx.array,
    sampled: mx.array,
    max_depth: int,
) -> AcceptedPath:
    """Walk a tree along the target's samples, lazily; `tree/acceptance.py` is the torch form.

    Args:
        tokens, parents, depths: [N] integers; node 0 is the root and its own parent. Siblings
            carry different tokens.
        sees: [N, N] bool, entry (i, j): j is i or an ancestor of i.
        sampled: [N] integers, the target's token at each node.
        max_depth: D, the largest depth or more.
    """
    matches = (tokens == sampled[parents]) | (depths == 0)
    # A node is walked through if it and all its ancestors match what their parents sampled: of
    # each depth there is one at most.
    walked = mx.all(matches | ~sees, axis=1)
    length = walked.sum()
    last_node = mx.argmax(mx.where(walked, depths, -1)).astype(mx.int32)
    steps = mx.arange(max_depth + 1, dtype=mx.int32)
    at_depth = mx.argmax(walked & (depths == steps[:, None]), axis=1).astype(mx.int32)
    return AcceptedPath(mx.where(steps < length, at_depth, last_node), length, last_node)


class StepRunner:
    """Runs the steps of one request, whose KV cache it moves on."""

    def __init__(
        self, drafter: Drafter, caches: Sequence[TreeCache], sampler: NodeSampler, context: mx.array
    ) -> None:
        """`context`: [T] integers, the tokens before the first root."""
        self._target, self._head = drafter.target, drafter.head
        self._caches, self._sampler, self._context = list(caches), sampler, context

    def begin_plain(self, root: mx.array) -> tuple[mx.array, mx.array]:
        """The token [1] behind a root [1], and its log-probabilities [V], being computed."""
        logits, _ = self._target.forward(root, self._caches)
        token, logprobs = self._sample(logits, [self._length - 1], root)
        self._extend_context(root)
        row = logprobs[0]
        # Both: what is read of a row that is left lazy would wait behind the next pass.
        mx.async_eval(token, row)  # type: ignore[no-untyped-call]
        return token, row

    def verify(self, root: int, tree: TokenTree | None, shape: SearchShape | None) -> Step:
        """Verify a tree of one request, or the root alone; then search by `shape`, if any.

        The root is the last token of the text, which is not in the KV cache yet.
        """
        count = 1 if tree is None else int(tree.num_nodes[0])
        if tree is None or count == 1:
            return self._verify_root(mx.array([root]), shape)
        nodes = mx.array(tree.tokens[0, :count].tolist())
        parents = tree.parents[0, :count].numpy()
        seen = TreeInput(parents)
        start, depths = self._length, seen.depths.tolist()
        logits, hidden = self._target.forward(nodes, self._caches, seen)
        drawn, logprobs = self._sample(logits, [start + depth for depth in depths], nodes)
        walk = nodes, mx.array(parents), mx.array(seen.depths), mx.array(seen.sees), drawn
        accepted = accept_path(*walk, max(depths))
        last = accepted.last_node
        explored = self._search(hidden[last], drawn[last], shape)
        is_chain = depths == [*range(count)]  # its accepted rows already lie in order
        rows = [None if is_chain else cache.rows_of(accepted.path) for cache in self._caches]
        mx.eval(drawn, accepted, explored or (), rows)
        path = cast(list[int], accepted.path.tolist())[: int(cast(int, accepted.length.item()))]
        for cache, its_rows in zip(self._caches, rows, strict=True):
            cache.keep(its_rows, len(path))
        self._extend_context(nodes[mx.array(path)])
        tokens = cast(list[int], drawn.tolist())
        return Step(path, [tokens[node] for node in path], logprobs, explored)

    def _verify_root(self, root: mx.array, shape: SearchShape | None) -> Step:
        logits, hidden = self._target.forward(root, self._caches)
        drawn, logprobs = self._sample(logits, [self._length - 1], root)
        explored = self._search(hidden[0], drawn[0], shape)
        mx.eval(drawn, explored or ())
        self._extend_context(root)
        return Step([0], cast(list[int], drawn.tolist()), logprobs, explored)

    @property
    def _length(self) -> int:
        """Tokens in the KV cache; in the middle of a plain pass its own, too."""
        return self._caches[0].length

    def _sample(
        self, logits: mx.array, positions: list[int], nodes: mx.array
    ) -> tuple[mx.array, mx.array]:
        return self._sampler.sample(logits, positions, self._context, nodes)

    def _search(
        self, hidden: mx.array, root: mx.array, shape: SearchShape | None
    ) -> Explored | None:
        if shape is None or not shape.beam_length:
            return None
        assert self._head is not None
        return beam_search(self._head, self._target.embed, hidden, root, *shape)

    def _extend_context(self, tokens: mx.array) -> None:
        if self._sampler.needs_chain:
            self._context = mx.concatenate([self._context, tokens.astype(mx.uint32)])
