# SPDX-License-Identifier: Apache-2.0
"""benchmarks/first_gpu_run.sh with every step faked: which run, in which order, what is kept.

Python is replaced by a script that writes its arguments down, and does what a test says instead of
the step.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import throughput

BENCHMARKS = Path(throughput.__file__).parent
SCRIPT = BENCHMARKS / "first_gpu_run.sh"

ALWAYS = [
    "environment",
    "kernel_tests",
    "no_waiting",
    "flash_attention",
    "parity",
    "prefill_parity",
    "tree_attention",
    "draft_layers",
]
THROUGHPUT = ["--model", "a target", "--drafter", "its drafter", "--chat"]

FAKE_PYTHON = """#!{python} -IS
import json, os, re, subprocess, sys, time
arguments = sys.argv[1:]
behaviour = json.loads(os.environ["BEHAVIOUR"])
if arguments[0] == "-c":
    print("sm_86")
    sys.exit(behaviour.get("torch", 0))
name = [found[1] for a in arguments if (found := re.search(r"/(\\w+)\\.(?:json|xml)$", a))][-1]
with open(os.environ["CALLS"], "a") as calls:
    print(json.dumps([name, os.getcwd(), arguments]), file=calls)
print("this is", name)
if behaviour.get(name) == "hangs":
    child = subprocess.Popen(["sleep", "60"])
    with open(os.environ["CALLS"] + ".child", "w") as file:
        file.write(str(child.pid))
    time.sleep(60)
sys.exit(behaviour.get(name, 0))
"""

SHORT_TIMEOUT = """#!/bin/sh
shift 2
exec {timeout} 3 "$@"
"""
"""In the place of `timeout --kill-after=N LIMIT`: three seconds."""


@dataclass(frozen=True)
class Call:
    """What the interpreter was started with."""

    name: str
    folder: str
    arguments: list[str]


class Runs:
    """Runs of the script with the same OUT."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "all results"
        self.programs = folder / "programs"
        self.programs.mkdir()
        self._program("python", FAKE_PYTHON.format(python=sys.executable))
        self.environment = {
            **os.environ,
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "PYTHON": str(self.programs / "python"),
            "CALLS": str(folder / "calls"),
            "BEHAVIOUR": "{}",
        }

    def _program(self, name: str, text: str) -> None:
        file = self.programs / name
        file.write_text(text)
        file.chmod(0o755)

    def start(self, *options: str, **behaviour: int | str) -> subprocess.Popen[str]:
        """Start it; `behaviour` says by step what is not to end with 0."""
        return subprocess.Popen(
            [SCRIPT, self.out, *options],
            env={**self.environment, "BEHAVIOUR": json.dumps(behaviour)},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *options: str, **behaviour: int | str) -> tuple[int, str]:
        """Its exit status, and what it printed."""
        (self.folder / "calls").unlink(missing_ok=True)
        started = self.start(*options, **behaviour)
        printed, _ = started.communicate(timeout=60)
        return started.returncode, printed

    def calls(self) -> list[Call]:
        """The steps that were started since `run` was called last."""
        file = self.folder / "calls"
        return [Call(*json.loads(line)) for line in file.read_text().splitlines()]

    def names(self) -> list[str]:
        return [call.name for call in self.calls()] if (self.folder / "calls").exists() else []

    def hurry(self) -> None:
        """Steps have three seconds from now on."""
        self._program("timeout", SHORT_TIMEOUT.format(timeout=shutil.which("timeout")))

    def state(self, name: str) -> dict[str, str]:
        lines = (self.out / f"{name}.state").read_text().splitlines()
        return dict(line.split(": ", 1) for line in lines)

    def summary(self) -> dict[str, str]:
        """By step, in order: how it ended, from summary.md's table."""
        text = (self.out / "summary.md").read_text()
        return dict(re.findall(r"^\| (\w+) \| ([a-z ]+) \|", text, re.MULTILINE)[1:])


def is_running(process: int) -> bool:
    """Zombies do not count: in a container nobody may wait for them."""
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text().rpartition(") ")[2][0] != "Z"


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """After a run whose steps all ended well, throughput.py's among them."""
    runs = Runs(tmp_path_factory.mktemp("whole"))
    status, printed = runs.run("--", *THROUGHPUT)
    assert status == 0, printed
    return runs


def test_steps_run_in_the_order_of_their_importance(whole: Runs) -> None:
    expected = [*ALWAYS, "throughput"]
    assert whole.names() == expected
    assert whole.summary() == dict.fromkeys(expected, "done")


def test_every_step_leaves_its_log_and_how_it_ended(whole: Runs) -> None:
    for name in whole.names():
        assert f"this is {name}" in (whole.out / f"{name}.log").read_text()
        state = whole.state(name)
        assert state["status"] == "done" and state["exit"] == "0"
        assert int(state["seconds"]) <= int(state["limit"])
        assert re.fullmatch(r"[0-9a-f]{12}(-dirty)?|unknown", state["commit"])
        assert name in state["command"]


def test_throughput_gets_its_arguments_where_the_script_was_called(whole: Runs) -> None:
    (call,) = (call for call in whole.calls() if call.name == "throughput")
    given = " ".join(call.arguments)
    assert " ".join(THROUGHPUT) in given
    assert Path(call.folder) == whole.folder
    # What a user gives comes after the defaults.
    assert given.index("--num-prompts 8") < given.index("--model")


PARSE = """
import argparse, contextlib, io, json, runpy, sys
class Parsed(Exception): ...
parse = argparse.ArgumentParser.parse_args
def parse_only(self, *args, **kwargs):
    parse(self, *args, **kwargs)
    raise Parsed
argparse.ArgumentParser.parse_args = parse_only
for arguments in json.load(sys.stdin):
    is_module = arguments[0] == "-m"
    run, name = (runpy.run_module, arguments[1]) if is_module else (runpy.run_path, arguments[0])
    sys.argv = [name, *arguments[1 + is_module:]]
    try:
        run(name, run_name="__main__")
    except Parsed:
        print("parsed", name)
"""


def test_every_script_takes_the_options_that_it_is_given(whole: Runs) -> None:
    """By its own parser, in a process of its own: the scripts import the kernels."""
    given = [call.arguments for call in whole.calls() if "pytest" not in call.arguments]
    variables = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", PARSE],
        input=json.dumps(given),
        env={**variables, "PYTHONPATH": str(BENCHMARKS)},
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("parsed") == len(given) == len(whole.names()) - 3


def test_the_tests_that_are_run_exist(whole: Runs) -> None:
    named = [
        argument
        for call in whole.calls()
        if "pytest" in call.arguments
        for argument in call.arguments
        if "/tests/" in argument
    ]
    assert len(named) == 4
    assert all(Path(path).exists() for path in named)


def test_what_fails_or_hangs_does_not_stop_the_next(runs: Runs) -> None:
    runs.hurry()
    status, printed = runs.run(kernel_tests=3, parity="hangs")
    assert status == 1, printed
    assert runs.names() == ALWAYS
    ended = runs.summary()
    assert (ended.pop("kernel_tests"), ended.pop("parity")) == ("failed", "timed out")
    assert set(ended.values()) == {"done"}
    assert runs.state("kernel_tests")["exit"] == "3"
    assert "this is kernel_tests" in (runs.out / "summary.md").read_text()
    child = int((runs.folder / "calls.child").read_text())
    assert not is_running(child)


def test_a_second_call_leaves_alone_what_has_ended_unless_it_is_told_to_retry(runs: Runs) -> None:
    assert runs.run(kernel_tests=3)[0] == 1
    (runs.out / "kernel_tests.xml").write_text("of the first time")
    assert runs.run()[0] == 1
    assert runs.names() == []
    assert runs.run("--retry")[0] == 0
    assert runs.names() == ["kernel_tests"]
    assert not (runs.out / "kernel_tests.xml").exists()
    assert set(runs.summary().values()) == {"done"}

    (runs.out / "parity.state").unlink()
    runs.run("--only", "environment")
    assert runs.summary()["parity"] == "interrupted"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["OUT", "--steps", "3"], "unknown option --steps"),
        (["OUT", "--seconds", "soon"], "--seconds 'soon': expected a number"),
        (["OUT", "--only", "parity,throughput"], "--only throughput: the steps are environment"),
        ([], "OUT is missing"),
        (["file"], "OUT: file cannot be made"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: list[str], message: str, runs: Runs) -> None:
    (runs.folder / "file").touch()
    done = subprocess.run(
        [SCRIPT, *arguments],
        env=runs.environment,
        cwd=runs.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert not runs.names()


def test_without_a_gpu_nothing_is_run(runs: Runs) -> None:
    status, printed = runs.run(torch=1)
    assert status == 2
    assert "torch finds no GPU here" in printed
    assert not runs.names()
