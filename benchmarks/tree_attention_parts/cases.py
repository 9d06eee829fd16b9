"""What tree attention is measured on: head shapes, random trees, byte counts. No Triton, no GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from vllm_redrafter.config import MAX_NODES, TOP_TOKENS, TreeKind
from vllm_redrafter.tree.beam_search import ExploredNodes, log_softmax_of_top
from vllm_redrafter.tree.token_tree import TokenTree

BEAM_LENGTH = 5
INT_BYTES = 4
BLOCK_SIZE = 16
SEED = 0


@dataclass(frozen=True)
class Heads:
    """A target's attention heads: query heads, KV heads, head dimension."""

    name: str
    query: int
    kv: int
    dim: int


HEADS = {
    heads.name: heads for heads in (Heads("llama-7b", 32, 32, 128), Heads("llama-3-8b", 32, 8, 128))
}


@dataclass(frozen=True)
class TreeShape:
    """How many nodes, and from what search.

    Attributes:
        label: `32` for the 32 best nodes (root counted) of a search that explored half as many
            again; `8x5` for all nodes on 8 finished beams of 5 tokens (the paper's tree).
        nodes: at most, root counted.
        width, length: of the beam search.
        kind: see `TokenTree.from_explored`.
    """

    label: str
    nodes: int
    width: int
    length: int
    kind: TreeKind

    @classmethod
    def parse(cls, text: str) -> TreeShape:
        """From a label.

        Raises:
            ValueError: it is none, or asks for more than a tree or a beam search can have.
        """
        found = re.fullmatch(r"(\d+)(?:x(\d+))?", text)
        if found is None:
            raise ValueError(f"{text!r}: expected a number of nodes or WxL beams, like 32 or 8x5")
        first, length = int(found[1]), int(found[2] or 0)
        if found[2] is None:
            if not 2 <= first <= MAX_NODES:
                raise ValueError(f"{text!r}: a tree has 2 to {MAX_NODES} nodes, root counted")
            width = max(2, -(-3 * (first - 1) // (2 * BEAM_LENGTH)))
            return cls(text, first, width, BEAM_LENGTH, "explored")
        if not 1 <= first <= TOP_TOKENS or not 1 <= length < MAX_NODES:
            raise ValueError(
                f"{text!r}: 1 to {TOP_TOKENS} beams of 1 to {MAX_NODES - 1} tokens are possible"
            )
        return cls(text, min(first * length + 1, MAX_NODES), first, length, "beams")


def random_search(
    requests: int, width: int, length: int, generator: torch.Generator
) -> ExploredNodes:
    """A beam search whose draft head is random: the trees have the form of real ones.

    Logits over the top 50 tokens are normal with deviation 2.5, which gives the best token 43 %
    of the probability on average: trees are deep along good beams and bushy near the root.
    """

    def best(beams: int) -> tuple[Tensor, Tensor]:
        logits = 2.5 * torch.randn(requests, beams, TOP_TOKENS, generator=generator)
        return log_softmax_of_top(logits, width)

    log_probs, tokens = (x.squeeze(1) for x in best(1))
    levels = [(tokens, torch.zeros_like(tokens), log_probs)]
    for _ in range(length - 1):
        scores, candidates = best(width)
        scores = (scores + log_probs.unsqueeze(-1)).flatten(1)
        log_probs, chosen = scores.topk(width, dim=1)
        levels.append((candidates.flatten(1).gather(1, chosen), chosen // width, log_probs))
    return ExploredNodes(*(torch.stack(parts, dim=1) for parts in zip(*levels, strict=True)))


@dataclass(frozen=True)
class Case:
    """One measurement of attention: `batch` requests with `context` keys each and one tree each."""

    heads: Heads
    batch: int
    context: int
    shape: TreeShape
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return (
            f"{self.heads.name}, batch {self.batch}, context {self.context}, "
            f"nodes {self.shape.label}"
        )

    @cached_property
    def explored(self) -> ExploredNodes:
        generator = torch.Generator().manual_seed(SEED)
        return random_search(self.batch, self.shape.width, self.shape.length, generator)

    @cached_property
    def tree(self) -> TokenTree:
        """On the CPU."""
        roots = torch.arange(self.batch)
        return TokenTree.from_explored(
            roots, self.explored, self.shape.nodes - 1, tree=self.shape.kind
        )

    @cached_property
    def paths(self) -> list[list[list[int]]]:
        """Per request, its tree's paths from the root to each leaf."""
        return leaf_paths(self.tree)

    @property
    def blocks_per_request(self) -> int:
        return -(-(self.context + self.shape.nodes) // BLOCK_SIZE)

    @property
    def own_blocks_per_beam(self) -> int:
        """What a beam as a sequence of its own does not share: from its first row's block on."""
        longest = max(len(path) for paths in self.paths for path in paths)
        return -(-(self.context % BLOCK_SIZE + longest) // BLOCK_SIZE)

    @property
    def num_blocks(self) -> int:
        beams = sum(len(paths) for paths in self.paths)
        return self.batch * self.blocks_per_request + beams * self.own_blocks_per_beam

    @property
    def cache_bytes(self) -> int:
        """Of the K and V caches, with the blocks that beams apart have of their own."""
        return self.num_blocks * BLOCK_SIZE * self._key_bytes

    @property
    def floor_bytes(self) -> int:
        """What any kernel has to move at least.

        K and V of context and tree once per KV head, the queries and the output, the block table
        and the nodes' bit sets. (Lengths, 8 bytes a request, are left out.)
        """
        nodes = self.tree.num_nodes.tolist()
        rows = sum(nodes)
        keys = sum(self.context + n for n in nodes)
        query = rows * self.heads.query * self.heads.dim * self.dtype.itemsize
        blocks = sum(-(-(self.context + n) // BLOCK_SIZE) for n in nodes)
        words = rows * self.tree.ancestors.shape[2]
        return keys * self._key_bytes + 2 * query + (blocks + words) * INT_BYTES

    @property
    def _key_bytes(self) -> int:
        return 2 * self.heads.kv * self.heads.dim * self.dtype.itemsize


def leaf_paths(tree: TokenTree) -> list[list[list[int]]]:
    """Per request, the nodes from the root to each leaf, leaves in node order."""
    found = []
    for parents, count in zip(tree.parents.tolist(), tree.num_nodes.tolist(), strict=True):
        paths = [[0]]
        for node in range(1, count):
            paths.append([*paths[parents[node]], node])
        inner = set(parents[1:count])
        found.append([path for path in paths if path[-1] not in inner])
    return found
