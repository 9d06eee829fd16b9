# SPDX-License-Identifier: Apache-2.0
"""What the recipes call exists, with the options that they give."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from vllm_redrafter.cli.main import app

RECIPES = Path(__file__).parents[2] / "recipes"
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
CALLS = {
    "smollm2-135m-instruct": [
        *["make-prompts", "generate-data", "generate-data", "generate-data"],
        *["train", "train", "convert"],
    ],
    "8b-on-one-gpu": [
        *["make-prompts", "generate-data", "generate-data"],
        *["train", "train", "evaluate"],
    ],
}


def commands_of(recipe: str) -> list[list[str]]:
    """Each call of ours, as words; numbers that the shell computes are 9."""
    text = (RECIPES / recipe / "recipe.sh").read_text().replace("\\\n", "")
    if answer := re.search(r'answer="(.*)"', text):
        text = text.replace("$answer", answer[1])
    text = re.sub(r'\$\(\(.*?\)\)|"\$num"', "9", text)
    lines = text.splitlines()
    return [shlex.split(line) for line in lines if line.startswith("vllm-redrafter ")]


def test_every_recipe_is_known() -> None:
    assert {path.parent.name for path in RECIPES.glob("*/recipe.sh")} == set(CALLS)


@pytest.mark.parametrize("recipe", CALLS)
def test_every_command_of_a_recipe_takes_its_options(recipe: str) -> None:
    called = commands_of(recipe)
    assert [words[1] for words in called] == CALLS[recipe]
    for words in called:
        context = COMMANDS[words[1]].make_context(words[1], words[2:])
        assert context.params
