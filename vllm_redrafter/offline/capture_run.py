# SPDX-License-Identifier: Apache-2.0
"""From rows to shards of hidden states, by an engine; and a sample of them against transformers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from vllm_redrafter.data.hidden_states import StatesInfo, StoredStates, write_states
from vllm_redrafter.data.target import Target
from vllm_redrafter.replay.target import hidden_states, load_target
from vllm_redrafter.utils.errors import TrainingError
from vllm_redrafter.utils.progress import progress_bar

TOLERANCE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.1}
"""How far a row may be from transformers', as a share of its length. Two ways to add up the same
16-bit numbers are some hundredths apart after many layers; states of another layer, of another
token, or without the norm, are as far apart as they are long."""


class StatesEngine(Protocol):
    """What runs the target's layers."""

    def states(self, texts: Iterable[tuple[int, list[int]]]) -> Iterator[tuple[int, Tensor]]:
        """From (a name, tokens) to (the name, states), in any order.

        States are [tokens, (n + 1) H]: those of n layers, in ascending order, then what goes into
        the final norm.
        """
        ...

    def close(self) -> None:
        """End it; the device is free then."""
        ...


class CaptureRun:
    """One run: from the rows of the missing shards, by shard, to files in `output`.

    All rows are cut to `lengths`.
    """

    def __init__(
        self,
        info: StatesInfo,
        dataset: Any,
        lengths: np.ndarray,
        missing: dict[int, range],
        output: Path,
    ) -> None:
        self._info, self._dataset, self._lengths = info, dataset, lengths
        self._missing, self._output = missing, output
        self.tokens = sum(int(lengths[row]) - 1 for rows in missing.values() for row in rows)
        self.num_bytes = self.tokens * info.bytes_per_token

    def run(self, engine: StatesEngine, norm: Callable[[Tensor], Tensor], console: Console) -> None:
        """Write all missing shards, each when it has all its rows.

        Raises:
            TrainingError: what the engine gives are no such states, or not all of them.
        """
        started = time.monotonic()
        shard_of = {row: shard for shard, rows in self._missing.items() for row in rows}
        empty = torch.empty(0, self._info.width, dtype=getattr(torch, self._info.dtype))
        # A row of one token predicts nothing, and is not read at all.
        done = {
            shard: {row: empty for row in rows if self._lengths[row] == 1}
            for shard, rows in self._missing.items()
        }
        with progress_bar(console) as progress:
            task = progress.add_task("tokens", total=self.tokens, completed=0, status="")
            for row, states in engine.states(self._texts()):
                shard = shard_of[row]
                done[shard][row] = self._normed(row, states, norm)
                self._write_if_whole(shard, done)
                progress.update(task, advance=len(states))
            for shard in list(done):
                self._write_if_whole(shard, done)
        seconds = time.monotonic() - started
        console.print(
            f"{self.tokens:,} tokens in {seconds:.0f} s, {self.tokens / seconds:.0f} per s"
        )
        if done:
            raise TrainingError(f"the engine gave no hidden states for shards {sorted(done)}")

    def _texts(self) -> Iterator[tuple[int, list[int]]]:
        for rows in self._missing.values():
            for row in rows:
                if (length := int(self._lengths[row])) > 1:
                    yield row, self._dataset[row]["input_ids"][: length - 1]

    def _normed(self, row: int, states: Tensor, norm: Callable[[Tensor], Tensor]) -> Tensor:
        """What lm_head reads, then the layers' as they are; checked."""
        expected = (int(self._lengths[row]) - 1, self._info.width)
        states = states.to(getattr(torch, self._info.dtype))
        size = self._info.hidden_size
        layers, last = states[:, :-size], states[:, -size:]
        states = torch.cat([norm(last), layers], dim=1)
        if states.shape != expected or not bool(states.isfinite().all()):
            raise TrainingError(
                f"row {row}: the engine's hidden states are {list(states.shape)}, expected are "
                f"{list(expected)} finite numbers"
            )
        return states

    def _write_if_whole(self, shard: int, done: dict[int, dict[int, Tensor]]) -> None:
        if shard in done and len(done[shard]) == len(self._missing[shard]):
            write_states(self._output, shard, done.pop(shard))


@torch.no_grad()
def check_rows(target: Target, states: StoredStates, rows: Mapping[int, Sequence[int]]) -> float:
    """Run the target over the tokens of some rows, by number, with transformers, and compare.

    It is loaded in the dtype of the states, over all GPUs that there are.

    Returns:
        The largest distance of a row, |captured - computed| / |computed|.

    Raises:
        TrainingError: a row is further apart than rounding can explain.
    """
    dtype = states.info.dtype
    model = load_target(target, getattr(torch, dtype), "auto")
    layers, largest = states.info.target_layers, 0.0
    for row, tokens in rows.items():
        captured = states[row].float()
        read = torch.tensor([tokens[: len(captured)]], device=model.device)
        computed = hidden_states(model, layers, input_ids=read)[0].float().cpu()
        # Layer by layer: the last ones' numbers may be far larger than the first ones'.
        by_layer = (x.view(len(x), 1 + len(layers), -1) for x in (captured - computed, computed))
        difference, whole = (x.norm(dim=(0, 2)) for x in by_layer)
        apart = float((difference / whole).max())
        # Written so that NaN is refused too.
        if not apart <= TOLERANCE[dtype]:
            raise TrainingError(
                f"{states.folder}: row {row} is {apart:.1%} of its length from what transformers "
                f"computes, and rounding in {dtype} explains {TOLERANCE[dtype]:.1%}: these hidden "
                "states are not the target's; train without --hidden-states, and report the "
                "target's class"
            )
        largest = max(largest, apart)
    return largest
