"""The prompts that come with the benchmark."""

from __future__ import annotations

import throughput
from throughput_parts.suites import SUITES, read_suites


def test_suites_have_the_numbers_of_prompts_that_the_readme_states() -> None:
    sizes = {task: len(prompts) for task, prompts in read_suites(["all"]).items()}
    assert sizes == {"chat": 32, "summary": 16, "code": 16, "math": 16}
    arguments = ["--model", "m", "--drafter", "d"]
    default = throughput.parser(throughput.__doc__).parse_args(arguments).num_prompts
    assert max(sizes.values()) <= default, "all prompts of a suite are asked by default"


def test_every_prompt_is_a_users_turn_and_none_is_asked_twice() -> None:
    asked = [message for prompts in read_suites(SUITES).values() for (message,) in prompts]
    assert {message["role"] for message in asked} == {"user"}
    assert len({message["content"] for message in asked}) == len(asked) == 80


def test_a_summary_is_of_a_passage_of_80_to_150_words() -> None:
    for (message,) in read_suites(["summary"])["summary"]:
        _, passage = message["content"].split("\n\n")
        assert 80 <= len(passage.split()) <= 150
