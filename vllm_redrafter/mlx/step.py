# SPDX-License-Identifier: Apache-2.0
"""One decoding step: verify a tree, walk it, search the next one, in a single evaluation.

The forward pass, sampling, the walk, the search and the rows that compaction moves are one lazy
graph. So what is searched is planned before the step, and ranked on the host after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import mlx.core as mx

from vllm_redrafter.mlx.beam_search import Explored, beam_search
from vllm_redrafter.mlx.drafter import Drafter
from vllm_redrafter.mlx.sampling import NodeSampler
from vllm_redrafter.mlx.tree_cache import TreeCache, TreeInput
from vllm_redrafter.mlx.walk import accept_path
from vllm_redrafter.tree.policy import SearchShape
from vllm_redrafter.tree.token_tree import TokenTree


class Step(NamedTuple):
    """What a step found.

    Attributes:
        path: the nodes that were walked, root first.
        tokens: the target's at each of them: what is output.
        logprobs: [N, V], of all nodes.
        explored: of the search that the step ended with; None where it made none.
    """

    path: list[int]
    tokens: list[int]
    logprobs: mx.array
    explored: Explored | None


class StepRunner:
    """Runs the steps of one request, whose KV cache it moves on.

    Args:
        drafter: with its target.
        caches: of the target's layers.
        sampler: of the request.
        context: [T] integers, the tokens before the first root.
    """

    def __init__(
        self, drafter: Drafter, caches: Sequence[TreeCache], sampler: NodeSampler, context: mx.array
    ) -> None:
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
        """Verify a tree.

        Args:
            root: the last token of the text, which is not in the KV cache yet.
            tree: of one request; None for the root alone.
            shape: of the search behind the path; None for none.
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
        is_chain = depths == [*range(count)]
        rows = [] if is_chain else [cache.rows_of(accepted.path) for cache in self._caches]
        mx.eval(drawn, accepted, explored or (), rows)
        path = cast(list[int], accepted.path.tolist())[: int(cast(int, accepted.length.item()))]
        self._keep(rows, len(path))
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
        """What continues the root, lazily; None where no search is planned."""
        if shape is None or not shape.beam_length:
            return None
        assert self._head is not None
        return beam_search(self._head, self._target.embed, hidden, root, *shape)

    def _keep(self, rows: list[tuple[mx.array, ...]], count: int) -> None:
        """The first `count` nodes of the path are tokens now; a chain's stand where they belong."""
        for layer, cache in enumerate(self._caches):
            if rows:
                cache.keep(rows[layer], count)
            else:
                cache.keep_first(count)

    def _extend_context(self, tokens: mx.array) -> None:
        if self._sampler.needs_chain:
            self._context = mx.concatenate([self._context, tokens.astype(mx.uint32)])
