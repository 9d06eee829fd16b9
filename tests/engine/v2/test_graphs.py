# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs as vLLM captures and replays them, on recordings in place of graphs.

Output is as plain decoding's: nothing that a graph holds depends on what it was captured with, nor
on how keys are split into parts.
"""

from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from vllm import SamplingParams

from redrafter_testing.engines import inside_worker
from redrafter_testing.engines.forked_engine import Engine, reset_prefix_cache
from redrafter_testing.engines.interpreted_engine import interpreted_engine
from redrafter_testing.gpu import recorded_graphs, torch_flash_attention
from redrafter_testing.requests import few_tokens, workloads
from vllm_redrafter.data.target import Target
from vllm_redrafter.replay.target import hidden_states, load_target

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def graphs(few_tokens_target: Path, few_tokens_fused_drafter: Path) -> Iterator[Engine]:
    """The drafter reads a layer's hidden states, too: of what graphs hold, the most."""
    with interpreted_engine(
        few_tokens_target,
        setup=recorded_graphs.use_as_a_gpu_with_long_contexts,
        enforce_eager=False,
        speculative_config={
            "model": str(few_tokens_fused_drafter),
            "num_speculative_tokens": 8,
            "context_matches": 0,
            "adaptive": False,
            "num_speculative_tokens_per_batch_size": [[1, 4, 8], [5, 8, 4]],
        },
        **few_tokens.TIGHT,
    ) as llm:
        yield llm


def answers_and_accepted(llm: Engine, sampling: str) -> tuple[list[list[int]], float]:
    """The requests' tokens, and how many of them were accepted drafts; from an empty cache."""
    llm.call(reset_prefix_cache)
    before = llm.accepted()
    return llm.tokens(few_tokens.requests(sampling)), llm.accepted() - before


def test_output_from_graphs_equals_plain_and_drafts_are_as_good(
    graphs: Engine, few_tokens_plain: dict[str, list[list[int]]]
) -> None:
    # K = 8 of 1 to 4 requests, K = 4 of 5 to 8; prompts in 64 and 120 rows.
    assert graphs.rpc(recorded_graphs.captured) == [{"model": 10, "draft": 4}]
    for sampling, expected in few_tokens_plain.items():
        graphs.rpc(recorded_graphs.replay, False)
        eager = answers_and_accepted(graphs, sampling)
        assert graphs.rpc(recorded_graphs.how_often_replayed) == [{}]
        graphs.rpc(recorded_graphs.replay, True)
        answers, accepted = answers_and_accepted(graphs, sampling)
        (replayed,) = graphs.rpc(recorded_graphs.how_often_replayed)
        assert answers == expected
        assert (answers, accepted) == eager
        assert accepted > 20, "trees were hardly used"
        assert replayed.keys() == {"model", "draft"} and min(replayed.values()) > 10, replayed
    assert graphs.counter("vllm:num_preemptions") > 0
    (split,) = graphs.rpc(recorded_graphs.how_keys_were_split)
    assert set(split) == {1, 2, 4}
    (called,) = graphs.rpc(torch_flash_attention.how_often_called)
    assert called["prompts"] > 20


def test_a_draft_of_4_beams_and_5_tokens_is_38_launches(graphs: Engine) -> None:
    ((launches, reads_table, same),) = graphs.rpc(recorded_graphs.draft_on_kernels)
    assert launches == 38
    assert reads_table and same


def test_the_memory_profile_has_all_nodes_logits_and_leaves_no_cache(graphs: Engine) -> None:
    """8 requests of 4 nodes and the root, where 4 of 8 nodes are fewer; then vLLM's 8 rows."""
    (profiled,) = graphs.rpc(recorded_graphs.what_was_profiled)
    assert profiled == {"logits": [40, 8], "freed": [True, True]}


def test_drafts_start_from_the_states_that_transformers_computes(
    graphs: Engine, few_tokens_target: Path
) -> None:
    """The last hidden state and the layer's, which training reads there: see `read_target`."""
    graphs.rpc(recorded_graphs.replay, True)
    graphs.rpc(inside_worker.keep_draft_starts)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    load = workloads.Workload(few_tokens.requests("greedy", count=1).prompts, [params])
    answers = graphs.tokens(load)
    (starts,) = graphs.rpc(attrgetter("starts"))
    texts = [prompt + tokens for prompt, tokens in zip(load.prompts, answers, strict=True)]
    model = load_target(Target.open(few_tokens_target))
    states_of = [hidden_states(model, (1,), input_ids=torch.tensor([text]))[0] for text in texts]
    states = torch.cat(states_of).unflatten(1, (2, -1))
    found = torch.tensor(starts).unflatten(1, (2, -1)).unsqueeze(1)
    apart = ((found - states).norm(dim=-1) / states.norm(dim=-1)).amax(dim=-1).amin(dim=1)
    # A request's last draft may start from tokens that are not output any more.
    assert len(starts) > 4 and (apart > 1e-3).sum() <= 1, apart
