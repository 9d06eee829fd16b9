# SPDX-License-Identifier: Apache-2.0
"""Random searches, and random trees with what was sampled at their nodes."""

import math

import torch
from hypothesis import strategies as st
from torch import Tensor

from redrafter_testing.algorithm.tree_batches import grown_tree, token_trees
from vllm_redrafter.tree.beam_search import ExploredNodes
from vllm_redrafter.tree.token_tree import TokenTree

VOCAB, ROOT = 3, 100
NODES = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, VOCAB - 1)), max_size=14)
"""Of a tree, as `grown_tree` takes them."""
GARBAGE = st.integers(-(2**40), 2**40) | st.integers(-1, VOCAB)
# Sums of these stay exact in float32.
TIED_STEPS = st.sampled_from([0.0, -0.5, -1.0])
SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 5))


@st.composite
def explored_nodes(
    draw: st.DrawFn, shapes: st.SearchStrategy[tuple[int, int]] = SHAPES
) -> ExploredNodes:
    """Any search of up to 3 requests, of (length, width): many ties, dead slots at the end."""
    (length, width), vocab = draw(shapes), draw(st.integers(1, 3))
    requests = []
    for _ in range(draw(st.integers(1, 3))):
        levels: list[list[tuple[int, int, float]]] = []
        live = {0: 0.0}
        for level in range(length):
            candidates = [(slot, token) for slot in live for token in range(vocab)]
            most = min(width, len(candidates))
            least = min(most, draw(st.sampled_from([0, 1, 3, 5])))
            some = st.permutations(candidates).map(lambda c, most=most: c[:most])
            kept = draw(some)[: draw(st.integers(least, most))]
            row = [(token, slot, live[slot] + draw(TIED_STEPS)) for slot, token in kept]
            row.sort(key=lambda node: -node[2])
            while len(row) < width:
                above = draw(st.integers(0, width - 1)) if level else 0
                row.append((draw(st.integers(0, vocab - 1)), above, -math.inf))
            live = {slot: node[2] for slot, node in enumerate(row) if node[2] > -math.inf}
            levels.append(row)
        requests.append(levels)
    tokens, back_pointers, log_probs = torch.tensor(requests, dtype=torch.float64).unbind(-1)
    return ExploredNodes(tokens.long(), back_pointers.long(), log_probs.float())


def random_search(requests: int, length: int, width: int) -> ExploredNodes:
    """As a beam search finds them: children below their parents, some beams missing."""
    random = torch.Generator().manual_seed(requests)
    tokens = torch.randint(0, 1000, (requests, length, width), generator=random)
    back_pointers = torch.randint(0, width, (requests, length, width), generator=random)
    back_pointers[:, 0] = 0
    log_probs = torch.rand(requests, length, width, generator=random).log()
    if width > 2:
        log_probs[0, 0, 2] = -torch.inf
    for level in range(1, length):
        log_probs[:, level] += log_probs[:, level - 1].gather(1, back_pointers[:, level])
    return ExploredNodes(tokens, back_pointers, log_probs)


@st.composite
def scored_trees(draw: st.DrawFn) -> tuple[TokenTree, Tensor]:
    """Up to 3 trees, and what was sampled at their nodes; garbage in the unused slots.

    -1 is vLLM's placeholder of a token that is not there, and also fills unused slots.
    """
    trees = [grown_tree(drawn, ROOT) for drawn in draw(st.lists(NODES, min_size=1, max_size=3))]
    slots = max(len(tokens) for tokens, _ in trees) + draw(st.integers(0, 3))
    drawn = st.integers(-1, VOCAB - 1)
    sampled = [
        [draw(drawn if slot < len(tokens) else GARBAGE) for slot in range(slots)]
        for tokens, _ in trees
    ]
    tokens, parents = zip(*trees, strict=True)
    return token_trees(parents, slots, tokens), torch.tensor(sampled)
