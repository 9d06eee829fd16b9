# SPDX-License-Identifier: Apache-2.0
"""The decoding of one request: what each step verifies, and what is learned from it."""

from collections.abc import Iterator, Sequence
from itertools import islice
from time import perf_counter
from typing import NamedTuple, cast

import mlx.core as mx
import numpy as np
import torch

from vllm_redrafter.budget.costs import CHAINS, PLAIN, TREES
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.drafting.own_matches import own_matches
from vllm_redrafter.mlx.drafter import Drafter
from vllm_redrafter.mlx.sampling import NodeSampler
from vllm_redrafter.mlx.step import Step, StepRunner
from vllm_redrafter.mlx.tree_cache import TreeCache
from vllm_redrafter.tree.acceptance import AcceptedPath
from vllm_redrafter.tree.context_matches import ContextMatches
from vllm_redrafter.tree.policy import SearchShape
from vllm_redrafter.tree.token_tree import TokenTree

REQUEST = [""]
"""Names of the requests: there is one."""


class _RequestText:
    """The tokens of a prompt and of its answer so far."""

    def __init__(self, prompt: Sequence[int], config: ReDrafterConfig, vocab_size: int) -> None:
        self._tokens = np.array([prompt], dtype=np.int32)
        self._length = len(prompt)
        self._paths = config.context_matches, config.path_length
        self._vocab_size = vocab_size

    def append(self, tokens: Sequence[int]) -> None:
        end = self._length + len(tokens)
        if end > self._tokens.shape[1]:
            self._tokens = np.pad(self._tokens, ((0, 0), (0, end)))
        self._tokens[0, self._length : end] = tokens
        self._length = end

    def matches(self) -> ContextMatches | None:
        """Prompt-lookup (n-gram) matches of the last tokens; None where they are off."""
        if not self._paths[0]:
            return None
        text = self._tokens, np.zeros(1, int), np.array([self._length])
        return own_matches(*text, self._paths, self._vocab_size)


class Token(NamedTuple):
    """One token of an answer, and the log-probabilities [V] that it was drawn from."""

    id: int
    logprobs: mx.array
    from_draft: bool


class Decoder:
    """Decodes a prompt whose tokens but the last are in the KV cache."""

    def __init__(
        self,
        drafter: Drafter,
        caches: Sequence[TreeCache],
        cached_text: Sequence[int],
        prompt: Sequence[int],
        sampler: NodeSampler,
    ) -> None:
        self._config, self._drafting, self._stats = drafter.config, drafter.drafting, drafter.stats
        text = [*cached_text, *prompt]
        context = mx.array(text[:-1], mx.uint32)
        self._runner = StepRunner(drafter, caches, sampler, context)
        self._text = _RequestText(text, drafter.config, drafter.target.vocab_size)
        self._root, self._tree, self._kind = prompt[-1], cast(TokenTree | None, None), PLAIN
        # Of the next step's draft; None for none, or where it is not planned yet.
        self._shape: SearchShape | None = None
        self._samples = np.array([not sampler.is_greedy])
        self._chain = torch.ones(1, dtype=torch.bool) if sampler.needs_chain else None

    def tokens(self, max_tokens: int) -> Iterator[Token]:
        """The answer, of at most so many tokens."""
        left = max_tokens
        try:
            while left > 0:
                output = self._plain_steps(left) if self._is_plain(left) else self._step(left)
                for token in islice(output, left):
                    left -= 1
                    yield token
        finally:
            self._drafting.forget(*REQUEST)

    def _is_plain(self, left: int) -> bool:
        """Is it settled that the next step neither verifies a tree nor drafts?"""
        if self._tree is not None or self._shape is not None:
            return False
        nodes = self._max_nodes(left)
        if not nodes or self._drafting.skips_draft(REQUEST, nodes):
            return True
        self._plan(nodes)
        return self._shape is None

    def _max_nodes(self, left: int) -> int:
        """Of the tree of the step after next; 0 if that step can output one token at most."""
        return self._config.num_speculative_tokens if left > 2 else 0

    def _plain_steps(self, left: int) -> Iterator[Token]:
        """Decode without drafts, each pass begun before the last one's token is read."""
        started = perf_counter()
        following: tuple[mx.array, mx.array] | None
        following = self._runner.begin_plain(mx.array([self._root]))
        while following is not None:
            token, logprobs = following
            left -= 1
            goes_on = left > 0 and self._is_plain(left)
            following = self._runner.begin_plain(token) if goes_on else None
            self._append([cast(int, token.item())])
            self._stats.undrafted_steps += 1
            self._drafting.record_step_time((PLAIN, 1, 1), 1, perf_counter() - started, 0.0)
            yield Token(self._root, logprobs, False)
            started = perf_counter()

    def _step(self, left: int) -> list[Token]:
        """Verify what was drafted, and draft again if that pays."""
        started = perf_counter()
        if self._tree is not None:
            self._plan(self._max_nodes(left))
        shape, self._shape = self._shape, None
        step = self._runner.verify(self._root, self._tree, shape)
        kind, rows = self._judge(step)
        self._append(step.tokens)
        self._tree = None
        if shape is not None and (nodes := self._max_nodes(left - len(step.tokens) + 1)):
            self._draft(step, shape, nodes)
        self._stats.undrafted_steps += shape is None
        seconds = perf_counter() - started
        draft = seconds * self._draft_share(kind, rows, shape)
        if self._tree is not None:
            self._drafting.record_draft_time(draft)
        if kind != PLAIN:  # a step without a tree that drafts is no plain step either
            self._drafting.record_step_time((kind, 1, rows), len(step.tokens), seconds, draft)
        return [
            Token(token, step.logprobs[node], at + 1 < len(step.path))
            for at, (token, node) in enumerate(zip(step.tokens, step.path, strict=True))
        ]

    def _append(self, tokens: list[int]) -> None:
        self._text.append(tokens)
        self._root = tokens[-1]

    def _plan(self, nodes: int) -> None:
        """Choose the next step's draft, of at most so many nodes."""
        self._shape = self._drafting.plan(REQUEST, self._samples, nodes, nodes) if nodes else None

    def _draft(self, step: Step, shape: SearchShape, nodes: int) -> None:
        """Build the tree that the next step verifies, from this step's search."""
        self._tree = self._drafting.draft(
            step.explored,
            torch.tensor([self._root]),
            self._chain,
            np.array([nodes]),
            shape,
            self._text.matches(),
        )
        parents = self._tree.parents[0, 1 : int(self._tree.num_nodes[0])]
        line = torch.arange(len(parents), dtype=parents.dtype)
        self._kind = CHAINS if parents.equal(line) else TREES

    def _draft_share(self, kind: int, rows: int, shape: SearchShape | None) -> float:
        """Of a step's time, by the planner: a step is one evaluation, whose parts have no clock."""
        planner = self._drafting.planner
        if shape is None or planner is None:
            return 0.0
        times = planner.times
        draft = times.draft_seconds(shape, 1)
        return draft / (draft + float(times.step_seconds(kind, 1)[rows]))

    def _judge(self, step: Step) -> tuple[int, int]:
        """Learn from the accepted path; returns the kind of the step, and its rows."""
        tree, length = self._tree, len(step.path)
        rows = 1 if tree is None else int(tree.num_nodes[0])
        if tree is None or rows == 1:
            return PLAIN, 1
        slots = tree.tokens.shape[1]
        path = torch.full((1, slots), -1)
        path[0, :length] = torch.tensor(step.path)
        output = torch.full((1, slots), -1, dtype=torch.int32)
        output[0, :length] = torch.tensor(step.tokens)
        lengths = torch.tensor([length], dtype=torch.int32)
        accepted = AcceptedPath(output, lengths, path, path[:, length - 1])
        self._drafting.observe(REQUEST, self._samples, tree, accepted)
        drafted = np.array([rows - 1])
        self._stats.count(drafted, lengths.numpy())
        return self._kind, rows
