# SPDX-License-Identifier: Apache-2.0
"""Plain restatements of the algorithm in lists and loops; no code is shared with the package."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Prefix = tuple[int, ...]

LOG_0 = -50000.0
"""Apple's logarithm of zero."""


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def drafter_step(tensors: Mapping[str, Tensor], state: Tensor, embedded: Tensor) -> Tensor:
    """Apple's recurrence."""
    if "rnn_u.weight" not in tensors:
        return state + embedded
    recurrent = state @ tensors["rnn_u.weight"].T + tensors["rnn_u.bias"]
    return silu(embedded @ tensors["rnn_w.weight"].T + recurrent)


def drafter_logits(tensors: Mapping[str, Tensor], hidden: Tensor, state: Tensor) -> Tensor:
    """Apple's head over [h ; s]; `hidden` and `state` have the same shape."""
    x = torch.cat([hidden, state], dim=-1)
    if "input_proj.weight" in tensors:
        x = x @ tensors["input_proj.weight"].T + tensors["input_proj.bias"]
    layer = 0
    while f"lm_head.{layer}.linear.weight" in tensors:
        linear = x @ tensors[f"lm_head.{layer}.linear.weight"].T
        x = x + silu(linear + tensors[f"lm_head.{layer}.linear.bias"])
        layer += 1
    return x @ tensors[f"lm_head.{layer}.weight"].T


def apple_log_probs(logits: Tensor) -> list[float]:
    """Of one distribution [V]: subtract the maximum, mask all but the top 50, log-softmax."""
    shifted = logits - max(logits.tolist())
    threshold = sorted(shifted.tolist(), reverse=True)[: min(50, len(shifted))][-1]
    masked = [x if x >= threshold else LOG_0 for x in shifted.tolist()]
    return torch.tensor(masked, dtype=torch.float64).log_softmax(dim=0).tolist()


def apple_beam_search(
    tensors: Mapping[str, Tensor],
    embedding: Tensor,
    prompt_state: Tensor,
    init_token: int,
    beam_width: int,
    beam_length: int,
) -> tuple[list[list[int]], list[list[float]]]:
    """Of one request: Apple's beams, best first, and their log-probabilities by depth.

    The beam length counts the init token.
    """
    beams = [[init_token] for _ in range(beam_width)]
    states = [torch.zeros_like(prompt_state) for _ in range(beam_width)]
    # All beams are the same at first, so only one of them may grow.
    log_probs = [0.0] + [LOG_0] * (beam_width - 1)
    history: list[list[float]] = [[] for _ in range(beam_width)]
    for _ in range(beam_length - 1):
        candidates = []
        for i in range(beam_width):
            states[i] = drafter_step(tensors, states[i], embedding[beams[i][-1]])
            new_token = apple_log_probs(drafter_logits(tensors, prompt_state, states[i]))
            candidates += [(log_probs[i] + p, i, token) for token, p in enumerate(new_token)]
        candidates.sort(key=lambda candidate: -candidate[0])
        best = candidates[:beam_width]
        beams = [[*beams[i], token] for _, i, token in best]
        states = [states[i] for _, i, _ in best]
        history = [[*history[i], log_prob] for log_prob, i, _ in best]
        log_probs = [log_prob for log_prob, _, _ in best]
    return beams, history


def explored_prefixes(
    tokens: Sequence[Sequence[int]],
    back_pointers: Sequence[Sequence[int]],
    log_probs: Sequence[Sequence[float]],
) -> list[list[Prefix | None]]:
    """The prefix in every slot [L][W] of a beam search; None in dead slots."""
    levels: list[list[Prefix | None]] = []
    for level, row in enumerate(tokens):
        prefixes: list[Prefix | None] = []
        for slot, token in enumerate(row):
            above = levels[-1][back_pointers[level][slot]] if level else ()
            dead = log_probs[level][slot] == -math.inf or above is None
            prefixes.append(None if dead else (*above, token))
        levels.append(prefixes)
    return levels


def best_nodes(nodes: Mapping[Prefix, float], max_nodes: int) -> list[Prefix]:
    """The most probable ones, the shallower first where two are equally probable."""
    return sorted(nodes, key=lambda prefix: (-nodes[prefix], len(prefix)))[:max_nodes]


def node_prefixes(tokens: Sequence[int], parents: Sequence[int], num_nodes: int) -> list[Prefix]:
    """The prefix that each node of a tree stands for, from its parents; the root's is ()."""
    prefixes: list[Prefix] = [()]
    for node in range(1, num_nodes):
        prefixes.append((*prefixes[parents[node]], tokens[node]))
    return prefixes


def ancestors(parents: Sequence[int], node: int) -> set[int]:
    """A node, its parent, and so on up to the root."""
    found = {node}
    while node:
        node = parents[node]
        found.add(node)
    return found
