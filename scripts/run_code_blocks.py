# SPDX-License-Identifier: Apache-2.0
"""Run the fenced code of documents as it is written, in a clone of this checkout.

    python scripts/run_code_blocks.py                              # README, start page, serving.md
    python scripts/run_code_blocks.py docs/serving.md --only 3,4   # two blocks of one document
    python scripts/run_code_blocks.py --parse                      # in seconds: nothing is run

A block of bash is one script. Its servers are started in the background, asked once and stopped.
Python's blocks of a document go on from one another. What only a GPU runs is read by vLLM's parser
of arguments, and our commands by typer, as everything is with --parse. Names that stand for
something else (`TARGET`), that cannot be reached (a hub's), or sizes for hours are replaced as
`stand_ins` says; each replacement is printed. Needs port 8000, and half an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

REPO = Path(__file__).resolve().parents[1]
DOCUMENTS = [REPO / name for name in ("README.md", "docs/index.md", "docs/serving.md")]
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
ADDRESS = "https://github.com/vllm-redrafter/vllm-redrafter"
TORCH_INDEX = " --extra-index-url https://download.pytorch.org/whl/cpu"

FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
NOT_CODE = ("text", "mermaid")
CUDA = re.compile(r'\[cuda\]|"draft": |--kv-transfer-config')
SERVER = re.compile(r"(\S*/)?(vllm|vllm-redrafter) (mlx-)?serve ")
PARSED = re.compile(r"(\S*/)?(vllm serve|vllm-redrafter) ")
ASSIGNMENT = re.compile(r"\w+=\S")
PORT = 8000
SERVES = 'VLLM_SERVER_DEV_MODE=1 vllm serve "${PWD%/*}/target" --spec-model "${PWD%/*}/drafter"'
"""The server that a block asks which starts none."""

PRELUDE = f"""
set -euo pipefail
server=
stop() {{
    [[ -z $server ]] || {{ kill "$server" && wait "$server" || true; }} 2>/dev/null
    server=
}}
trap stop EXIT
serve() {{
    stop
    env "$@" >../server.log 2>&1 &
    server=$!
    until curl -sf http://localhost:{PORT}/health; do
        kill -0 "$server" 2>/dev/null || {{ tail -n 30 ../server.log; exit 1; }}
        sleep 1
    done
    grep -om 1 "Speculating with.*" ../server.log
    curl -sf http://localhost:{PORT}/v1/completions -H 'Content-Type: application/json' \\
        -d '{{"prompt": "The capital of France is", "max_tokens": 24, "temperature": 0}}'
    echo
}}
"""

NUM_PROMPTS = 81
"""To answer: `train` holds 64 out."""

MINUTES = 20
"""What a block may take."""


@dataclass(frozen=True)
class Block:
    """Fenced code: where it stands, its language, its text, Python's of the document before it."""

    document: Path
    number: int
    language: str
    code: str
    before: str

    def __str__(self) -> str:
        return f"{self.document.relative_to(REPO)} {self.number}"


def blocks_of(document: Path) -> Iterator[Block]:
    """In their order, numbered from 1."""
    before = ""
    for number, found in enumerate(FENCE.finditer(document.read_text()), start=1):
        yield Block(document, number, found[1], found[2], before)
        before += found[2] if found[1] == "python" else ""


def commands_of(code: str) -> Iterator[str]:
    """The commands of a block of bash, each with the lines that continue it."""
    command = ""
    for line in code.splitlines():
        command += line
        try:
            shlex.split(command, comments=True)
        except ValueError:  # an open quotation, or a line that goes on
            command += "\n"
        else:
            yield command
            command = ""


@cache
def reached(address: str) -> bool:
    try:
        urllib.request.urlopen(address, timeout=5).close()
    except OSError:
        return False
    return True


def stand_ins(work: Path) -> dict[str, str]:
    """What a block's words are replaced by."""
    target = str(work / "target")
    return {
        ADDRESS: f"{REPO} vllm-redrafter",
        **({} if reached("https://huggingface.co") else {HUB_ID: target}),
        **({} if reached(TORCH_INDEX.split()[-1]) else {TORCH_INDEX: ""}),
        "TARGET": target,
        "DRAFTER": str(work / "drafter"),
        "log.jsonl": str(work / "log.jsonl"),
        "--num-prompts 20000": f"--num-prompts {NUM_PROMPTS}",
    }


def replaced(code: str, words: dict[str, str]) -> str:
    """`code` with its words replaced; says which."""
    for word, stand_in in words.items():
        found = re.compile(rf"(?<![\w/-]){re.escape(word)}(?![\w-])")
        code, count = found.subn(lambda _, to=stand_in: to, code)  # type: ignore[misc]
        if count:
            print(f"    {word.strip()} → {stand_in or 'nothing'}")
    return code


def arguments_of(code: str) -> list[list[str]]:
    """Program and arguments of each server and each command of ours, as bash expands them."""
    tell = f"{shlex.quote(sys.executable)} -c 'import json, sys; print(json.dumps(sys.argv[1:]))'"
    lines = [
        f"{tell} {command}" if PARSED.match(command) else command
        for command in commands_of(code)
        if PARSED.match(command) or ASSIGNMENT.match(command)
    ]
    told = subprocess.run(["bash", "-ec", "\n".join(lines)], check=True, capture_output=True)
    return [json.loads(line) for line in told.stdout.splitlines()]


@cache
def vllm_parser() -> argparse.ArgumentParser:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))


def read_arguments(program: str, name: str, rest: list[str]) -> None:
    """Raise if the program would not take these arguments."""
    from vllm_redrafter.config import ReDrafterConfig

    if Path(program).name == "vllm-redrafter" and name != "serve":
        import typer

        from vllm_redrafter.cli.main import app

        command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
        for parameter in command.params:
            parameter.callback = None  # looks models up
        with TemporaryDirectory() as folder, chdir(folder):
            Path("data").mkdir()  # asked for by `--data`
            command.make_context(name, rest)
        return
    from vllm.config import SpeculativeConfig

    given = vllm_parser().parse_args(rest).speculative_config or {}
    known = {field.name for kind in (SpeculativeConfig, ReDrafterConfig) for field in fields(kind)}
    unknown = given.keys() - known - {"target", "draft"}
    assert not unknown, f"the speculative config has no {unknown}"


def parse(code: str) -> int:
    """Read the arguments of a block's commands; returns their number."""
    extras = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    for extra in re.findall(r"pip install .*\.\[(\w+)\]", code):
        assert extra in extras["optional-dependencies"], extra
    told = arguments_of(code)
    for program, name, *rest in told:
        read_arguments(program, name, rest)
    return len(told)


def script_of(code: str) -> str:
    """A block of bash as a script that ends: its servers in the background, CUDA's lines out."""
    lines = []
    for command in commands_of(code):
        if not CUDA.search(command):
            lines.append(f"serve {command}" if SERVER.match(command) else command)
    if f":{PORT}" in code and not SERVER.search(code):
        lines.insert(0, f"serve {SERVES}")
    return PRELUDE + "\n".join(lines) + "\n"


def run(block: Block, work: Path) -> None:
    """Run a block in the clone; raises CalledProcessError or TimeoutExpired."""
    words = stand_ins(work)
    code = replaced(block.code, words)
    clone = work / "vllm-redrafter"
    environment, folder = clone / ".venv", clone
    if "git clone" in code:
        shutil.rmtree(clone, ignore_errors=True)
        folder = work
    if re.search(r"pip install .*\.\[", code):  # not into the clone's
        environment = work / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--clear", environment], check=True)
    script = script_of(code)
    if block.language == "python":
        asks = f":{PORT}" in code  # a server, and so no engine of the blocks before
        (work / "block.py").write_text(code if asks else replaced(block.before, words) + code)
        script = script_of(f"python ../block.py  # {f':{PORT}' if asks else ''}")
    variables = os.environ | {
        "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(environment),
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    }
    with (work / f"{block.document.stem}-{block.number}.log").open("w") as log:
        started = subprocess.Popen(
            ["bash", "-c", script],
            cwd=folder,
            env=variables,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            status = started.wait(MINUTES * 60)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            raise
    if status:
        raise subprocess.CalledProcessError(status, f"see {log.name}")


def prepare(work: Path) -> None:
    """A clone that is set up, the demo's target, a copy of its drafter for it, a log of prompts."""
    clone = work / "vllm-redrafter"
    if not (clone / ".venv" / ".ready").exists():
        shutil.rmtree(clone, ignore_errors=True)
        subprocess.run(["git", "clone", "-q", REPO, clone], check=True)
        subprocess.run(["make", "setup"], cwd=clone, check=True)
    if not (work / "target").exists():
        from vllm_redrafter.utils.files import user_cache

        target = user_cache() / "demo" / "smollm2-135m-instruct"
        if not target.is_dir():
            subprocess.run(["make", "demo"], cwd=clone, check=True)
        (work / "target").symlink_to(target)
    if not (work / "drafter").exists():
        from vllm_redrafter.checkpoints.shipped import shipped_drafter

        shutil.copytree(shipped_drafter("smollm2-135m-instruct"), work / "drafter")
        config = work / "drafter" / "config.json"
        config.write_text(config.read_text().replace(HUB_ID, str(work / "target")))
    prompts = ["Write a haiku about trees.", "Why is the sky blue?", "Name three rivers."]
    prompts *= NUM_PROMPTS // len(prompts)
    lines = (json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    (work / "log.jsonl").write_text("".join(lines))


def checked(block: Block, work: Path | None) -> str:
    """How a block was checked; raises what is wrong with it."""
    if block.language in NOT_CODE:
        return "not code"
    if block.language == "json":
        json.loads(block.code)
        return "parsed"
    bash = block.language == "bash"
    parsed = parse(block.code) if bash else 0
    if not bash:
        compile(block.code, str(block), "exec")
    cuda = len(CUDA.findall(block.code)) if bash else 0
    if work is None or (
        cuda and all(map(CUDA.search, filter(PARSED.match, commands_of(block.code))))
    ):
        return f"parsed: {parsed} commands"
    run(block, work)
    return "run" + (f"; for CUDA, parsed: {cuda}" if cuda else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("documents", type=Path, nargs="*", default=DOCUMENTS)
    parser.add_argument("--only", help="numbers of blocks, with commas")
    parser.add_argument("--parse", action="store_true", help="run nothing, read arguments alone")
    parser.add_argument(
        "--work", type=Path, default=REPO / "build" / "code-blocks", help="for the clone and logs"
    )
    asked = parser.parse_args()
    work = None if asked.parse else asked.work.resolve()
    only = asked.only and {int(number) for number in asked.only.split(",")}
    if work is not None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", PORT)) == 0:
                sys.exit(f"port {PORT} is in use, where the documents' servers listen")
        work.mkdir(parents=True, exist_ok=True)
        prepare(work)
    rows = []
    for document in asked.documents:
        for block in blocks_of(document.resolve()):
            if only and block.number not in only:
                continue
            print(f"{block}: {block.code.splitlines()[0]}", flush=True)
            start = time.monotonic()
            try:
                how, result = checked(block, work), "passed"
            except (Exception, SystemExit) as error:
                how, result = "", f"failed: {error}"
            seconds = round(time.monotonic() - start)
            print(f"    {how}: {result}, {seconds} s", flush=True)
            rows.append((str(block), how, result, str(seconds)))
    print("\n| block | how checked | result | seconds |\n| --- | --- | --- | --- |")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    if any(result != "passed" for _, _, result, _ in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
