# SPDX-License-Identifier: Apache-2.0
"""Sampled output has the target's distribution: the joint of three tokens, through real vLLM."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare
from vllm import SamplingParams

from redrafter_testing.engines.cpu_engine import cpu_engine
from redrafter_testing.engines.forked_engine import Engine
from redrafter_testing.models.tiny_models import make_drafter, make_target
from redrafter_testing.oracles import biased_rule
from redrafter_testing.requests.workloads import Repeated
from redrafter_testing.shared_results import made_once

pytestmark = pytest.mark.engine

VOCAB = 8
PROMPT = [2, 3, 5, 7, 4, 6]
SAMPLES = 5_000
# A correct engine fails by chance once in a million runs; the biased rule is far below, from as
# many samples.
SIGNIFICANCE = 1e-6


small_target = made_once(make_target, vocab_size=VOCAB, seed=3)
small_drafter = made_once(make_drafter, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def llm(small_target: Path, small_drafter: Path) -> Iterator[Engine]:
    config = {
        "model": str(small_drafter),
        "num_speculative_tokens": 12,
        "adaptive": False,
        "beam_width": 4,
        "beam_length": 3,
    }
    with cpu_engine(
        small_target, speculative_config=config, max_num_seqs=256, max_num_batched_tokens=8192
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def logits(small_target: Path) -> dict[tuple[int, ...], torch.Tensor]:
    """The target's next-token logits after the prompt and each of up to two tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(small_target, dtype=torch.float32)
    table = {}
    for length in range(3):
        for tokens in product(range(VOCAB), repeat=length):
            with torch.inference_mode():
                out = model(torch.tensor([[*PROMPT, *tokens]])).logits[0, -1]
            table[tokens] = out.double()
    return table


def joint(
    logits: dict[tuple[int, ...], torch.Tensor], temperature: float, top_p: float
) -> torch.Tensor:
    """[V^3], the exact probability of each sequence of three tokens."""

    def conditional(prefix: tuple[int, ...]) -> torch.Tensor:
        probabilities = (logits[prefix] / temperature).softmax(dim=-1)
        ascending, order = probabilities.sort()
        dropped = order[ascending.cumsum(dim=0) <= 1 - top_p]
        probabilities[dropped] = 0
        return probabilities / probabilities.sum()

    cells = []
    for a, b in product(range(VOCAB), repeat=2):
        prefix = conditional(())[a] * conditional((a,))[b]
        cells.append(prefix * conditional((a, b)))
    return torch.cat(cells)


def sample(llm: Engine, temperature: float, top_p: float) -> torch.Tensor:
    """[V^3], how often each sequence of three tokens came."""
    params = SamplingParams(
        temperature=temperature, top_p=top_p, max_tokens=3, ignore_eos=True, detokenize=False
    )
    llm.rpc("reset_redrafter_stats")
    counts = llm.run(Repeated(PROMPT, params, SAMPLES))
    return torch.tensor([counts[cell] for cell in product(range(VOCAB), repeat=3)])


def p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Chi-square; cells with an expectation below 5 are pooled, impossible ones must be empty."""
    expected = probabilities * counts.sum()
    assert counts[expected == 0].sum() == 0, "a token that top-p excludes was sampled"
    rare = expected < 5
    observed = torch.cat([counts[~rare], counts[rare].sum().unsqueeze(0)])
    expected = torch.cat([expected[~rare], expected[rare].sum().unsqueeze(0)])
    kept = expected > 0
    return float(chisquare(observed[kept], expected[kept]).pvalue)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.9)])
def test_the_joint_of_three_tokens_is_the_target_s(
    llm: Engine, logits: dict[tuple[int, ...], torch.Tensor], temperature: float, top_p: float
) -> None:
    counts = sample(llm, temperature, top_p)
    stats = llm.rpc("redrafter_stats")[0]
    assert stats["sampled_tokens"] > 1.3 * stats["verifications"], "trees were hardly used"
    assert p_value(counts, joint(logits, temperature, top_p)) > SIGNIFICANCE


def test_a_biased_rule_fails_the_same_test(
    llm: Engine, logits: dict[tuple[int, ...], torch.Tensor]
) -> None:
    llm.rpc(biased_rule.use)  # to the end of this engine: the last test of the module
    assert p_value(sample(llm, 1.0, 1.0), joint(logits, 1.0, 1.0)) < SIGNIFICANCE
