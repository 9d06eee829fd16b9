# SPDX-License-Identifier: Apache-2.0
"""A proposer that knows the continuation: verification tested apart from a drafter's quality.

It recognises where a request stands by the nearest of the hidden states that it has recorded.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from redrafter_testing.oracles import CPU_ORACLE
from vllm_redrafter.engine.cpu.v1.proposer import TreeProposer
from vllm_redrafter.tree.beam_search import ExploredNodes
from vllm_redrafter.tree.policy import SearchShape

ORACLE_FILE = "oracle.pt"
LENGTH, WIDTH = 5, 3


def allowed_depth(root_position: Tensor | int) -> Tensor | int:
    """How deep the true continuation goes in the tree of a root at this position: 0 to 5."""
    return root_position * 7919 % (LENGTH + 1)


def write_oracle(folder: Path, target: Path, sequences: list[tuple[list[int], list[int]]]) -> None:
    """Record hidden states and continuations of (prompt, output) pairs for OracleProposer."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    hidden, continuation, position = [], [], []
    for prompt, output in sequences:
        tokens = torch.tensor(prompt + output)
        with torch.inference_mode():
            states = model.model(tokens.unsqueeze(0)).last_hidden_state[0]
        padded = torch.cat([tokens, tokens.new_full((LENGTH + 2,), -1)])
        for t in range(len(prompt) - 1, len(tokens) - 1):
            hidden.append(states[t])
            continuation.append(padded[t + 2 : t + 2 + LENGTH])
            position.append(t + 1)
    torch.save(
        (torch.stack(hidden), torch.stack(continuation), torch.tensor(position)),
        folder / ORACLE_FILE,
    )


def write_answers(folder: Path, target: Path, plain: Mapping[str, list[Any]]) -> Path:
    """Record vLLM's answers, by workload, for the oracles; returns the folder."""
    answers = [answer for of_load in plain.values() for answer in of_load]
    known = [(list(a.prompt_token_ids), list(o.token_ids)) for a in answers for o in a.outputs]
    write_oracle(folder, target, known)
    return folder


class Oracle:
    """What `write_oracle` recorded, and trees made from it; or paths, which it is `sure` of."""

    def __init__(self, folder: Path, vocab_size: int, sure: bool = False) -> None:
        self.sure = sure
        self.hidden, self.continuation, self.position = torch.load(folder / ORACLE_FILE)
        self.vocab_size = vocab_size
        self.generator = torch.Generator().manual_seed(0)

    def explore(self, hidden: Tensor, width: int = WIDTH, length: int = LENGTH) -> ExploredNodes:
        """Candidates for the requests that stand where these hidden states, [R, H], are."""
        row = torch.cdist(hidden.float(), self.hidden).argmin(dim=1)
        return self._explored(row, width, length)

    def _explored(self, row: Tensor, width: int, length: int) -> ExploredNodes:
        requests, vocab = row.shape[0], self.vocab_size
        truth = self.continuation[row, :length]
        allowed = allowed_depth(self.position[row]).unsqueeze(1)
        known = (torch.arange(length) < allowed) & (truth >= 0)
        known = known.cumprod(dim=1).bool()
        # Per level one slot holds the truth (if allowed), the others its successors in the
        # vocabulary: all distinct, so siblings are.
        slot = self._random(width, requests, length)
        offset = (torch.arange(width) - slot.unsqueeze(2)) % width
        wrong = 1 + (~known).long().unsqueeze(2) * width
        tokens = (truth.clamp(min=0).unsqueeze(2) + offset * wrong + (wrong > 1).long()) % vocab
        back_pointers = self._random(width, requests, length, width)
        above = slot.roll(1, dims=1)
        back_pointers.scatter_(2, slot.unsqueeze(2), above.unsqueeze(2))
        back_pointers[:, 0].zero_()
        steps = -torch.rand(requests, length, width, generator=self.generator)
        if self.sure:
            steps.scatter_(2, slot.unsqueeze(2), -0.01)
        log_probs = [steps[:, 0]]
        for level in range(1, length):
            log_probs.append(log_probs[-1].gather(1, back_pointers[:, level]) + steps[:, level])
        return ExploredNodes(tokens, back_pointers, torch.stack(log_probs, dim=1))

    def _random(self, width: int, *shape: int) -> Tensor:
        return torch.randint(width, shape, generator=self.generator)


class OracleProposer(TreeProposer):
    """For the CPU engine."""

    def load_model(self, target: nn.Module) -> None:
        super().load_model(target)
        sure = self.config.tree == "chain"
        self.oracle = Oracle(Path(self.checkpoint.model), self.drafter.config.vocab_size, sure)

    def explore(self, states: Tensor, root_tokens: Tensor, shape: SearchShape) -> ExploredNodes:
        """What the oracle knows: of the search, if that is to be adapted; else all of it."""
        return self.oracle.explore(states, *(shape if self.config.adaptive else ()))


def use() -> None:
    """CPU engines started in this process draft with the oracle, whatever else is as always."""
    from vllm_redrafter.utils import names

    names.CPU_PROPOSER = CPU_ORACLE
