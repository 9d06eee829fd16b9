# SPDX-License-Identifier: Apache-2.0
"""Tokens along trees against plain decoding's, through vLLM's own sampler and processors."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.logits_processor import BatchUpdateBuilder, LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from redrafter_testing.algorithm.tree_batches import token_trees
from vllm_redrafter.engine.cpu.v1.path_sampler import sample_paths, sample_roots

VOCAB = 6
PROMPT = [1, 2, 2]
BEFORE = [3, 3, 0]
"""What each request has output before the step."""

PARAMETERS = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logit_bias": {4: 1.5}},
    {"temperature": 0.0, "min_tokens": 5, "stop_token_ids": [5]},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 1.0, "seed": 6, "top_p": 0.7},
    {"temperature": 1.3, "seed": 7, "top_k": 3, "min_p": 0.2},
    {"temperature": 1.0, "seed": 8, "presence_penalty": 1.0, "repetition_penalty": 1.5},
    {"temperature": 0.0, "frequency_penalty": 0.5, "logprobs": 2},
    {"temperature": 1.0, "seed": 9, "bad_words": ["x"]},
    {"temperature": 0.0, "logprobs": 4},
    {"temperature": 0.0, "logit_bias": {1: 1.5}, "logprob_token_ids": [2]},
    {"temperature": 1.0, "seed": 10, "logprob_token_ids": [5, 0, 3]},
]


def full_tree(depth: int = 3) -> tuple[list[int], list[int]]:
    """Parents and tokens of a tree that has a child for every token but the last."""
    parents, tokens, level = [0], [0], [0]
    for _ in range(depth):
        below = []
        for node in level:
            for token in range(VOCAB - 1):
                below.append(len(parents))
                parents.append(node)
                tokens.append(token)
        level = below
    return parents, tokens


def target(requests: int, nodes: int) -> Tensor:
    """[R, T, V] logits."""
    return 2.0 * torch.randn(requests, nodes, VOCAB, generator=torch.Generator().manual_seed(3))


def made(kinds: list[dict[str, Any]]) -> list[SamplingParams]:
    """As a server makes them of requests."""
    params = [SamplingParams(**kind) for kind in kinds]
    for each in params:
        each.update_from_generation_config({}, eos_token_id=None)
    return params


def processors(params: list[SamplingParams], outputs: list[list[int]]) -> LogitsProcessors:
    """vLLM's, told of requests as its batch tells them."""
    config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=16))
    kinds = (MinPLogitsProcessor, LogitBiasLogitsProcessor, MinTokensLogitsProcessor)
    made = [kind(config, torch.device("cpu"), False) for kind in kinds]
    update = BatchUpdateBuilder()
    for index, (of_request, output) in enumerate(zip(params, outputs, strict=True)):
        update.added.append((index, of_request, PROMPT, output))
    batch_update = update.get_and_reset(len(params))
    for processor in made:
        processor.update_state(batch_update)
    return LogitsProcessors(made)


def metadata(params: list[SamplingParams], outputs: list[list[int]]) -> SamplingMetadata:
    def values(name: str) -> Tensor:
        return torch.tensor([float(getattr(p, name)) for p in params])

    logprobs = [p.logprobs for p in params if p.logprobs is not None]
    return SamplingMetadata(
        temperature=values("temperature"),
        all_greedy=False,
        all_random=False,
        top_p=values("top_p"),
        top_k=torch.tensor([p.top_k if p.top_k > 0 else VOCAB for p in params]),
        generators={
            i: torch.Generator().manual_seed(p.seed)
            for i, p in enumerate(params)
            if p.seed is not None
        },
        max_num_logprobs=max(logprobs, default=None),
        logprob_token_ids={
            i: p.logprob_token_ids for i, p in enumerate(params) if p.logprob_token_ids
        },
        no_penalties=False,
        prompt_token_ids=torch.tensor([PROMPT] * len(params)),
        frequency_penalties=values("frequency_penalty"),
        presence_penalties=values("presence_penalty"),
        repetition_penalties=values("repetition_penalty"),
        output_token_ids=outputs,
        allowed_token_ids_mask=None,
        bad_words_token_ids={i: [[2], [1, 4]] for i, p in enumerate(params) if p.bad_words},
        logitsprocs=processors(params, outputs),
    )


def plain(
    params: SamplingParams, logits: Tensor, parents: list[int], tokens: list[int]
) -> tuple[list[int], list[LogprobsTensors | None], Tensor]:
    """A request's tokens and their logprobs, one after the other; and its generator's next."""
    output, node, logprobs = list(BEFORE), 0, []
    of_request = metadata([params], [output])
    while True:
        of_request.logitsprocs = processors([params], [output])
        found = sample_roots(Sampler(), logits[node : node + 1].clone(), of_request, np.zeros(1))
        logprobs.append(found.logprobs_tensors)
        output.append(int(found.sampled_token_ids))
        children = [n for n in range(1, len(parents)) if parents[n] == node]
        following = [n for n in children if tokens[n] == output[-1]]
        if not following:
            break
        node = following[0]
    return output[len(BEFORE) :], logprobs, next_of(of_request, 0)


def next_of(of_requests: SamplingMetadata, request: int) -> Tensor:
    """What a request's generator would give next; 0 where it has none."""
    generator = of_requests.generators.get(request)
    return torch.rand(1, generator=generator) if generator else torch.zeros(1)


@pytest.mark.parametrize("params", PARAMETERS, ids=str)
def test_the_tokens_are_those_of_plain_decoding_whatever_the_parameters(
    params: dict[str, Any],
) -> None:
    """Beside requests of all other kinds, whose paths end at other depths."""
    of_all = made([params, *PARAMETERS])
    parents, tokens = full_tree()
    trees = token_trees([parents] * len(of_all), len(parents), [tokens] * len(of_all))
    logits = target(len(of_all), len(parents))
    of_step = metadata(of_all, [list(BEFORE) for _ in of_all])
    first = torch.arange(len(of_all)) * len(parents)
    nothing = np.zeros(len(of_all), dtype=bool)
    flat = logits.flatten(0, 1).clone()
    output, accepted = sample_paths(Sampler(), flat, trees, first, of_step, nothing)
    for request, kind in enumerate(of_all):
        expected, logprobs, following = plain(kind, logits[request], parents, tokens)
        sampled = int(accepted.num_sampled[request])
        assert output.sampled_token_ids[request, :sampled].tolist() == expected
        assert torch.equal(next_of(of_step, request), following)
        if kind.num_logprobs is not None:
            assert output.logprobs_tensors is not None
            slots = slice(request * len(parents), request * len(parents) + sampled)
            found = [part[slots] for part in output.logprobs_tensors[:3]]
            for depth, of_token in enumerate(logprobs):
                assert of_token is not None
                for part, of_plain in zip(found, of_token[:3], strict=True):
                    columns = [slice(width) for width in of_plain.shape[1:]]
                    torch.testing.assert_close(part[depth : depth + 1, *columns], of_plain)
    assert len(set(accepted.num_sampled.tolist())) > 1


@pytest.mark.parametrize(
    ("kind", "calls"),
    [
        ({}, 1),
        ({"logit_bias": {4: 1.5}}, 4),
        ({"min_tokens": 5, "stop_token_ids": [5]}, 4),
        ({"frequency_penalty": 0.5}, 4),
        ({"bad_words": ["x"]}, 4),
        ({"logprobs": 2}, 4),
    ],
    ids=str,
)
def test_where_only_the_largest_logit_counts_it_is_looked_for_once(
    kind: dict[str, Any], calls: int
) -> None:
    sampler, called = Sampler(), []
    sampler.register_forward_pre_hook(lambda *_: called.append(1))
    of_all = made([{"temperature": 0.0, **of} for of in (kind, {})])
    parents, tokens = full_tree()
    trees = token_trees([parents] * 2, len(parents), [tokens] * 2)
    logits = target(2, len(parents))
    logits[..., VOCAB - 1] = -10.0
    of_step = metadata(of_all, [list(BEFORE) for _ in of_all])
    of_step.all_greedy, of_step.no_penalties = True, "frequency_penalty" not in kind
    first, nothing = torch.arange(2) * len(parents), np.zeros(2, dtype=bool)
    output, _ = sample_paths(sampler, logits.flatten(0, 1), trees, first, of_step, nothing)
    assert len(called) == calls
    for request, of_request in enumerate(of_all):
        expected, *_ = plain(of_request, logits[request], parents, tokens)
        assert output.sampled_token_ids[request].tolist()[: len(expected)] == expected


def test_the_generator_of_a_request_whose_sample_is_discarded_stays() -> None:
    params = [SamplingParams(temperature=1.0, seed=4)] * 2
    of_step = metadata(params, [list(BEFORE), list(BEFORE)])
    trees = token_trees([[0], [0]], 1)
    discarded = np.array([True, False])
    sample_paths(Sampler(), target(1, 2)[0], trees, torch.arange(2), of_step, discarded)
    fresh = torch.rand(1, generator=torch.Generator().manual_seed(4))
    assert torch.equal(next_of(of_step, 0), fresh)
    assert not torch.equal(next_of(of_step, 1), fresh)
