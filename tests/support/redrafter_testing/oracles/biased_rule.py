# SPDX-License-Identifier: Apache-2.0
"""A rule that must fail: Apple's acceptance, independent uniforms per beam, the longest beam wins.

For one beam it is the usual rejection rule, and exact. Over several beams, choosing the longest
favours tokens that many beams try, so the output no longer has the target's distribution.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import SamplerOutput

from vllm_redrafter.engine.cpu import runner
from vllm_redrafter.tree.acceptance import AcceptedPath
from vllm_redrafter.tree.token_tree import TokenTree


def longest_beam_wins(
    sampler: Any, logits: Tensor, tree: TokenTree, *args: Any
) -> tuple[SamplerOutput, AcceptedPath]:
    """For `path_sampler.sample_paths`, where all sample from the target's own distribution."""
    probabilities = torch.zeros(*tree.tokens.shape, logits.shape[1])
    probabilities[tree.is_node] = logits.float().softmax(dim=-1)
    slots = tree.tokens.shape[1]
    results = [
        _walk(tree.tokens[r].tolist(), tree.parents[r].tolist(), int(n), probabilities[r])
        for r, n in enumerate(tree.num_nodes)
    ]

    def padded(rows: list[list[int]]) -> Tensor:
        return torch.tensor([row + [-1] * (slots - len(row)) for row in rows])

    paths, outputs = [path for path, _ in results], [output for _, output in results]
    accepted = AcceptedPath(
        output_tokens=padded(outputs).to(torch.int32),
        num_sampled=torch.tensor([len(output) for output in outputs], dtype=torch.int32),
        path=padded(paths),
        last_node=torch.tensor([path[-1] for path in paths]),
    )
    return SamplerOutput(accepted.output_tokens, None), accepted


def _walk(
    tokens: list[int], parents: list[int], num_nodes: int, probabilities: Tensor
) -> tuple[list[int], list[int]]:
    """(path, output tokens) of one request."""
    inner = {parents[node] for node in range(1, num_nodes)}
    best, rejected = [0], None
    for leaf in set(range(1, num_nodes)) - inner:
        beam = [leaf]
        while beam[0]:
            beam.insert(0, parents[beam[0]])
        accepted, stopped_by = [0], None
        for parent, node in pairwise(beam):
            if torch.rand(()) >= probabilities[parent, tokens[node]]:
                stopped_by = tokens[node]
                break
            accepted.append(node)
        if len(accepted) > len(best) or rejected is None:
            best, rejected = accepted, stopped_by
    last = probabilities[best[-1]].clone()
    if rejected is not None:
        last[rejected] = 0
    return best, [tokens[node] for node in best[1:]] + [int(torch.multinomial(last, 1))]


def use(worker: Any) -> None:
    """For `collective_rpc`: replace the acceptance rule in the worker's process."""
    runner.sample_paths = longest_beam_wins
