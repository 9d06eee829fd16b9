# SPDX-License-Identifier: Apache-2.0
"""`stream_generate` gives mlx-lm's own output in fewer steps, whatever is drafted."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from redrafter_testing.models.reciting_target import ANSWERS
from vllm_redrafter.drafting.drafting import Drafting
from vllm_redrafter.mlx import Drafter, load_drafter, stream_generate
from vllm_redrafter.mlx.drafter import ExploredProposer
from vllm_redrafter.utils.errors import ConfigError

QUESTIONS = [*ANSWERS, "value 3", "names of lists", "Paris"]
CUT_SHORT = [("list values", most) for most in (1, 2, 3, 9)]
METHODS: dict[str, dict[str, Any]] = {
    "trees": {"adaptive": False},
    "chains": {"adaptive": False, "tree": "chain", "context_matches": 0},
    "budget": {"adaptive": True},
    "matches alone": {"adaptive": False},
}
PENALTIES = make_logits_processors({7: 2.0}, repetition_penalty=1.4, frequency_penalty=0.3)

every_method = pytest.mark.parametrize("method", [*METHODS, "plain"])


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


def tokens(responses: list[Any]) -> list[int]:
    return [response.token for response in responses]


@every_method
@pytest.mark.parametrize("processors", [None, PENALTIES], ids=["greedy", "penalties"])
def test_greedy_answers_are_mlx_lm_s(
    pair: Any, drafters: dict[str, Drafter], method: str, processors: Any
) -> None:
    drafted = num_tokens = 0
    for question, most in (*((question, 60) for question in QUESTIONS), *CUT_SHORT):
        ours, theirs = (
            pair.answer(drafter, question, most, logits_processors=processors)
            for drafter in (drafters[method], None)
        )
        for mine, other in zip(ours, theirs, strict=True):
            assert mx.allclose(mine.logprobs, other.logprobs, atol=1e-3)
            drafted += mine.from_draft
            for response in (mine, other):
                response.prompt_tps = response.generation_tps = response.peak_memory = 0
                response.logprobs = response.from_draft = None
        assert ours == theirs
        num_tokens += len(ours)
    if method != "plain" and processors is None:
        assert drafted > 0.1 * num_tokens


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_a_seed_gives_the_same_answer_whatever_is_drafted(
    pair: Any, drafters: dict[str, Drafter], temperature: float
) -> None:
    sampler = make_sampler(temperature, top_p=0.97, top_k=100)
    different = False
    for seed, question in enumerate(QUESTIONS[:4]):
        answers = []
        for its_seed, drafter in [*((seed, d) for d in drafters.values()), (99, drafters["trees"])]:
            mx.random.seed(its_seed)
            answers.append(tokens(pair.answer(drafter, question, 30, sampler=sampler)))
        *same, other = answers
        assert all(answer == same[0] for answer in same)
        different |= other != same[0]
    assert different or temperature < 2


@every_method
@pytest.mark.parametrize("taken", [1, 2, 3, 5, 11, 60])
def test_an_answer_left_at_any_token_leaves_the_prompt_cache_as_mlx_lm_does(
    pair: Any, drafters: dict[str, Drafter], method: str, taken: int
) -> None:
    drafter, stream = drafters[method], mx.default_stream(mx.default_device())
    cache = drafter.target.make_cache()
    prompt = pair.prompt("list values")
    given = pair.model, pair.tokenizer, prompt, 40, drafter
    answer = stream_generate(*given, prompt_cache=cache)
    said = tokens([*islice(answer, taken)])
    assert mx.default_stream(mx.default_device()) == stream
    answer.close()
    assert [layer.offset for layer in cache] == [len(prompt) + len(said)] * len(cache)
    following = pair.prompt("names")
    more = pair.answer(drafter, following, 12, prompt_cache=cache)
    assert tokens(more) == tokens(pair.answer(None, [*prompt, *said, *following], 12))


class Failure(Exception):
    pass


@every_method
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
    more = tokens(pair.answer(None, text[-1:], 12, prompt_cache=cache))
    assert said + more == tokens(pair.answer(None, "list values", 40))[: len(said) + 12]


def test_a_generator_that_is_closed_late_leaves_a_later_answer_in_the_cache(
    pair: Any, drafters: dict[str, Drafter]
) -> None:
    cache = drafters["trees"].target.make_cache()
    given = pair.model, pair.tokenizer, pair.prompt("names"), 40, drafters["trees"]
    first = stream_generate(*given, prompt_cache=cache)
    assert len([*islice(first, 3)]) == 3
    pair.answer(drafters["trees"], "list values", 20, prompt_cache=cache)
    length = cache[0].offset
    first.close()
    assert cache[0].offset == length


@pytest.mark.parametrize("size", [1, 5, 2048])
def test_progress_is_reported_as_mlx_lm_reports_it(
    pair: Any, drafters: dict[str, Drafter], size: int
) -> None:
    reports: list[list[tuple[int, int]]] = [[], []]
    for seen, drafter in zip(reports, (drafters["trees"], None), strict=True):
        callback = {"prompt_progress_callback": lambda *at, seen=seen: seen.append(at)}
        pair.answer(drafter, "names", 3, prefill_step_size=size, **callback)
    assert reports[0] == reports[1]


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_targets_answer_as_mlx_lm_has_them_answer(
    load_pair: Callable[[], Any], bits: int
) -> None:
    pair = load_pair()
    nn.quantize(pair.model, 64, bits)
    drafter = load_drafter(pair.drafter, pair.model, adaptive=False)
    for question in ANSWERS:
        ours, theirs = (pair.answer(d, question, 24) for d in (drafter, None))
        assert tokens(ours) == tokens(theirs)
        assert sum(response.from_draft for response in ours) > 8


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"kv_bits": 4}, ConfigError, r"kv_bits=4 is refused.*without draft_model"),
        ({"model": nn.Linear(1, 1)}, ConfigError, "made for another model object"),
        ({"max_tokens": 0}, ValueError, "max_tokens must not be 0"),
        ({"prompt": []}, ValueError, "the prompt is empty"),
    ],
)
def test_what_speculation_does_not_take_is_refused(
    pair: Any,
    drafters: dict[str, Drafter],
    changes: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    given = {"model": pair.model, "prompt": [1], "max_tokens": 5, **changes}
    with pytest.raises(error, match=message):
        [*stream_generate(tokenizer=pair.tokenizer, draft_model=drafters["trees"], **given)]
