"""How probable a target finds an answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from near_ties_parts.agreement import Judge
from transformers import AutoModelForCausalLM

from redrafter_testing.models.tiny_models import make_target

PROMPTS = [[5, 6, 7], [8, 9, 10, 11]]
ANSWERS = [[12, 13], [14, 15, 16]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = make_target(tmp_path_factory.mktemp("models") / "target")
    yield AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_the_mean_is_over_all_tokens_of_the_answers_and_none_of_the_prompts(model: Any) -> None:
    expected = []
    for prompt, answer in zip(PROMPTS, ANSWERS, strict=True):
        for at in range(len(answer)):
            before = torch.tensor([prompt + answer[:at]])
            with torch.inference_mode():
                probabilities = model(input_ids=before).logits[0, -1].softmax(dim=-1)
            expected.append(float(probabilities[answer[at]].log()))
    assert Judge(model).mean(PROMPTS, ANSWERS) == pytest.approx(sum(expected) / 5, abs=1e-4)


def test_an_answer_is_judged_by_its_own_prompt(model: Any) -> None:
    judge = Judge(model)
    swapped = judge.mean(PROMPTS, ANSWERS[::-1])
    assert judge.mean(PROMPTS, ANSWERS) != pytest.approx(swapped, abs=1e-3)


def test_what_is_known_is_not_read_again(model: Any) -> None:
    judge = Judge(model)
    first = judge.mean(PROMPTS, ANSWERS)
    judge._model = None
    assert judge.mean(PROMPTS, ANSWERS) == first
