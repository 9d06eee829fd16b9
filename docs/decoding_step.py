# SPDX-License-Identifier: Apache-2.0
"""One decoding step of one request, as plain as it can be said: begin here to read this package.

The engines do the same for all requests at once, in kernels or compiled loops; tests hold them to
this text. It leaves out tree policies (`tree/policy.py`), matches of texts
(`tree/context_matches.py`) and which search and nodes are worth their time (`budget/`).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from vllm_redrafter.config import TOP_TOKENS, ReDrafterConfig
from vllm_redrafter.heads.head import SearchHead


class Node(NamedTuple):
    """A token that may follow. A tree is a list of nodes, the root first."""

    token: int
    parent: int
    """Its index; the root's is 0."""
    depth: int
    """0 for the root."""
    log_prob: float
    """The sum of the drafter's log-probabilities on the path, each normalised over its top 50."""


Tree = list[Node]
Sample = Callable[[Tensor, Sequence[int]], int]
"""From the logits [V] after the context, the root and these output tokens to the token drawn."""


class Target(Protocol):
    """The language model with its KV cache, of n tokens."""

    def forward(
        self, tokens: list[int], positions: list[int], visible: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run the model on rows that follow the cached tokens; append their K and V to the cache.

        `visible`, [rows, rows] bool, says which rows a row attends to, beside the n tokens.
        Returns logits [rows, V], and the hidden states that the drafter's `condition` reads.
        """

    def keep(self, rows: list[int]) -> None:
        """Compact the cache: of the rows read last, these stay, in this order."""

    def embed(self, token: int) -> Tensor:
        """[H], the input embedding."""


def step(
    target: Target, drafter: SearchHead, tree: Tree, n: int, shape: ReDrafterConfig, sample: Sample
) -> tuple[list[int], Tree]:
    """Verify a tree in one forward pass of the target, and draft the next one.

    Args:
        target, drafter: the models.
        tree: of the last draft. Its root is the last token of the output, not in the cache yet.
        n: the tokens in the target's cache.
        shape: K, W, L.
        sample: how the target draws a token.

    Returns:
        (the tokens that the step outputs, one at least; the tree of the next step).
    """
    # Each node is one row of the pass: slot n + index in the cache, position n + depth.
    tokens, positions = [node.token for node in tree], [n + node.depth for node in tree]
    logits, hidden = target.forward(tokens, positions, ancestors(tree))

    path, output = walk(tree, lambda node, text: sample(logits[node], text))

    # The K and V of the path move to slots n, n + 1, ..., where plain decoding would have put them.
    target.keep(path)

    explored = beam_search(drafter, target.embed, hidden[path[-1]], output[-1], shape)
    return output, best_nodes(explored, shape.num_speculative_tokens)


def ancestors(tree: Tree) -> Tensor:
    """[nodes, nodes] bool: what a node sees of the tree, its ancestors and itself."""
    visible = torch.eye(len(tree), dtype=torch.bool)
    for index, node in enumerate(tree[1:], 1):
        visible[index] |= visible[node.parent]
    return visible


def walk(tree: Tree, draw: Callable[[int, list[int]], int]) -> tuple[list[int], list[int]]:
    """Go from the root to the child that carries what the target draws, as long as there is one.

    `draw` gives the target's token at a node, after the tokens output so far. Each is drawn from
    the target's distribution given exactly the tokens before it. So the output is distributed as
    the target's, whatever the tree: it only decides which distributions this pass has computed.

    Returns:
        (the nodes walked, root first; the tokens drawn there, of which no child carries the last).
    """
    path, output = [0], [draw(0, [])]
    while True:
        here, drawn = path[-1], output[-1]
        children = (i for i, node in enumerate(tree) if i and node.parent == here)
        child = next((i for i in children if tree[i].token == drawn), None)
        if child is None:
            return path, output
        path.append(child)
        output.append(draw(child, output))


def beam_search(
    drafter: SearchHead,
    embed: Callable[[int], Tensor],
    hidden: Tensor,
    root: int,
    shape: ReDrafterConfig,
) -> Tree:
    """The root, and the nodes that a search keeps: W beams in each of L levels, best first.

    `hidden` are the target's states where it drew the root.
    """
    condition = drafter.condition(hidden)

    def embedded(token: int, depth: int) -> Any:
        return drafter.embedding_of(lambda _: embed(token), depth)(torch.tensor(token))

    start = drafter.start(condition, embedded(root, 0))
    nodes, states = [Node(root, 0, 0, 0.0)], [start]
    beams = [0]
    for depth in range(1, shape.beam_length + 1):
        found: Tree = []
        for beam in beams:
            logits = drafter.logits(condition, states[beam], depth - 1).float()
            best, ranked = logits.topk(min(TOP_TOKENS, len(logits)))
            log_probs = best.log_softmax(dim=0) + nodes[beam].log_prob  # of the 50 best alone
            pairs = zip(drafter.target_tokens(ranked).tolist(), log_probs.tolist(), strict=True)
            found += [Node(token, beam, depth, log_prob) for token, log_prob in pairs]
        found.sort(key=lambda node: -node.log_prob)
        grown = found[: shape.beam_width]
        beams = [*range(len(nodes), len(nodes) + len(grown))]
        nodes += grown
        for node in grown:
            of_token = embedded(node.token, depth)
            states.append(drafter.advance(states[node.parent], of_token, depth))
    return nodes


def best_nodes(explored: Tree, max_nodes: int) -> Tree:
    """The root and the most probable nodes, in descending order: every prefix is a tree.

    No node is more probable than its parent, and of equal ones the shallower comes first.
    """
    order = sorted(range(len(explored)), key=lambda i: -explored[i].log_prob)[: 1 + max_nodes]
    index = {i: place for place, i in enumerate(order)}
    return [explored[i]._replace(parent=index[explored[i].parent]) for i in order]
