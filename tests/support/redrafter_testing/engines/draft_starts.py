# SPDX-License-Identifier: Apache-2.0
"""What the drafts of a V2 worker start from, and what transformers computes there."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_redrafter.data.target import Target
from vllm_redrafter.replay.target import hidden_states, load_target

kept: list[Tensor] = []


def keep(worker: Any) -> None:
    """For `Engine.rpc`: keep the hidden states that drafts start from, from here on."""
    speculator = worker.model_runner.speculator
    propose = speculator.propose

    def propose_and_keep(input_batch: Any, *inputs: Any, **others: Any) -> Tensor:
        drafts: Tensor = propose(input_batch, *inputs, **others)
        kept.extend(speculator.hidden[: input_batch.num_reqs].clone())
        return drafts

    speculator.propose = propose_and_keep


def starts(worker: Any) -> list[list[float]]:
    """For `Engine.rpc`: each [(1 + n) H]."""
    return [start.tolist() for start in kept]


def states_of(target: Path, texts: Sequence[list[int]], layers: tuple[int, ...]) -> Tensor:
    """[tokens of all texts, (1 + n) H], by transformers."""
    model = load_target(Target.open(target))
    found = [hidden_states(model, layers, input_ids=torch.tensor([text]))[0] for text in texts]
    return torch.cat(found)
