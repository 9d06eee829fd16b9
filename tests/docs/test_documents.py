# SPDX-License-Identifier: Apache-2.0
"""What the documents name exists: files, headings, options, settings, versions."""

import ast
import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer
import yaml

from redrafter_testing.vllm_options import options_of_vllm
from vllm_redrafter.cli.main import app
from vllm_redrafter.config import ReDrafterConfig

REPO = Path(__file__).parents[2]
PLACES = ["*.md", "docs/*.md", "benchmarks/*.md", "recipes/*/*.md", ".github/*.md", "*/*.ipynb"]
DOCUMENTS = [path for place in PLACES for path in sorted(REPO.glob(place))]
documents = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(REPO)))
YAML_FILES = sorted([*(REPO / ".github").rglob("*.yml"), REPO / "CITATION.cff"])

FOLDERS = (
    r"vllm_redrafter|triton_kernels|tests|benchmarks|deploy|docs|examples|recipes|scripts"
    r"|\.ci|\.github"
)
PATH = re.compile(rf"(?<![\w./-])(?:{FOLDERS})/(?!NAME)[\w./-]*\w")
"""A file or folder of ours, in prose or in a command; NAME stands for one that is to be made."""

FIGURE = re.compile(r"(?<![\w.])\d+\.\d\d(?!\d|\.\d)")
"""× plain, with two decimals; no version."""

FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]+")
OTHERS_FLAGS = """
--num_processes --num_machines --machine_rank --main_process_ip --main_process_port --no-index
--shm-size --cap-add --security-opt --stop-timeout --from-env-file --timeout --now --config
--logdir --gpus --dataset-name --dataset-path --help --extra-index-url --no-deps
--speed-bench-output-len --speed-bench-category --max-concurrency"""
"""accelerate's, those of deployment tools, tensorboard's, `vllm bench serve`'s, pip's."""


def text_of(document: Path) -> str:
    """As Markdown; a notebook's code is fenced, and its outputs are left out."""
    if document.suffix != ".ipynb":
        return document.read_text()
    cells = json.loads(document.read_text())["cells"]
    texts = {False: "{}", True: "```python\n{}\n```"}
    return "\n\n".join(
        texts[cell["cell_type"] == "code"].format("".join(cell["source"])) for cell in cells
    )


def anchor(heading: str) -> str:
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def outside_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def links(text: str) -> Iterator[str]:
    """Where relative links lead."""
    for found in re.finditer(r"\]\(([^)\s]+)\)", outside_code(text)):
        if not re.match(r"[a-z]+:", found[1]):
            yield found[1]


@documents
def test_every_link_leads_somewhere(document: Path) -> None:
    broken = []
    for link in links(text_of(document)):
        name, _, wanted = link.partition("#")
        path = (document.parent / name) if name else document
        if not path.exists():
            broken.append(link)
        elif wanted:
            headings = re.findall(r"^#+ (.+)$", outside_code(path.read_text()), re.MULTILINE)
            if wanted not in map(anchor, headings):
                broken.append(link)
    assert not broken


@documents
def test_every_path_that_is_named_exists(document: Path) -> None:
    named = set(PATH.findall(text_of(document)))
    assert not sorted(name for name in named if not (REPO / name).exists())


@cache
def options() -> dict[str, set[str]]:
    """The options of each of our commands."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return {
        name: {option for param in command.params for option in param.opts}
        for name, command in commands.items()
    } | {"serve": options_of_vllm()}


@cache
def other_flags() -> set[str]:
    """The options of vLLM's server, mlx-lm's and our scripts, read from their sources."""
    spec = find_spec("mlx_lm")
    assert spec is not None and spec.origin is not None
    sources = [Path(spec.origin).with_name("server.py")]
    for folder in ("benchmarks", "examples", "recipes", "scripts", "tests/support"):
        sources += (REPO / folder).rglob("*.py")
    found = {flag for source in sources for flag in re.findall(r'"(--[\w-]+)"', source.read_text())}
    for script in (REPO / "benchmarks").glob("*.sh"):
        found |= set(re.findall(r"^ +(--[\w-]+)\)", script.read_text(), re.MULTILINE))
    return found | options_of_vllm() | {*FLAG.findall(OTHERS_FLAGS)}


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Our commands in code: (the command's name, what follows it)."""
    spans = re.findall(r"`([^`\n]+)`", text)
    lines = "".join(re.findall(r"```.*?```", text, re.DOTALL)).replace("\\\n", " ").splitlines()
    for code in (*spans, *lines):
        found = re.search(r"(?:vllm-redrafter|vllm_redrafter) ([a-z-]+)([^#|]*)", code)
        if found:
            yield found[1], found[2]


@documents
def test_every_command_and_its_options_exist(document: Path) -> None:
    for command, rest in commands(text_of(document)):
        assert command in options(), command
        ours = rest.partition(" -- ")[0]  # what stands behind it goes to a server
        assert not sorted(set(FLAG.findall(ours)) - options()[command] - {"--help"}), command


def test_code_that_runs_as_written_has_arguments_that_its_programs_take() -> None:
    subprocess.run([sys.executable, REPO / "scripts" / "run_code_blocks.py", "--parse"], check=True)


@documents
def test_every_option_that_is_named_is_somebody_s(document: Path) -> None:
    ours = set().union(*options().values())
    assert not sorted(set(FLAG.findall(text_of(document))) - ours - other_flags())


@pytest.mark.parametrize("file", YAML_FILES, ids=lambda path: path.name)
def test_yaml_can_be_read(file: Path) -> None:
    assert isinstance(yaml.safe_load(file.read_text()), dict)


def test_every_setting_is_documented_with_its_default() -> None:
    text = (REPO / "docs" / "serving.md").read_text()
    for field in dataclasses.fields(ReDrafterConfig):
        row = re.search(rf"^\| `{field.name}` \| (\S+) \|", text, re.MULTILINE)
        assert row is not None, field.name
        missing = field.default is dataclasses.MISSING
        # As one writes it in the speculative config, which is JSON.
        default = "required" if missing else json.dumps(field.default).strip('"')
        assert row[1].strip("`") == default


def test_speed_ups_that_are_repeated_were_measured_and_the_readme_is_short() -> None:
    readme, start = ((REPO / name).read_text() for name in ("README.md", "docs/index.md"))
    results = readme.split("\n## Results\n")[1].split("\n\n")[1]
    numbers, heads, choose = (
        FIGURE.findall((REPO / "docs" / name).read_text())
        for name in ("numbers.md", "heads.md", "choose.md")
    )
    assert len(choose) > 30 and not {*choose} - {*numbers, *heads}
    assert not {*FIGURE.findall(results + start.split("\n## ")[0])} - {*numbers}
    assert len(readme.split()) <= 700


def test_messages_that_are_quoted_as_ours_are_the_package_s() -> None:
    page = (REPO / "docs" / "troubleshooting.md").read_text()
    ours = page.split("\n## Messages of ReDrafter\n")[1].split("\n## ")[0]
    trees = (ast.parse(path.read_text()) for path in (REPO / "vllm_redrafter").rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree))
    written = "\n".join(str(node.value) for node in nodes if isinstance(node, ast.Constant))
    quoted = re.findall(r"```text\n(.+)\n```", ours)
    assert quoted and all(part in written for text in quoted for part in text.split("…"))


def test_every_wrap_and_every_exchanged_class_of_vllm_has_its_row() -> None:
    page = (REPO / "docs" / "upstream.md").read_text()
    package = REPO / "vllm_redrafter"
    wraps = re.findall(r'_wrap\((\w+), "(\w+)"', (package / "plugin.py").read_text())
    runner = (package / "engine" / "v2" / "runner.py").read_text()
    patches = re.findall(r"patched\(\s+model_runner,(.*?)\)", runner, re.DOTALL)
    exchanged = set(re.findall(r"(\w+)=", "".join(patches)))
    assert len({*wraps}) == len(wraps) == 8
    for heading, names in (
        ("# What vLLM could take over", {".".join(wrap) for wrap in wraps}),
        ("## 4. Classes of the runner", exchanged),
    ):
        section = page.split(heading, 1)[1].split("\n## ", 1)[0]
        assert set(re.findall(r"^\| `([\w.]+)` \|", section, re.MULTILINE)) == names
