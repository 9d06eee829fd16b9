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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import psutil
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from redrafter_testing import process_trees
from redrafter_testing.engines import forked_engine
from redrafter_testing.engines.fake_engine import APPENDING
from redrafter_testing.engines.generation_runs import with_template
from redrafter_testing.engines.ray_cluster import ray_cluster
from redrafter_testing.models.tiny_models import EOS, make_drafter
from redrafter_testing.oracles import CPU_ORACLE
from redrafter_testing.oracles.oracle import write_oracle
from vllm_redrafter.cli.demo.engine import Round, sources_of, vllm_process
from vllm_redrafter.data.dataset import DatasetInfo, read_dataset
from vllm_redrafter.data.generation import GenerationSummary, generate_data
from vllm_redrafter.data.prompts import read_prompts
from vllm_redrafter.data.settings import EngineSettings, GenerationSettings, SamplingSettings
from vllm_redrafter.data.target import Target
from vllm_redrafter.data.turns import OpenTurn
from vllm_redrafter.drafting.recorder import RecordedNode, RecordedStep
from vllm_redrafter.offline.generation import CPU_BATCHED_TOKENS, OfflineEngine
from vllm_redrafter.utils import names

pytestmark = pytest.mark.engine

RAY_WORKERS = Path(__file__).parents[2] / "examples" / "ray_workers.py"
MAX_TOKENS = 40
GREEDY = GenerationSettings(
    sampling=SamplingSettings(temperature=0.0, max_tokens=MAX_TOKENS, dtype="float32"),
    shard_size=4,
    in_flight=4,
    engine=EngineSettings(engine_args='{"enforce_eager": true}'),
)
SAMPLED = replace(
    GREEDY, sampling=replace(GREEDY.sampling, temperature=0.9, top_p=0.95, top_k=50, seed=3)
)
NUM_PROMPTS = 32


class Runs(NamedTuple):
    """Folders that were written in one go, and what was said about them."""

    greedy: Path
    sampled: Path
    drafted: Path
    accepted_per_draft: float
    conversations: list[int]
    """Those with an answer, of more sampled prompts than a step reads."""


@pytest.fixture(scope="module")
def chat_target(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with a chat template, so that conversations have several turns."""
    folder = shutil.copytree(target, tmp_path_factory.mktemp("chat") / "target")
    return with_template(folder, APPENDING)


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
    greedy, sampled, drafted = (folder / name for name in ("greedy", "sampled", "drafted"))
    length = 100
    num = 2 * CPU_BATCHED_TOKENS // length
    turns = deque(OpenTurn(i, 0, [5 + i % 40] * length, 3, seed=i) for i in range(num))
    with shared_engine(chat_target, replace(SAMPLED, in_flight=num), prompts) as (engine, generate):
        conversations = sorted(answer.conversation for answer in engine.answers(turns))
        generate(greedy, GREEDY)
        generate(sampled, SAMPLED)
    drafter = make_drafter(folder / "drafter")
    write_oracle(drafter, chat_target, list(answers_of(rows_of(greedy))))
    speculation = {"model": str(drafter), "num_speculative_tokens": 15}
    arguments = {"enforce_eager": True, "disable_log_stats": False}
    arguments["speculative_config"] = speculation
    settings = replace(GREEDY, engine=EngineSettings(engine_args=json.dumps(arguments)))
    with (
        patch.object(names, "CPU_PROPOSER", CPU_ORACLE),
        shared_engine(chat_target, settings, prompts) as (engine, generate),
    ):
        generate(drafted, settings)
        counters: dict[str, Any] = {metric.name: metric for metric in engine._llm.get_metrics()}
    accepted, drafts = (
        counters[f"vllm:spec_decode_num_{name}"].value for name in ("accepted_tokens", "drafts")
    )
    return Runs(greedy, sampled, drafted, accepted / drafts, conversations)


@contextmanager
def shared_engine(
    target: Path, settings: GenerationSettings, prompts: Path
) -> Iterator[tuple[OfflineEngine, Callable[[Path, GenerationSettings], GenerationSummary]]]:
    """An engine, which takes long to start, and `generate(output, settings)` in it."""
    engine = OfflineEngine(Target.open(target), settings)

    def again(_: Target, settings: GenerationSettings) -> OfflineEngine:
        engine._settings = settings
        return engine

    def generate(output: Path, settings: GenerationSettings) -> GenerationSummary:
        conversations, _ = read_prompts(str(prompts))
        console = Console(file=io.StringIO())
        with patch.object(OfflineEngine, "close"):
            return generate_data(str(target), conversations, output, again, settings, console)

    try:
        yield engine, generate
    finally:
        engine.close()


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return list(read_dataset(folder)[1])


def answers_of(rows: list[dict[str, Any]]) -> Iterator[tuple[list[int], list[int]]]:
    """Each answer behind the tokens before it."""
    for row in rows:
        tokens, mask = row["input_ids"], [False, *row["assistant_mask"], False]
        ends = [place for place, (a, b) in enumerate(pairwise(mask)) if a != b]
        for start, end in zip(ends[::2], ends[1::2], strict=True):
            yield tokens[:start], tokens[start:end]


def written_by(target: Path, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """What transformers answer greedily."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    limits = {"max_new_tokens": max_tokens, "do_sample": False, "pad_token_id": EOS}
    texts = (model.generate(torch.tensor([prompt]), **limits)[0].tolist() for prompt in prompts)
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def test_greedy_answers_are_those_of_transformers(runs: Runs, chat_target: Path) -> None:
    rows = rows_of(runs.greedy)
    prompts, answers = map(list, zip(*answers_of(rows), strict=True))
    assert answers == written_by(chat_target, prompts, MAX_TOKENS)
    assert {row["conversation"] for row in rows} == set(range(NUM_PROMPTS))
    assert len(answers) == NUM_PROMPTS * 3 // 2
    ended = sum(answer[-1] == EOS for answer in answers)
    assert 0 < ended < NUM_PROMPTS, "some answers must end by themselves, and some not"


def test_with_a_drafter_the_data_is_the_same(runs: Runs) -> None:
    assert rows_of(runs.greedy) == rows_of(runs.drafted)
    assert runs.accepted_per_draft > 0.2, "little was accepted"


def test_more_sampled_prompts_than_a_step_reads_are_all_answered(runs: Runs) -> None:
    assert runs.conversations == list(range(2 * CPU_BATCHED_TOKENS // 100))


def process_of(lock: Path) -> int | None:
    """The number of the process that holds it."""
    with suppress(FileNotFoundError), lock.open("rb+") as file:
        asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, number = struct.unpack("hhqqi4x", fcntl.fcntl(file, fcntl.F_GETLK, asked))
        return None if kind == fcntl.F_UNLCK else number


def test_a_part_on_ray_is_killed_and_started_again_and_the_data_is_that_of_one_process(
    runs: Runs, chat_target: Path, prompts: Path, tmp_path: Path
) -> None:
    """Two nodes, with a GPU in each."""
    data, log = tmp_path / "data", tmp_path / "log"
    sampling = SAMPLED.sampling
    command = [
        *(sys.executable, "-P", RAY_WORKERS, "--parts", "2"),
        *("generate-data", chat_target, "--prompts", prompts, "--output", data),
        *("--temperature", sampling.temperature, "--top-p", sampling.top_p),
        *("--top-k", sampling.top_k, "--seed", sampling.seed),
        *("--max-tokens", MAX_TOKENS, "--dtype", "float32"),
        *("--shard-size", "4", "--in-flight", "4"),
        *("--engine-args", '{"gpu_memory_utilization": 0.1}'),  # both are on one machine here
    ]
    wide = {"COLUMNS": "300"}  # lines that workers print, with paths in them
    with (
        ray_cluster(forked_engine.ENVIRONMENT | wide, 1, 1) as nodes,
        log.open("w") as output,
        process_trees.started(
            command, env=os.environ | nodes, stdout=output, stderr=subprocess.STDOUT
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


def test_the_demos_processes_keep_what_each_step_put_out(target: Path, tmp_path: Path) -> None:
    prompts = [[5, 6, 7], [8, 9], list(range(10, 30))]
    expected = written_by(target, prompts, 12)
    given = {"target": str(target), "dtype": "float32", "max_num_seqs": 2}
    matches = {"method": "redrafter", "num_speculative_tokens": 4, "adaptive": False}
    with vllm_process(tmp_path, **given) as plain, vllm_process(tmp_path, matches, **given) as own:
        decoded, told = plain(Round(prompts, 12, 2)), plain(Round(prompts, 1, 2, candidates=3))
        _, recorded = (own(Round(prompts, 12, 1, is_recorded=True)) for _ in range(2))
        assert plain(Round([], 1, 2, candidates=3)).candidates == []
    assert decoded.answers == [[[token] for token in answer] for answer in expected]
    assert [[*chain(*steps)] for steps in recorded.answers] == expected
    for steps, sources in zip(recorded.answers, recorded.sources, strict=True):  # no drafter
        whole = chain(*(["match"] * (len(step) - 1) + ["target"] for step in steps))
        assert sources[:-1] == [*whole][:-1]
    assert "match" in chain(*recorded.sources)
    assert [max(each, key=itemgetter(1))[0] for each in told.candidates] == [a[0] for a in expected]


def test_what_is_left_of_a_cut_step_has_no_token_of_the_targets_own() -> None:
    step = RecordedStep([RecordedNode(5, 0, 1, 0.5, 3, True, True)], [5, 6, 7], 0.1)
    assert [sources_of([5, 6, 7][:n], step)[-1] for n in (1, 2, 3)] == [
        "match",
        "drafter",
        "target",
    ]
