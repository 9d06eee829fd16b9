"""The demo that trains: where its prompts come from."""

from __future__ import annotations

from redrafter_testing.models.training_data import answered
from vllm_redrafter.cli.demo.train_small import prompts_of
from vllm_redrafter.data.rows import ListRows


def test_prompts_are_what_the_target_did_not_write() -> None:
    rows = [([0, 10], [5, 5]), ([0, 11, 12], [6]), ([7], [7])]
    text = ListRows(answered(prompt, answer) for prompt, answer in rows)
    assert prompts_of(text, 2) == [[0, 10], [0, 11, 12]]
