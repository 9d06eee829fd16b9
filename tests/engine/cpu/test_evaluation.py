# SPDX-License-Identifier: Apache-2.0
"""What `evaluate` says of a trained drafter is what vLLM reports when it serves it."""

import io
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from rich.console import Console
from vllm import SamplingParams

from redrafter_testing.engines.cpu_engine import cpu_engine
from redrafter_testing.models.training_data import PROMPT_LENGTH, write_data
from redrafter_testing.requests.answers import single_tokens_of
from redrafter_testing.requests.workloads import Workload
from vllm_redrafter.config import ReDrafterConfig
from vllm_redrafter.data.rows import Row
from vllm_redrafter.evaluation.evaluate import EvaluationJob, evaluate
from vllm_redrafter.replay.estimate import Acceptance
from vllm_redrafter.training.plan import TrainingJob
from vllm_redrafter.training.run import train
from vllm_redrafter.training.training_config import TrainingConfig

pytestmark = pytest.mark.engine

SHAPE = ReDrafterConfig(num_speculative_tokens=9, beam_width=3, beam_length=4)
MAX_TOKENS = 40


@pytest.fixture
def written(target: Path, tmp_path: Path) -> tuple[Path, list[Row]]:
    folder = tmp_path / "data"
    folder.mkdir()
    return folder, write_data(folder, target, num=24, max_tokens=MAX_TOKENS)


@pytest.fixture
def trained(target: Path, written: tuple[Path, list[Row]], tmp_path: Path) -> Iterator[Path]:
    """A drafter that learnt the very answers by heart: it drafts well, and not perfectly.

    It reads layers 1 and 2 of the target, and drafts 300 tokens.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    config = TrainingConfig(
        max_steps=120,
        batch_size=4,
        micro_batch_size=4,
        block_length=64,
        unroll_steps=SHAPE.beam_length,
        learning_rate=3e-3,
        warmup_steps=10,
        held_out=1,
        evaluate_every=1000,
        draft_vocab_size=300,
    )
    asked = TrainingJob(str(target), (written[0],), tmp_path / "drafter", config, SHAPE)
    train(asked, Console(file=io.StringIO()))
    torch.set_num_threads(threads)
    yield tmp_path / "drafter"
    AcceleratorState._reset_state(reset_partial_state=True)


def test_vllm_reports_the_tokens_per_step_that_evaluate_finds(
    target: Path, written: tuple[Path, list[Row]], trained: Path
) -> None:
    folder, rows = written
    evaluation = evaluate(EvaluationJob(str(target), str(trained), (folder,), [SHAPE]))
    [result] = evaluation.results
    with_matches = sum(evaluation.by_block["drafter, own text"], Acceptance(0, 0))
    found = {0: result.acceptance, SHAPE.context_matches: with_matches}
    assert 1.5 < found[0].tokens_per_step < 5

    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, detokenize=False)
    prompts = [row.input_ids[:PROMPT_LENGTH] for row in rows]
    for matches, acceptance in found.items():
        shape = replace(SHAPE, adaptive=False, context_matches=matches, earlier_answers=0)
        with cpu_engine(target, speculative_config={"model": str(trained), **asdict(shape)}) as llm:
            answers = llm.run(Workload(prompts, [params] * len(prompts)))
            stats = llm.rpc("redrafter_stats")[0]
        assert single_tokens_of(answers) == [row.input_ids[PROMPT_LENGTH:] for row in rows]
        served = stats["sampled_tokens"] / stats["verifications"]
        print(f"{matches} matches: evaluate {acceptance.tokens_per_step:.4f}, vLLM {served:.4f}")
        assert served == pytest.approx(acceptance.tokens_per_step, rel=0.03)
