# SPDX-License-Identifier: Apache-2.0
"""The command itself: wrong inputs are refused at once, by the names that were typed."""

import subprocess
import sys
from importlib.metadata import version

import pytest

PROGRAM = """
import sys
from vllm_redrafter.cli.main import app
sys.modules["openai"] = None  # not installed
try:
    app()
finally:
    print({"torch", "transformers", "datasets", "vllm", "numpy"} & {*sys.modules})
"""
TO = ["--output", "out"]


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        (["shipped", "smollm2-135m-instruct"], 0, "drafters/smollm2-135m-instruct"),
        (["--version"], 0, f"torch {version('torch')}"),
        (["chat"], 1, "of vllm-redrafter, run `make setup` or `pip install '.[train]'`"),
        (["inspect", "/no"], 1, "error: drafter '/no': no such folder;"),
        (["evaluate", "/", "/", "--data", "/", "--spec-tokens", "x"], 1, "--spec-tokens 'x': "),
        (["mlx-serve", "/", "--spec-tokens", "1000"], 2, "'--spec-tokens': "),
        (["trace", "/", "--html", "/no/a"], 1, "error: --html '/no/a' cannot be written: No such"),
        (["train", "/", "--data", "/no", *TO], 2, "'--data': path '/no' does not exist"),
        (["train", "/", "--data", "/", *TO, "--head", "x"], 2, "'--head': 'x' is not one of"),
        (["make-prompts", "/", *TO, "--num-prompts", "0"], 1, "--num-prompts must be at least 1"),
        (["generate-data", "/", "--prompts", "/no.txt", *TO], 1, "--prompts /no.txt: no such"),
        (["generate-data", "/", "--prompts", "/", *TO, *2 * ["--endpoint", "a"]], 1, "one server"),
        (["train", "/", "--data", "~", "--data", "~/no", *TO], 2, "path '~/no' does not exist"),
    ],
)
def test_wrong_inputs_are_named_before_large_libraries_are_imported(
    command: list[str], status: int, said: str
) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *command], capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (status, "set()")
    assert said in done.stdout + done.stderr
