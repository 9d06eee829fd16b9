# SPDX-License-Identifier: Apache-2.0
"""Hidden states by transformers, one text at a time: no engine to start."""

import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel

from vllm_redrafter.data.settings import CaptureSettings
from vllm_redrafter.data.target import Target
from vllm_redrafter.offline.capture import CaptureJob, capture
from vllm_redrafter.replay.target import hidden_states, load_target


class TransformersStates:
    """A `HiddenStatesEngine` for Llama; of two waiting texts, the later one is done first."""

    def __init__(
        self,
        target: str,
        settings: CaptureSettings,
        layers: Sequence[int],
        longest: int,
        scratch: Path,
    ) -> None:
        self.model = load_target(Target.open(target), settings.dtype)
        *self.layers, last = layers
        assert last == self.model.config.num_hidden_layers and scratch.is_dir()
        self.longest = longest

    @torch.no_grad()
    def states(self, texts: Iterable[tuple[int, list[int]]]) -> Iterator[tuple[int, Tensor]]:
        waiting: list[tuple[int, Tensor]] = []
        for row, tokens in texts:
            assert 0 < len(tokens) <= self.longest
            waiting.append((row, self._states_of(tokens)))
            if len(waiting) == 2:
                yield waiting.pop()
        yield from waiting

    def _states_of(self, tokens: list[int]) -> Tensor:
        last = before_the_norm(self.model, tokens)
        others = hidden_states(self.model, self.layers, input_ids=torch.tensor([tokens]))[0]
        return torch.cat([others[:, last.shape[1] :], last], dim=1)

    def close(self) -> None:
        pass


def before_the_norm(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """[tokens, H], what enters a Llama's final norm."""
    kept: list[Tensor] = []
    hook = model.base_model.norm.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))
    model.base_model(torch.tensor([tokens]), use_cache=False)
    hook.remove()
    return kept[0][0]


def write_states_of(
    folder: Path, target: Path, data: Path, layers: str = "1,2", max_length: int = 2048
) -> Path:
    """What capture writes with `TransformersStates`, in float32."""
    settings = CaptureSettings(max_length, "float32", target_layers=layers)
    job = CaptureJob(str(target), data, folder, settings)
    capture(job, TransformersStates, Console(file=io.StringIO()))
    return folder
