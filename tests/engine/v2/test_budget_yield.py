# SPDX-License-Identifier: Apache-2.0
"""What the budget yields on an H100's costs, over the best that could always have been run.

Costs are those of an 8B target, read off
`benchmarks/results/throughput-llama-3-8b-sizes-h100-2026-11-27.json`; the host runs a step ahead of
the device. Requests come as in that benchmark: so many in flight, each of 48 to 96 tokens.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from redrafter_testing.engines.host_budget import host_budget
from vllm_redrafter.engine.v2 import budget as budget_module
from vllm_redrafter.engine.v2.budget import TreeBudget

WIDTH, LENGTHS, K, PROMPT = 4, (1, 3, 5), 12, 60
MAX_ROWS, LAYERS = 20_000, 32
HOST = 2.5
"""How much slower the host is than the one on which the host's times were measured."""
PASS = np.interp(
    np.arange(MAX_ROWS + 1),
    [1, 13, 26, 52, 91, 130, 182, 208, 450, 585, 857, MAX_ROWS],
    [5.87, 6.04, 6.07, 6.19, 6.65, 6.82, 7.28, 7.3, 11.7, 14.4, 18.9, 488.0],
)
"""ms of the target's pass by rows."""
RATIO = 0.8
"""Accepted nodes over those that confidences promise."""


def draft_ms(requests: int, length: int) -> float:
    return float(np.interp(length, [0, 1, 3, 5], [0, 0.3, 0.72, 1.15])) * (1 + requests / 600)


def host_ms(requests: int, kind: str, prompts: bool) -> float:
    """Of vLLM's own steps ("vLLM"), and of ours: "plain", "drafts", or "verifies"."""
    a, b = {"vLLM": (1.65, 0.0134), "plain": (2.3, 0.0208)}.get(kind, (2.9, 0.0208))
    decode = HOST * (a + b * (requests - 16))
    if not prompts:
        return decode
    trees = LAYERS * (0.14 if requests < 33 else 0.095) if kind == "verifies" else 0.0
    return 1.6 * decode + HOST * (LAYERS * 0.085 + trees + 0.6)


def device_ms(rows: int, sampled: bool) -> float:
    """Of the pass, the vocabulary layer, the sampler and what else a step launches."""
    sampler = (18 if sampled else 2) * rows * 128_256 / 2.8e9
    return float(PASS[rows]) + 0.376 + max(rows - 200, 0) * 1e-3 + sampler + 0.25


@dataclass
class Clock:
    """Of the host, in ms; and when the device ends the last step and the one before."""

    now: float = 0.0
    last: float = 0.0
    before: float = 0.0

    def step(self, host: float, device: float) -> None:
        self.before, begin = self.last, max(self.now + host / 2, self.last)
        self.last = begin + device
        self.now += host

    def wait(self) -> None:
        self.now = max(self.now, self.before)


class Requests:
    """So many in flight, each of 48 to 96 tokens; the next one comes two steps after an end."""

    def __init__(self, count: int) -> None:
        self._random = np.random.default_rng(0)
        self.left = np.zeros(count, dtype=np.int64)
        self._comes = np.zeros(count, dtype=np.int64)
        self.age = np.full(count, -1)
        self._clock = 0

    def begin(self) -> tuple[np.ndarray, np.ndarray]:
        """Slots that decode, and slots that read their prompts."""
        new = np.flatnonzero((self.left <= 0) & (self._comes <= self._clock))
        running = np.flatnonzero(self.left > 0)
        self.left[new] = self._random.integers(48, 97, len(new))
        return running, new

    def end(self, slots: np.ndarray, tokens: np.ndarray) -> float:
        """These slots put out so many tokens; returns how many were wanted."""
        tokens = np.minimum(tokens, self.left[slots])
        self.left[slots] -= tokens
        self._comes[slots[self.left[slots] <= 0]] = self._clock + 2
        self._clock += 1
        return float(tokens.sum())


def drafted(count: int, shape: tuple[int, int], sampled: bool, random: Any) -> tuple[Any, Any]:
    """[R, K] each: the nodes' probabilities, descending, and their depths; 0 beyond the last."""
    width, length = shape
    # Such that 4x5:12 yields 2.3 tokens sampled and 4.5 greedy.
    first, decay = (0.47, 0.55) if sampled else (0.85, 0.9)
    ranks = (1, 0.33, 0.16, 0.09) if sampled else (1, 0.1, 0.05, 0.03)
    nodes = (first * decay ** np.arange(length)[:, None] * np.array(ranks[:width])).ravel()
    depths = np.repeat(np.arange(1, length + 1), width)
    # Texts differ in how easy they are.
    easy = random.uniform(0.6, 1.4, (count, 1)) ** depths
    probable = np.minimum(nodes * easy, 0.98)
    order = np.argsort(-probable, axis=1, kind="stable")[:, :K]
    found = np.zeros((2, count, K))
    found[0, :, : order.shape[1]] = np.take_along_axis(probable, order, 1)
    found[1, :, : order.shape[1]] = depths[order]
    return found[0], found[1].astype(np.int32)


def accepted(probable: Any, depths: Any, verified: Any, random: Any) -> Any:
    """[R] how deep each request comes, of the verified nodes."""
    levels = [(probable * verified * (depths == d)).sum(1) for d in range(1, LENGTHS[-1] + 1)]
    reached = np.minimum.accumulate(np.minimum(np.stack(levels, 1), 0.98), axis=1)
    return (random.uniform(size=(len(probable), 1)) < reached).sum(1)


def fixed(count: int, sampled: bool, shape: tuple[int, int] | None, steps: int) -> float:
    """Tokens per ms of a shape whose nodes are all verified; None for plain vLLM."""
    clock, requests, random, tokens = Clock(), Requests(count), np.random.default_rng(1), 0.0
    probable, depths = np.zeros((count, K)), np.zeros((count, K), dtype=np.int32)
    for _ in range(steps):
        running, new = requests.begin()
        nodes = (probable[running] > 0).sum() if shape else 0
        rows, size = len(running) + int(nodes) + PROMPT * len(new), len(running) + len(new)
        kind = "vLLM" if shape is None else "verifies" if nodes else "drafts"
        draft = draft_ms(size, shape[1]) if shape else 0.0
        clock.step(host_ms(size, kind, len(new) > 0), device_ms(rows, sampled) + draft)
        clock.wait()
        came = accepted(probable[running], depths[running], 1, random) if shape else 0
        slots = np.concatenate([running, new])
        put_out = np.concatenate([np.ones(len(running), int) + came, np.ones(len(new), int)])
        tokens += requests.end(slots, put_out)
        if shape:
            probable[slots], depths[slots] = drafted(len(slots), shape, sampled, random)
    return tokens / clock.now


def adaptive(
    patch: pytest.MonkeyPatch, count: int, sampled: bool, steps: int
) -> list[tuple[float, float]]:
    """Tokens and ms of each step of an engine with this budget."""
    clock, requests, sizes = Clock(), Requests(count), (count, K, MAX_ROWS, LENGTHS)
    budget: TreeBudget = host_budget(patch, budget_module, lambda: clock.now, *sizes)
    torch.cuda.Event.return_value.synchronize = clock.wait  # type: ignore[attr-defined]
    budget.samples[:] = sampled
    batches = range(count + 1)
    budget.model.draft_costs = [np.array([draft_ms(n, each) for n in batches]) for each in LENGTHS]
    budget.model.verify_costs = PASS
    random = np.random.default_rng(1)
    probable, depths = np.zeros((count, K)), np.zeros((count, K), dtype=np.int32)
    done, judged = [], []
    for _ in range(steps):
        begin = clock.now
        running, new = requests.begin()
        for slot in new:
            budget.add_request(int(slot))
        slots = np.concatenate([running, new])
        budget.req_states.num_computed_tokens_np[:] = PROMPT
        budget.req_states.num_computed_tokens_np[new] = 0
        ids = [f"{slot}" for slot in slots]
        rows_of = dict(zip(ids, [1 + K] * len(running) + [PROMPT] * len(new), strict=True))
        plain_rows = len(running) + PROMPT * len(new)
        nodes = 0
        if len(running):
            scheduled = {id: [0] * K for id in ids[: len(running)]}
            nodes = budget.get_num_tokens(rows_of, scheduled) - plain_rows
        promised = np.where(depths[slots] > 0, probable[slots] / RATIO, 0.0)
        promised = np.minimum(promised, 0.99) * budget._has_tree[slots, None]
        verified = np.zeros(promised.size, dtype=bool)
        verified[np.argsort(-promised, axis=None, kind="stable")[:nodes]] = True
        verified = verified.reshape(promised.shape) & (promised > 0)
        drafts = budget.drafts_now(True)
        length = budget.next_length(K) if drafts else 0
        kind = "verifies" if nodes else "drafts" if drafts else "plain"
        device = device_ms(plain_rows + nodes, sampled) + draft_ms(len(slots), length)
        clock.step(host_ms(len(slots), kind, len(new) > 0), device)
        came = accepted(probable[slots], depths[slots], verified, random)
        came[len(running) :] = 0
        if nodes:
            judged.append((budget.expected, np.bincount([int(sampled)], [came.sum()], 2)))
        if len(judged) > 2:
            budget.judged.append(judged.pop(0))
        if drafts:
            shape = WIDTH, length
            probable[slots], depths[slots] = drafted(len(slots), shape, sampled, random)
        budget._trees.depths[slots, 1:] = torch.from_numpy(depths[slots]).int()
        survival = np.minimum(np.where(depths[slots] > 0, probable[slots] / RATIO, 0), 0.99)
        above = np.concatenate([np.ones((len(slots), 1)), survival[:, :-1]], axis=1)
        confidences = np.divide(survival, above, out=np.zeros_like(survival), where=above > 0)
        budget._trees.probs[slots, 1:] = torch.from_numpy(confidences).float()
        budget.record_confidences(budget._trees.probs, SimpleNamespace(idx_mapping_np=slots))
        clock.wait()
        done.append((requests.end(slots, 1 + came), clock.now - begin))
    return done


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("count", [1, 4, 16, 64, 256])
def test_the_budget_yields_as_much_as_the_best_that_could_always_be_run(
    count: int, sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = {"vLLM": None, "4x4": (4, 4), "1x3": (1, 3)}
    rates = {name: fixed(count, sampled, shape, 1000) for name, shape in shapes.items()}
    tokens, ms = np.array(adaptive(monkeypatch, count, sampled, 1000)[200:]).sum(axis=0)
    assert tokens / ms >= 0.97 * max(rates.values()), rates
