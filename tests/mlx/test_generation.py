# SPDX-License-Identifier: Apache-2.0
"""`generate` and `stream_generate` beside mlx-lm's own: the same answers, in fewer steps."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest

mx = pytest.importorskip("mlx.core")

import mlx.nn as nn
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from redrafter_testing.models.reciting_target import ANSWERS
from vllm_redrafter.drafting.drafting import Drafting
from vllm_redrafter.mlx import Drafter, load_drafter, stream_generate
from vllm_redrafter.mlx.drafter import ExploredProposer
from vllm_redrafter.utils.errors import ConfigError

QUESTIONS = [*ANSWERS, "value 3", "names of lists", "Paris"]
METHODS: dict[str, dict[str, Any]] = {
    "trees": {"adaptive": False},
    "chains": {"adaptive": False, "tree": "chain", "context_matches": 0},
    "budget": {"adaptive": True},
    "matches alone": {"adaptive": False},
}


class NeverDrafting(Drafting):
    """Plain decoding by our own steps."""

    def plan(self, *_: Any) -> None:
        return None

    def skips_draft(self, *_: Any) -> bool:
        return True


@pytest.fixture(scope="module")
def drafters(pair: Any) -> dict[str, Drafter]:
    drafter = {name: None if name == "matches alone" else pair.drafter for name in METHODS}
    made = {
        name: load_drafter(drafter[name], pair.model, **speculation)
        for name, speculation in METHODS.items()
    }
    trees = made["trees"]
    plain = NeverDrafting(ExploredProposer(trees.config), trees.stats)
    return {**made, "plain": Drafter(trees.target, trees.head, trees.config, plain)}


def answered(
    pair: Any, drafter: Drafter | None, question: str, most: int = 60, **arguments: Any
) -> list[Any]:
    prompt = arguments.pop("prompt", None)
    prompt = pair.prompt(question) if prompt is None else prompt
    given = pair.model, pair.tokenizer, prompt, most, drafter
    return [*stream_generate(*given, **arguments)]


def tokens(responses: list[Any]) -> list[int]:
    return [response.token for response in responses]


@pytest.mark.parametrize("method", [*METHODS, "plain"])
def test_greedy_answers_are_mlx_lm_s(pair: Any, drafters: dict[str, Drafter], method: str) -> None:
    steps = num_tokens = 0
    for question in QUESTIONS:
        ours = answered(pair, drafters[method], question)
        theirs = answered(pair, None, question)
        for response in (*ours, *theirs):
            response.prompt_tps = response.generation_tps = response.peak_memory = 0
        for mine, other in zip(ours, theirs, strict=True):
            assert mx.allclose(mine.logprobs, other.logprobs, atol=1e-3)
            mine.logprobs = other.logprobs = other.from_draft = None
            steps += not mine.from_draft
            mine.from_draft = None
        assert ours == theirs
        num_tokens += len(ours)
    if method != "plain":
        assert steps < 0.9 * num_tokens


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_a_seed_gives_the_same_answer_whatever_is_drafted(
    pair: Any, drafters: dict[str, Drafter], temperature: float
) -> None:
    sampler = make_sampler(temperature, top_p=0.97, top_k=100)
    different = False
    for seed, question in enumerate(QUESTIONS[:4]):
        found = []
        for drafter in drafters.values():
            mx.random.seed(seed)
            found.append(tokens(answered(pair, drafter, question, 30, sampler=sampler)))
        assert all(answer == found[0] for answer in found)
        mx.random.seed(seed + 100)
        other = tokens(answered(pair, drafters["trees"], question, 30, sampler=sampler))
        different |= other != found[0]
    assert different or temperature < 2


@pytest.mark.parametrize("method", [*METHODS, "plain"])
def test_logits_processors_see_the_tokens_that_mlx_lm_shows_them(
    pair: Any, drafters: dict[str, Drafter], method: str
) -> None:
    processors = make_logits_processors({7: 2.0}, repetition_penalty=1.4, frequency_penalty=0.3)
    for question in QUESTIONS[:3]:
        ours = answered(pair, drafters[method], question, 24, logits_processors=processors)
        theirs = answered(pair, None, question, 24, logits_processors=processors)
        assert tokens(ours) == tokens(theirs)


@pytest.mark.parametrize("most", [1, 2, 3, 9])
def test_an_answer_has_as_many_tokens_as_were_asked_for(
    pair: Any, drafters: dict[str, Drafter], most: int
) -> None:
    for drafter in drafters.values():
        responses = answered(pair, drafter, "list values", most)
        assert tokens(responses) == tokens(answered(pair, None, "list values", most))
        assert responses[-1].finish_reason == "length"


@pytest.mark.parametrize("method", [*METHODS, "plain"])
@pytest.mark.parametrize("taken", [1, 2, 3, 4, 5, 11, 60])
def test_an_answer_left_at_any_token_leaves_the_prompt_cache_as_mlx_lm_does(
    pair: Any, drafters: dict[str, Drafter], method: str, taken: int
) -> None:
    drafter = drafters[method]
    cache = drafter.target.make_cache()
    prompt = pair.prompt("list values")
    given = pair.model, pair.tokenizer, prompt, 40, drafter
    answer = stream_generate(*given, prompt_cache=cache)
    said = [response.token for response in islice(answer, taken)]
    answer.close()
    assert [layer.offset for layer in cache] == [len(prompt) + len(said)] * len(cache)
    following = pair.prompt("names")
    more = tokens(answered(pair, drafter, "", 12, prompt=following, prompt_cache=cache))
    whole = [*prompt, *said, *following]
    assert more == tokens(answered(pair, None, "", 12, prompt=whole))


class Failure(Exception):
    pass


@pytest.mark.parametrize("method", [*METHODS, "plain"])
@pytest.mark.parametrize("calls", [1, 2, 3, 9])
def test_a_failing_sampler_is_heard_and_leaves_a_usable_prompt_cache(
    pair: Any, drafters: dict[str, Drafter], method: str, calls: int
) -> None:
    left = [calls]

    def failing(logprobs: mx.array) -> mx.array:
        left[0] -= 1
        if not left[0]:
            raise Failure
        return logprobs.argmax(axis=-1)

    cache, said = drafters[method].target.make_cache(), []
    prompt = pair.prompt("list values")
    given = pair.model, pair.tokenizer, prompt, 40, drafters[method]
    with pytest.raises(Failure):
        for response in stream_generate(*given, sampler=failing, prompt_cache=cache):
            said.append(response.token)
    text = [*prompt, *said]
    assert [layer.offset for layer in cache] == [len(text) - 1] * len(cache)
    more = tokens(answered(pair, None, "", 12, prompt=text[-1:], prompt_cache=cache))
    assert said + more == tokens(answered(pair, None, "list values", 40))[: len(said) + 12]


def test_a_generator_that_is_closed_late_leaves_a_later_answer_in_the_cache(
    pair: Any, drafters: dict[str, Drafter]
) -> None:
    cache = drafters["trees"].target.make_cache()
    given = pair.model, pair.tokenizer
    first = stream_generate(*given, pair.prompt("names"), 40, drafters["trees"], prompt_cache=cache)
    assert len([*islice(first, 3)]) == 3
    answered(pair, drafters["trees"], "list values", 20, prompt_cache=cache)
    length = cache[0].offset
    first.close()
    assert cache[0].offset == length


@pytest.mark.parametrize("method", ["plain", "trees"])
def test_what_is_read_of_a_token_does_not_wait_for_the_next_one(
    pair: Any, drafters: dict[str, Drafter], method: str
) -> None:
    stream = mx.default_stream(mx.default_device())
    given = pair.model, pair.tokenizer, pair.prompt("names"), 20, drafters[method]
    for response in stream_generate(*given):
        assert mx.default_stream(mx.default_device()) == stream
        assert response.logprobs[response.token].item() < 0


@pytest.mark.parametrize("size", [1, 5, 2048])
def test_progress_is_told_as_mlx_lm_tells_it(
    pair: Any, drafters: dict[str, Drafter], size: int
) -> None:
    told: list[list[tuple[int, int]]] = [[], []]
    for seen, drafter in zip(told, (drafters["trees"], None), strict=True):
        answered(
            pair,
            drafter,
            "names",
            3,
            prefill_step_size=size,
            prompt_progress_callback=lambda *at, seen=seen: seen.append(at),
        )
    assert told[0] == told[1]


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_targets_answer_as_mlx_lm_has_them_answer(
    load_pair: Callable[[], Any], bits: int
) -> None:
    pair = load_pair()
    nn.quantize(pair.model, 64, bits)
    drafter = load_drafter(pair.drafter, pair.model, adaptive=False)
    for question in ANSWERS:
        ours, theirs = (answered(pair, d, question, 24) for d in (drafter, None))
        assert tokens(ours) == tokens(theirs)
        assert sum(response.from_draft for response in ours) > 8


def test_what_speculation_does_not_take_is_refused(
    pair: Any, drafters: dict[str, Drafter], load_pair: Callable[[], Any]
) -> None:
    drafter = drafters["trees"]
    with pytest.raises(ConfigError, match=r"kv_bits=4 is refused.*without draft_model"):
        answered(pair, drafter, "names", kv_bits=4)
    with pytest.raises(ConfigError, match="made for another model object"):
        answered(load_pair(), drafter, "names")
    with pytest.raises(ValueError, match="max_tokens must not be 0"):
        answered(pair, drafter, "names", 0)
    with pytest.raises(ValueError, match="the prompt is empty"):
        [*stream_generate(pair.model, pair.tokenizer, [], 5, drafter)]
