# SPDX-License-Identifier: Apache-2.0
"""`vllm-redrafter capture`: the target's hidden states for all rows of a data folder."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from vllm_redrafter.data.hidden_states import (
    SHARD_BYTES,
    StatesInfo,
    plan_shards,
    text_fingerprint,
    write_states,
)
from vllm_redrafter.data.output_folder import Part
from vllm_redrafter.data.rows import row_lengths
from vllm_redrafter.data.settings import CaptureSettings
from vllm_redrafter.data.source import read_checked
from vllm_redrafter.data.target import Target
from vllm_redrafter.heads.target_layers import layers_of
from vllm_redrafter.replay.target import final_norm, load_ends
from vllm_redrafter.utils.errors import ConfigError, TrainingError
from vllm_redrafter.utils.progress import progress_bar

if TYPE_CHECKING:
    from vllm_redrafter.offline.hidden_states import HiddenStatesEngine

GIB = 2**30

StartEngine = Callable[[str, CaptureSettings, Sequence[int], int, Path], "HiddenStatesEngine"]
"""From the target, how to capture, the layers whose output is wanted (the last one and those before
it, in ascending order), the tokens of the longest text, and a folder for passing files."""


@dataclass(frozen=True)
class CaptureJob:
    """What to capture: the states of `target`, a folder or hub id, for the rows of `data`.

    With `other_target`, another target with the same tokenizer may have written the data.
    """

    target: str
    data: Path
    output: Path
    settings: CaptureSettings
    other_target: bool = False


def capture(job: CaptureJob, start_engine: StartEngine, console: Console | None = None) -> None:
    """Write the hidden states that are missing.

    ConfigError: input that cannot work; the disk is too small; the folder holds other states.
    TrainingError: the engine gives no finite states of the expected shape.
    """
    console = console or Console()
    target = Target.open(job.target)
    _, dataset = read_checked(job.data, target, not job.other_target)
    ends = load_ends(target, job.settings.dtype)
    lengths = np.minimum(row_lengths(dataset), job.settings.max_length)
    num_layers = target.text_config.num_hidden_layers
    layers = layers_of(job.settings.target_layers, num_layers)
    info = _describe(job, target, dataset, lengths, ends, layers)
    output = job.output.expanduser()
    part = Part.parse(job.settings.part)
    shards = plan_shards(lengths.tolist(), info.shard_tokens)
    own = part.shards(len(shards))
    with info.missing_shards(output, part, len(shards)) as missing:
        run = _CaptureRun(info, dataset, lengths, {n: shards[n] for n in missing}, output)
        _print_plan(console, info, len(shards), len(own), run)
        if missing:
            if (free := shutil.disk_usage(output).free) < run.num_bytes:
                raise ConfigError(
                    f"--output {output}: {run.num_bytes / GIB:.1f} GiB are to be written and "
                    f"{free / GIB:.1f} GiB are free: give a folder on a larger disk, lower "
                    "--max-length, or train on less data"
                )
            # vLLM's own "auto" makes 16 bits of a float32 checkpoint.
            settings = replace(job.settings, dtype=info.dtype)  # type: ignore[arg-type]  # checked there
            longest = int(lengths.max()) - 1
            wanted = [*layers, num_layers]
            with (
                _scratch_folder(output / f".part-{part.k}-of-{part.n}") as scratch,
                closing(start_engine(job.target, settings, wanted, longest, scratch)) as engine,
            ):
                run.run(engine, final_norm(ends), console)


@contextmanager
def _scratch_folder(path: Path) -> Iterator[Path]:
    """An empty folder for passing files; it is deleted afterwards."""
    shutil.rmtree(path, ignore_errors=True)  # of a run that was killed
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _describe(
    job: CaptureJob,
    target: Target,
    dataset: Any,
    lengths: np.ndarray,
    ends: Any,
    layers: tuple[int, ...],
) -> StatesInfo:
    hidden_size = ends.config.get_text_config().hidden_size
    bytes_per_token = (1 + len(layers)) * hidden_size * ends.dtype.itemsize
    return StatesInfo(
        target=target.name,
        target_fingerprint=target.fingerprint,
        text_fingerprint=text_fingerprint(dataset),
        num_rows=len(lengths),
        num_tokens=int(lengths.sum()),
        max_length=job.settings.max_length,
        hidden_size=hidden_size,
        dtype=str(ends.dtype).removeprefix("torch."),
        shard_tokens=max(1, SHARD_BYTES // bytes_per_token),
        target_layers=layers,
    )


def _print_plan(
    console: Console, info: StatesInfo, num_shards: int, num_own: int, run: _CaptureRun
) -> None:
    num_bytes = (info.num_tokens - info.num_rows) * info.bytes_per_token
    console.print(
        f"{info.num_rows} rows, {info.num_tokens:,} tokens: {num_bytes / GIB:.2f} GiB of "
        f"hidden states ({info.bytes_per_token:,} bytes a token, {info.dtype}) in {num_shards} "
        "shards"
    )
    part = "" if num_own == num_shards else f"this part has {num_own} shards; "
    console.print(f"{part}{run.num_bytes / GIB:.2f} GiB are to be written now")


class _CaptureRun:
    """One run: the rows of the missing shards, cut to `lengths`, become files in `output`."""

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

    def run(
        self, engine: HiddenStatesEngine, norm: Callable[[Tensor], Tensor], console: Console
    ) -> None:
        """Write all missing shards, each when it has all its rows."""
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
        """The normed last states, then those of the layers as they are; checked."""
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
