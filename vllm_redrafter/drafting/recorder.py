# SPDX-License-Identifier: Apache-2.0
"""What one request's drafts had, and what became of them; for `trace`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

from vllm_redrafter.drafting.joining import DraftNodes
from vllm_redrafter.tree.acceptance import AcceptedPath
from vllm_redrafter.tree.context_matches import LENGTH_CLASSES
from vllm_redrafter.tree.token_tree import TokenTree


@dataclass
class RecordedNode:
    """A candidate of a draft.

    Attributes:
        token: its id.
        parent: index of the node above; the root is node 0, its own parent.
        depth: 0 for the root.
        probability: the drafter's, given the parent; None where the drafter has no such node.
        match_length: of the n-gram match that the node continues; 0 for none.
        verified: the target read it.
        accepted: it is on the path that the target sampled.
    """

    token: int
    parent: int
    depth: int
    probability: float | None
    match_length: int
    verified: bool = False
    accepted: bool = False


@dataclass(frozen=True)
class RecordedStep:
    """A step of the engine: its draft's nodes, parents before children, and what it gave.

    `seconds` are those since the end of the step before, or since the recording began;
    `expected_tokens` are the output's as the budget expected it: 1 where nothing was drafted.
    """

    nodes: list[RecordedNode]
    output_tokens: list[int]
    seconds: float
    expected_tokens: float = 1.0


@dataclass
class DraftRecorder:
    """Records the steps of an engine that has one request at a time."""

    steps: list[RecordedStep] = field(default_factory=list)
    _nodes: list[RecordedNode] = field(default_factory=list)
    _expected: float = 1.0
    _last: float = field(default_factory=perf_counter)

    def drafted(self, root: int, candidates: DraftNodes, expected_tokens: float) -> None:
        """Begin a step; `expected_tokens` are 0 where nothing of the draft will be verified."""
        nodes = _candidate_nodes(root, candidates)
        self._nodes = nodes if len(nodes) > 1 else []
        self._expected = max(expected_tokens, 1.0)

    def verified(self, tree: TokenTree, accepted: AcceptedPath) -> None:
        """End a step that verified the draft; R = 1."""
        _mark_verified(self._nodes, tree, accepted)
        self.stepped(accepted.output_tokens[0, : int(accepted.num_sampled[0])].tolist())

    def stepped(self, output_tokens: Sequence[int]) -> None:
        now = perf_counter()
        step = RecordedStep(self._nodes, list(output_tokens), now - self._last, self._expected)
        self.steps.append(step)
        self._nodes, self._expected, self._last = [], 1.0, now


def _candidate_nodes(root: int, candidates: DraftNodes) -> list[RecordedNode]:
    tokens, pointers, log_probs, classes = (part[0].tolist() for part in candidates)
    nodes = [RecordedNode(root, 0, 0, None, 0, verified=True, accepted=True)]
    above: dict[int, int] = {}
    for level, row in enumerate(tokens):
        here = {}
        for beam, token in enumerate(row):
            log_prob, matched = log_probs[level][beam], classes[level][beam]
            pointer = pointers[level][beam]
            parent = above.get(pointer, -1) if level else 0
            if parent < 0 or (log_prob == -math.inf and not matched):
                continue
            probability = None
            if log_prob > -math.inf:
                before = log_probs[level - 1][pointer] if level else 0.0
                probability = min(math.exp(log_prob - before), 1.0)
            here[beam] = len(nodes)
            length = (matched - 1) % LENGTH_CLASSES + 1 if matched else 0
            nodes.append(RecordedNode(token, parent, level + 1, probability, length))
        above = here
    return nodes


def _mark_verified(nodes: list[RecordedNode], tree: TokenTree, accepted: AcceptedPath) -> None:
    found = {(node.parent, node.token): i for i, node in enumerate(nodes) if i}
    walked = set(accepted.path[0].tolist())
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    at = [0]
    for slot in range(1, int(tree.num_nodes[0])):
        at.append(found.get((at[parents[slot]], tokens[slot]), -1))
        if at[slot] >= 0:
            nodes[at[slot]].verified = True
            nodes[at[slot]].accepted = slot in walked
