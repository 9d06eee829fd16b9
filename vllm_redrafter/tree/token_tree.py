# SPDX-License-Identifier: Apache-2.0
"""The token tree: candidate continuations of a request, shared prefixes stored once.

Node 0 is the root, the last sampled token. The others stand in descending order of cumulative
draft log-probability, ties broken by level. No parent is less probable than its child, so *every
prefix of the node list is itself a tree*, of the best nodes.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from vllm_redrafter.config import WORD_BITS, TreeKind
from vllm_redrafter.tree.beam_search import ExploredNodes
from vllm_redrafter.tree.policy import candidate_log_probs, on_best_path


@dataclass(frozen=True)
class TokenTree:
    """Trees of R requests, each with a root and up to K nodes more.

    Attributes:
        tokens: [R, K+1] int32; -1 beyond a request's last node.
        parents: [R, K+1] int32; the root's is itself, and 0 stands beyond the last node.
        depths: [R, K+1] int32; the root's is 0, and so is that of unused slots.
        num_nodes: [R] int32, the root counted.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    num_nodes: Tensor

    @cached_property
    def is_node(self) -> Tensor:
        """[R, K+1] bool: False in the unused slots at the end."""
        index = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return index < self.num_nodes.unsqueeze(1)

    @cached_property
    def ancestor_mask(self) -> Tensor:
        """[R, K+1, K+1] bool: entry (i, j) says that j is i or an ancestor of i.

        With P the reflexive parent relation as a matrix, P^d relates a node to its ancestors up to
        d levels above; squaring doubles d, so 7 squarings cover 128 nodes.
        """
        num_nodes = self.parents.shape[1]
        reach = torch.zeros(*self.parents.shape, num_nodes, device=self.parents.device)
        reach.scatter_(2, self.parents.long().unsqueeze(2), 1.0)
        reach.diagonal(dim1=1, dim2=2).fill_(1.0)
        for _ in range(max(num_nodes - 1, 1).bit_length()):
            reach = torch.bmm(reach, reach).clamp_(max=1.0)
        return reach.bool()

    @cached_property
    def ancestors(self) -> Tensor:
        """[R, K+1, words] int32: `ancestor_mask` as bit sets, bit j % 32 of word j // 32."""
        mask = self.ancestor_mask
        words = -(-mask.shape[-1] // WORD_BITS)
        padded = torch.nn.functional.pad(mask, (0, words * WORD_BITS - mask.shape[-1]))
        bits = torch.arange(WORD_BITS, device=mask.device)
        packed = (padded.view(*mask.shape[:-1], words, WORD_BITS).long() << bits).sum(dim=-1)
        # Two's complement: a word with bit 31 set is a negative int32.
        return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)

    def select(self, requests: Tensor) -> Self:
        """The trees of some requests: [N] int64 indices."""
        parts = self.tokens, self.parents, self.depths, self.num_nodes
        return type(self)(*(part[requests] for part in parts))

    @classmethod
    def from_explored(
        cls,
        root_tokens: Tensor,
        explored: ExploredNodes,
        max_nodes: int,
        tree: TreeKind = "explored",
        chain: Tensor | None = None,
    ) -> Self:
        """The trees of a beam search's most probable nodes.

        A stable sort over nodes in level order keeps a parent before a child that is exactly as
        probable (log-probability 0), so ranks are a topological order.

        Args:
            root_tokens: [R], the last sampled tokens.
            explored: the search's nodes, [R, L, W].
            max_nodes: K, how many nodes to keep besides the root.
            tree: `explored` keeps the most probable of all nodes visited, `beams` of those on a
                finished beam, `chain` those of a single path.
            chain: [R] bool or None: requests that get a single path (vLLM advances grammars along
                a chain; docs/architecture.md).

        Returns:
            Trees with K+1 slots; requests with fewer nodes end in unused slots.
        """
        log_probs = candidate_log_probs(explored, tree)
        if tree == "chain":
            log_probs = on_best_path(explored.back_pointers, log_probs)
        elif chain is not None:
            of_path = on_best_path(explored.back_pointers, log_probs)
            log_probs = torch.where(chain[:, None, None], of_path, log_probs)
        tokens, back_pointers = explored.tokens.flatten(1), explored.back_pointers.flatten(1)
        scores, order = log_probs.flatten(1).sort(dim=1, descending=True, stable=True)
        order, found = order[:, :max_nodes], scores[:, :max_nodes] > -torch.inf

        # node_of: candidate -> its node index; only the kept ones' are read below.
        width = log_probs.shape[2]
        index = torch.arange(1, order.shape[1] + 1, device=tokens.device)
        node_of = torch.zeros_like(tokens).scatter_(1, order, index.expand_as(order))
        level = order // width
        parent_candidate = (level - 1) * width + back_pointers.gather(1, order)
        parents = node_of.gather(1, parent_candidate.clamp(min=0)).masked_fill(level == 0, 0)

        def column(values: Tensor, root: Tensor, unused: int) -> Tensor:
            kept = values.masked_fill(~found, unused)
            kept = torch.nn.functional.pad(kept, (0, max_nodes - kept.shape[1]), value=unused)
            return torch.cat([root.unsqueeze(1), kept], dim=1).to(torch.int32)

        root = torch.zeros_like(root_tokens)
        return cls(
            tokens=column(tokens.gather(1, order), root_tokens, -1),
            parents=column(parents, root, 0),
            depths=column(level + 1, root, 0),
            num_nodes=(found.sum(dim=1) + 1).to(torch.int32),
        )
