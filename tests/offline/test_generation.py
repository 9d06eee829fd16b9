# SPDX-License-Identifier: Apache-2.0
"""Training data through real vLLM: what the target would write, killed, continued, drafted."""

import fcntl
import io
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from redrafter_testing import process_trees
from redrafter_testing.engines import forked_engine
from redrafter_testing.engines.fake_engine import APPENDING
from redrafter_testing.engines.ray_cluster import ray_cluster
from redrafter_testing.models.tiny_models import EOS, make_drafter
from redrafter_testing.oracles import CPU_ORACLE
from vllm_redrafter.cli.demo.engine import Job, Round, decode_in_vllm
from vllm_redrafter.data.dataset import DatasetInfo, read_dataset
from vllm_redrafter.data.generation import GenerationSummary, generate_data
from vllm_redrafter.data.prompts import read_prompts
from vllm_redrafter.data.settings import (
    EngineSettings,
    GenerationSettings,
    SamplingSettings,
)
from vllm_redrafter.data.target import Target
from vllm_redrafter.data.turns import OpenTurn
from vllm_redrafter.offline.generation import CPU_BATCHED_TOKENS, OfflineEngine
from vllm_redrafter.utils import names

pytestmark = pytest.mark.engine

RAY_WORKERS = Path(__file__).parents[2] / "examples" / "ray_workers.py"
MAX_TOKENS = 40
GREEDY = GenerationSettings(
    sampling=SamplingSettings(temperature=0.0, max_tokens=MAX_TOKENS, dtype="float32"),
    shard_size=4,
    in_flight=4,
    spec_tokens=15,
    engine=EngineSettings(engine_args='{"enforce_eager": true}'),
)
SAMPLED = replace(
    GREEDY,
    sampling=replace(GREEDY.sampling, temperature=0.9, top_p=0.95, top_k=50, seed=3),
)
NUM_PROMPTS = 32


@dataclass(frozen=True)
class Runs:
    """Folders that were written in one go, and what was said about them."""

    greedy: Path
    sampled: Path
    drafted: Path
    drafted_summary: GenerationSummary


@pytest.fixture(scope="module")
def chat_target(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with a chat template, so that conversations have several turns."""
    folder = Path(shutil.copytree(target, tmp_path_factory.mktemp("chat") / "target"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = APPENDING
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of conversations with one or two turns."""
    rows = [
        {"messages": [{"role": "user", "content": f"value {i * 7} {t}"} for t in range(1 + i % 2)]}
        for i in range(NUM_PROMPTS)
    ]
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(scope="module")
def runs(chat_target: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("data")
    drafter = make_drafter(folder / "drafter")
    with shared_engine(chat_target, GREEDY, prompts) as generate:
        generate(folder / "greedy", GREEDY)
        generate(folder / "sampled", SAMPLED)
    write_oracle_of(folder / "greedy", chat_target, drafter)
    drafted = replace(GREEDY, drafter=str(drafter))
    with shared_engine(chat_target, drafted, prompts, CPU_ORACLE) as generate:
        summary = generate(folder / "drafted", drafted)
    return Runs(folder / "greedy", folder / "sampled", folder / "drafted", summary)


@contextmanager
def shared_engine(
    target: Path, settings: GenerationSettings, prompts: Path, proposer_class: str | None = None
) -> Iterator[Any]:
    """`generate(output, settings)` in one engine: it takes long to start."""

    class Again(OfflineEngine):
        def __init__(self, _: Target, settings: GenerationSettings) -> None:
            vars(self).update(vars(engine))
            self._settings, self.in_flight = settings, settings.in_flight

        def close(self) -> None:
            pass

    def generate(output: Path, settings: GenerationSettings) -> GenerationSummary:
        console = Console(file=io.StringIO())
        conversations, _ = read_prompts(str(prompts))
        return generate_data(str(target), conversations, output, Again, settings, console)

    proposer = proposer_class or names.CPU_PROPOSER
    with patch.object(names, "CPU_PROPOSER", proposer):
        engine = OfflineEngine(Target.open(target), settings)
    try:
        yield generate
    finally:
        engine.close()


def answers_of(row: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """Begin and end of each answer in a row."""
    mask = [*row["assistant_mask"], False]
    start = 0
    while True in mask[start:]:
        start = mask.index(True, start)
        end = mask.index(False, start)
        yield start, end
        start = end


def write_oracle_of(data: Path, target: Path, drafter: Path) -> None:
    from redrafter_testing.oracles.oracle import write_oracle

    known = [
        (row["input_ids"][:start], row["input_ids"][start:end])
        for row in read_dataset(data)[1]
        for start, end in answers_of(row)
    ]
    write_oracle(drafter, target, known)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return list(read_dataset(folder)[1])


def test_greedy_answers_are_those_of_transformers(runs: Runs, chat_target: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(chat_target, dtype=torch.float32)
    ended = 0
    rows = rows_of(runs.greedy)
    for row in rows:
        for start, end in answers_of(row):
            prompt = torch.tensor([row["input_ids"][:start]])
            written = model.generate(
                prompt, max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=EOS
            )
            assert row["input_ids"][start:end] == written[0, start:].tolist()
            ended += row["input_ids"][end - 1] == EOS
    assert {row["conversation"] for row in rows} == set(range(NUM_PROMPTS))
    assert sum(len(list(answers_of(row))) for row in rows) == NUM_PROMPTS * 3 // 2
    assert 0 < ended < NUM_PROMPTS, "some answers must end by themselves, and some not"


def test_with_a_drafter_the_data_is_the_same(runs: Runs) -> None:
    for row, drafted in zip(rows_of(runs.greedy), rows_of(runs.drafted), strict=True):
        for column in ("conversation", "input_ids", "assistant_mask"):
            assert row[column] == drafted[column]
    per_step = runs.drafted_summary.tokens_per_step
    assert per_step is not None and per_step > 1.2, "little was accepted"
    assert "tokens per target step" in str(runs.drafted_summary)


def command_of_sampled(target: Path, prompts: Path, output: Path) -> list[object]:
    """What writes `runs.sampled`, as arguments of vllm-redrafter."""
    sampling = SAMPLED.sampling
    return [
        *("generate-data", target, "--prompts", prompts, "--output", output),
        *("--temperature", sampling.temperature, "--top-p", sampling.top_p),
        *("--top-k", sampling.top_k, "--seed", sampling.seed),
        *("--max-tokens", MAX_TOKENS, "--dtype", "float32"),
        *("--engine-args", '{"enforce_eager": true}'),
        *("--shard-size", "4", "--in-flight", "4"),
    ]


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[dict[str, str]]:
    """A cluster of Ray, with a GPU in each node."""
    lines = {"COLUMNS": "300"}  # with paths in them, of what workers print
    with ray_cluster(forked_engine.ENVIRONMENT | lines, 1, 1) as environment:
        yield os.environ | environment


def process_of(lock: Path) -> int | None:
    """The number of the process that holds it."""
    with suppress(FileNotFoundError), lock.open("rb+") as file:
        asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, number = struct.unpack("hhqqi4x", fcntl.fcntl(file, fcntl.F_GETLK, asked))
        return None if kind == fcntl.F_UNLCK else number
    return None


def test_a_part_on_ray_is_killed_and_started_again_and_the_data_is_that_of_one_process(
    runs: Runs, chat_target: Path, prompts: Path, two_nodes: dict[str, str], tmp_path: Path
) -> None:
    data, log = tmp_path / "data", tmp_path / "log"
    command = [
        *(sys.executable, "-P", RAY_WORKERS, "--parts", "2"),
        *command_of_sampled(chat_target, prompts, data),
        *("--engine-args", '{"gpu_memory_utilization": 0.1}'),  # both are on one machine here
    ]
    with (
        log.open("w") as output,
        process_trees.started(
            command, env=two_nodes, stdout=output, stderr=subprocess.STDOUT
        ) as process,
    ):
        while not any(shard % 2 == 0 for shard in DatasetInfo.finished_shards(data)):
            assert process.poll() is None, log.read_text()
            time.sleep(0.005)
        holder = process_of(data / ".part-1-of-2.lock")
        assert holder is not None, "killed too late to say anything"
        killed = psutil.Process(holder)
        workers = killed.children(recursive=True)
        killed.kill()
        kept = {path: path.read_bytes() for path in data.glob("*.parquet")}
        assert process.wait(timeout=300) == 0, log.read_text()
    _, left = psutil.wait_procs([killed, *workers], timeout=30)
    assert workers and not left, "they keep the device that the next process needs"
    assert re.search(r"\d shards were there already", log.read_text()), "it was started again"
    assert all(path.read_bytes() == content for path, content in kept.items())
    assert rows_of(data) == rows_of(runs.sampled)


def test_more_sampled_prompts_than_a_step_reads_are_all_answered(target: Path) -> None:
    length = 100
    num = 2 * CPU_BATCHED_TOKENS // length
    turns = deque(OpenTurn(i, 0, [5 + i % 40] * length, 3, seed=i) for i in range(num))
    engine = OfflineEngine(Target.open(target), replace(SAMPLED, in_flight=num))
    try:
        answers = list(engine.answers(turns))
    finally:
        engine.close()
    assert sorted(answer.conversation for answer in answers) == list(range(num))


def test_the_demos_process_keeps_what_each_step_put_out(target: Path, tmp_path: Path) -> None:
    prompts = [[5, 6, 7], [8, 9], list(range(10, 30))]
    job = Job(str(target), None, "float32", [Round(prompts, 12, 1), Round(prompts, 12, 2)])
    results = [decoded.answers for decoded in decode_in_vllm(tmp_path, job)]
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    for prompt, *answers in zip(prompts, *results, strict=True):
        written = model.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=EOS
        )
        assert answers == [[[token] for token in written[0, len(prompt) :].tolist()]] * 2
