# SPDX-License-Identifier: Apache-2.0
"""Hidden states by transformers, one text at a time: no engine to start."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from vllm_redrafter.data.dataset import read_dataset
from vllm_redrafter.data.fingerprint import target_fingerprint
from vllm_redrafter.data.hidden_states import StatesInfo, text_fingerprint, write_states
from vllm_redrafter.data.rows import row_lengths
from vllm_redrafter.data.settings import CaptureSettings
from vllm_redrafter.data.target import Target
from vllm_redrafter.replay.target import hidden_states, load_target


class TransformersStates:
    """A `StatesEngine` for Llama; where two texts are waiting, the later one is done first."""

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


@torch.no_grad()
def write_states_of(
    folder: Path, target: Path, data: Path, dtype: torch.dtype, layers: tuple[int, ...] = (1, 2)
) -> Path:
    """A folder as capture writes it, computed from whole rows, as training itself does."""
    _, dataset = read_dataset(data)
    model = load_target(Target.open(target), dtype)
    lengths = row_lengths(dataset)
    folder.mkdir()
    StatesInfo(
        target=str(target),
        target_fingerprint=target_fingerprint(target),
        text_fingerprint=text_fingerprint(dataset),
        num_rows=len(lengths),
        num_tokens=int(lengths.sum()),
        max_length=2048,
        hidden_size=model.config.get_text_config().hidden_size,
        dtype=str(dtype).removeprefix("torch."),
        shard_tokens=1 << 20,
        target_layers=layers,
    ).save(folder)
    states = {}
    for row, values in enumerate(dataset):
        tokens = torch.tensor([values["input_ids"]])
        positions = torch.arange(tokens.shape[1]).unsqueeze(0)
        found = hidden_states(model, layers, input_ids=tokens, position_ids=positions)
        states[row] = found[0, :-1].contiguous()
    write_states(folder, 0, states)
    return folder
