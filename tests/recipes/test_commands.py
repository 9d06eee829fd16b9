# SPDX-License-Identifier: Apache-2.0
"""What the recipes call exists, with the options that they give."""

import re
import shlex
from contextlib import chdir
from pathlib import Path

import pytest
import typer

from vllm_redrafter.cli.main import app

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*/recipe.sh"))
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def commands_of(recipe: Path) -> list[list[str]]:
    """Each call of ours, as words; numbers that the shell computes are 9."""
    text = recipe.read_text().replace("\\\n", "")
    if answer := re.search(r'answer="(.*)"', text):
        text = text.replace("$answer", answer[1])
    text = re.sub(r'\$\(\(.*?\)\)|"\$num"', "9", text)
    lines = text.splitlines()
    return [shlex.split(line) for line in lines if line.startswith("vllm-redrafter ")]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.parent.name)
def test_every_command_takes_its_options(recipe: Path, tmp_path: Path) -> None:
    called = commands_of(recipe)
    assert {"make-prompts", "generate-data", "train"} <= {words[1] for words in called}
    with chdir(tmp_path):
        for words in called:
            for path in (word for word in words if word[:1] not in "-/"):
                Path(path).mkdir(parents=True, exist_ok=True)
            assert COMMANDS[words[1]].make_context(words[1], words[2:]).params
