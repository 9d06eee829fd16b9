# SPDX-License-Identifier: Apache-2.0
"""benchmarks/first_gpu_run.sh with every step faked: which run, in which order, what is kept.

Python is replaced by a script that writes its arguments down, and does what a test says instead of
the step.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import throughput

from redrafter_testing import process_trees

BENCHMARKS = Path(throughput.__file__).parent
SCRIPT = BENCHMARKS / "first_gpu_run.sh"

CHECKS = ["environment", "no_waiting", "flash_attention", "parity"]
LATER = ["kernel_tests", "prefill_parity"]
ALWAYS = [*CHECKS, "kernels", *LATER]
LOGS = ["steps_ours", "steps_plain", "steps_plain_full"]
ALL = [*CHECKS, *LOGS, "kernels", "steps_top_p", "throughput", *LATER]
THROUGHPUT = ["--model", "a target", "--drafter", "its drafter", "--chat"]

FAKE_PYTHON = """#!{python} -IS
import json, os, re, sys
arguments = sys.argv[1:]
behaviour = json.loads(os.environ["BEHAVIOUR"])
if arguments[0] == "-c":
    print("sm_86")
    sys.exit(behaviour.get("torch", 0))
name = [found[1] for a in arguments if (found := re.search(r"/(\\w+)\\.(?:json|xml)$", a))][-1]
with open(os.environ["CALLS"], "a") as calls:
    print(json.dumps([name, arguments]), file=calls)
sys.exit(behaviour.get(name, 0))
"""

PARSE = """
import argparse, contextlib, io, json, runpy, sys
class Parsed(Exception): ...
parse = argparse.ArgumentParser.parse_args
def parse_only(self, *args, **kwargs):
    parse(self, *args, **kwargs)
    raise Parsed
argparse.ArgumentParser.parse_args = parse_only
for arguments in json.loads(sys.argv[1]):
    is_module = arguments[0] == "-m"
    run, name = (runpy.run_module, arguments[1]) if is_module else (runpy.run_path, arguments[0])
    sys.argv = [name, *arguments[1 + is_module:]]
    try:
        run(name, run_name="__main__")
    except Parsed:
        print("parsed", name)
"""


class Runs:
    """Runs of the script with the same OUT."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "all results"
        python = folder / "python"
        python.write_text(FAKE_PYTHON.format(python=sys.executable))
        python.chmod(0o755)
        self.environment = {**os.environ, "PYTHON": str(python), "CALLS": str(folder / "calls")}

    def run(self, *options: str, **behaviour: int) -> tuple[int, str]:
        """Its exit status and output; `behaviour` has the steps that do not end with 0."""
        (self.folder / "calls").unlink(missing_ok=True)
        done = subprocess.run(
            [SCRIPT, self.out, *options],
            env={**self.environment, "BEHAVIOUR": json.dumps(behaviour)},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
        )
        return done.returncode, done.stdout

    def calls(self) -> dict[str, list[str]]:
        """The arguments of the steps that were started last, by name."""
        file = self.folder / "calls"
        return dict(map(json.loads, file.read_text().splitlines() if file.exists() else []))

    def summary(self) -> dict[str, str]:
        """By step, in order: how it ended, from summary.md's table."""
        text = (self.out / "summary.md").read_text()
        return dict(re.findall(r"^\| (\w+) \| ([a-z ]+) \|", text, re.MULTILINE)[1:])


def test_every_step_is_run_with_options_that_its_script_takes(tmp_path: Path) -> None:
    """By its own parser, in a process of its own: the scripts import the kernels."""
    whole = Runs(tmp_path)
    status, printed = whole.run("--", *THROUGHPUT)
    assert status == 0, printed
    assert list(whole.calls()) == ALL
    assert whole.summary() == dict.fromkeys(ALL, "done")
    tests = [call for call in whole.calls().values() if "pytest" in call]
    assert all(Path(path).exists() for call in tests for path in call if "/tests/" in path)
    given = [call for call in whole.calls().values() if "pytest" not in call]
    variables = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    variables["PYTHONPATH"] = str(BENCHMARKS)
    command = [sys.executable, "-P", "-c", PARSE, json.dumps(given)]
    printed = process_trees.output_of(command, env=variables, cwd=BENCHMARKS)
    assert printed.count("parsed") == len(given) == len(whole.calls()) - 3


def test_a_failed_step_does_not_stop_the_next_and_is_retried_alone(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    assert runs.run(kernel_tests=3)[0] == 1
    assert list(runs.calls()) == ALWAYS
    assert runs.summary() == {**dict.fromkeys(ALWAYS, "done"), "kernel_tests": "failed"}
    assert runs.run()[0] == 1 and not runs.calls()
    assert runs.run("--retry")[0] == 0
    assert list(runs.calls()) == ["kernel_tests"]


def test_without_a_gpu_nothing_is_run(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    status, printed = runs.run(torch=1)
    assert status == 2 and "torch finds no GPU here" in printed and not runs.calls()
