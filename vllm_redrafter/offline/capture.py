# SPDX-License-Identifier: Apache-2.0
"""`vllm-redrafter capture`: the target's hidden states for all rows of a data folder.

A shard is written when all its rows are there; the next run writes missing ones.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from vllm_redrafter.data.hidden_states import (
    SHARD_BYTES,
    StatesInfo,
    StoredStates,
    plan_shards,
    text_fingerprint,
)
from vllm_redrafter.data.output_folder import Part
from vllm_redrafter.data.rows import row_lengths
from vllm_redrafter.data.settings import CaptureSettings
from vllm_redrafter.data.source import read_checked
from vllm_redrafter.data.target import Target
from vllm_redrafter.heads.target_layers import layers_of
from vllm_redrafter.offline.capture_run import CaptureRun, StatesEngine, check_rows
from vllm_redrafter.replay.target import final_norm, load_ends
from vllm_redrafter.utils.errors import ConfigError

GIB = 2**30

StartEngine = Callable[[str, CaptureSettings, Sequence[int], int, Path], StatesEngine]
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
    """Write the hidden states that are missing, and compare a sample with transformers.

    Raises:
        ConfigError: input that cannot work; the disk is too small; the folder holds other states.
        TrainingError: what the engine computes is not what transformers does.
    """
    console = console or Console()
    target = Target.open(job.target)
    _, dataset = read_checked(job.data, target, not job.other_target)
    ends = load_ends(target, job.settings.dtype)
    lengths = np.minimum(row_lengths(dataset), job.settings.max_length)
    num_layers = target.text_config.num_hidden_layers
    layers = layers_of(job.settings.target_layers, num_layers, "capture: target_layers")
    info = _describe(job, target, dataset, lengths, ends, layers)
    output = job.output.expanduser()
    part = Part.parse(job.settings.part)
    shards = plan_shards(lengths.tolist(), info.shard_tokens)
    own = part.shards(len(shards))
    with info.missing_shards(output, part, len(shards)) as missing:
        run = CaptureRun(info, dataset, lengths, {n: shards[n] for n in missing}, output)
        _print_plan(console, info, len(shards), len(own), run)
        if missing:
            _check_space(output, run.num_bytes)
            # vLLM's own "auto" makes 16 bits of a float32 checkpoint.
            settings = replace(job.settings, dtype=info.dtype)  # type: ignore[arg-type]  # checked there
            longest = int(lengths.max()) - 1
            wanted = [*layers, num_layers]
            with (
                _scratch_folder(output / f".part-{part.k}-of-{part.n}") as scratch,
                closing(start_engine(job.target, settings, wanted, longest, scratch)) as engine,
            ):
                run.run(engine, final_norm(ends), console)
    if job.settings.check_rows and own:
        rows = [row for shard in own for row in shards[shard] if lengths[row] > 1]
        if not set(info.finished_shards(output)).issuperset(range(len(shards))):
            console.print("other parts are missing still: the last part compares a sample")
            return
        states = StoredStates(output, row_lengths(dataset))
        # Evenly spread from the first to the last.
        places = np.linspace(0, len(rows) - 1, min(job.settings.check_rows, len(rows)))
        sample = [rows[place] for place in places.astype(int)]
        apart = check_rows(target, states, {row: dataset[row]["input_ids"] for row in sample})
        console.print(
            f"{len(sample)} rows compared with transformers: at most {apart:.2%} of their length "
            "apart"
        )


@contextmanager
def _scratch_folder(path: Path) -> Iterator[Path]:
    """An empty folder for passing files; it is gone afterwards."""
    shutil.rmtree(path, ignore_errors=True)  # of a run that was killed
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _check_space(output: Path, needed: int) -> None:
    free = shutil.disk_usage(output).free
    if free < needed:
        raise ConfigError(
            f"--output {output}: {needed / GIB:.1f} GiB are to be written and {free / GIB:.1f} "
            "GiB are free: give a folder on a larger disk, lower --max-length, or train on less "
            "data"
        )


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
    console: Console, info: StatesInfo, num_shards: int, num_own: int, run: CaptureRun
) -> None:
    num_bytes = (info.num_tokens - info.num_rows) * info.bytes_per_token
    console.print(
        f"{info.num_rows} rows, {info.num_tokens:,} tokens: {num_bytes / GIB:.2f} GiB of "
        f"hidden states ({info.bytes_per_token:,} bytes a token, {info.dtype}) in {num_shards} "
        "shards"
    )
    part = "" if num_own == num_shards else f"this part has {num_own} shards; "
    console.print(f"{part}{run.num_bytes / GIB:.2f} GiB are to be written now")
