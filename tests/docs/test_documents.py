# SPDX-License-Identifier: Apache-2.0
"""What the documents name exists: files, headings, options, settings, versions."""

import dataclasses
import json
import re
import tomllib
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
from vllm_redrafter.utils.names import SUPPORTED_VLLM

REPO = Path(__file__).parents[2]
DOCUMENTS = [
    *sorted(REPO.glob("*.md")),
    *sorted((REPO / "docs").glob("*.md")),
    *sorted(path for folder in ("benchmarks", "examples") for path in (REPO / folder).glob("*.md")),
    *sorted((REPO / "recipes").glob("*/*.md")),
    REPO / ".github" / "pull_request_template.md",
    *sorted((REPO / "examples").glob("*.ipynb")),
]
documents = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: path.relative_to(REPO).as_posix()
)
YAML_FILES = sorted([*(REPO / ".github").rglob("*.yml"), REPO / "CITATION.cff"])

FOLDERS = (
    r"vllm_redrafter|triton_kernels|tests|benchmarks|deploy|docs|examples|recipes|scripts"
    r"|\.ci|\.github"
)
PATH = re.compile(rf"(?<![\w./-])(?:{FOLDERS})/(?!NAME)[\w./-]*\w")
"""A file or folder of ours, in prose or in a command; NAME stands for one that is to be made."""

IN_HISTORY = re.compile(r"`[^`\n]+` of commit [0-9a-f]{7}")
"""A command that is no longer here, with a commit that has it."""

FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]+")
ACCELERATE = {
    *("--num_processes", "--num_machines", "--machine_rank"),
    *("--main_process_ip", "--main_process_port"),
}
DEPLOYMENT = {
    *("--gpus", "--shm-size", "--cap-add", "--security-opt", "--stop-timeout"),
    *("--rm", "--entrypoint", "--no-index", "--timeout", "--now", "--config"),
}
OTHERS_FLAGS = {
    *(*ACCELERATE, *DEPLOYMENT),
    *("--logdir", "--dataset-name", "--dataset-path", "--help", "--extra-index-url"),
}
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


def test_every_result_is_linked_to() -> None:
    """Of each question the newest; the others are in the history."""
    linked = {Path(link).name for document in DOCUMENTS for link in links(text_of(document))}
    kept = {path.name for path in (REPO / "benchmarks" / "results").iterdir()}
    assert not kept - linked
    assert len(kept) <= 15


@documents
def test_every_path_that_is_named_exists(document: Path) -> None:
    named = set(PATH.findall(IN_HISTORY.sub("", text_of(document))))
    assert not sorted(name for name in named if not (REPO / name).exists())


@documents
def test_every_python_file_that_is_named_is_ours(document: Path) -> None:
    """Short names too, such as `policy.py` and `drafting/stats.py`."""
    files = [
        "/" + path.relative_to(REPO).as_posix()
        for folder in ("vllm_redrafter", "triton_kernels", "tests", "benchmarks", "examples")
        for path in (REPO / folder).rglob("*.py")
    ]
    files += ["/" + path.relative_to(REPO).as_posix() for path in (REPO / "scripts").glob("*.py")]
    text = IN_HISTORY.sub("", text_of(document))
    named = set(re.findall(r"`([\w/]+\.py)`", text)) - {"benchmarks/NAME.py"}
    assert not sorted(n for n in named if not any(f.endswith(f"/{n}") for f in files))


@cache
def options() -> dict[str, set[str]]:
    """The options of each of our commands."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return {
        name: {option for param in command.params for option in param.opts}
        for name, command in commands.items()
    }


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
    return found | options_of_vllm() | OTHERS_FLAGS


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


@documents
def test_every_option_that_is_named_is_somebody_s(document: Path) -> None:
    ours = set().union(*options().values())
    named = set(FLAG.findall(IN_HISTORY.sub("", text_of(document))))
    assert not sorted(named - ours - other_flags())


@pytest.mark.parametrize("file", YAML_FILES, ids=lambda path: path.name)
def test_yaml_can_be_read(file: Path) -> None:
    assert isinstance(yaml.safe_load(file.read_text()), dict)


def test_the_workflow_runs_what_ci_is_said_to_run() -> None:
    workflow = yaml.safe_load((REPO / ".github" / "workflows" / "ci.yml").read_text())
    steps = workflow["jobs"]["check"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == [".ci/run"]
    assert (REPO / ".ci" / "run").stat().st_mode & 0o111


def test_what_ci_runs_ends_before_its_job_does() -> None:
    """What hangs is then reported; the job's last minutes are for fetching sources and Python."""
    limited = re.compile(r"timeout .*--kill-after=(\d+) (\d+)m make \w+")
    commands = [line for line in (REPO / ".ci" / "run").read_text().splitlines() if "make " in line]
    limits = [limited.match(command) for command in commands]
    minutes = sum(int(limit[2]) + int(limit[1]) / 60 for limit in limits if limit)
    workflow = yaml.safe_load((REPO / ".github" / "workflows" / "ci.yml").read_text())
    assert len(limits) == 3 and all(limits), "a command without a limit"
    assert minutes <= 90 and minutes + 5 <= workflow["jobs"]["check"]["timeout-minutes"]


def test_the_citation_is_of_this_version() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((REPO / "CITATION.cff").read_text())
    assert citation["title"] == project["name"]
    assert citation["version"] == project["version"]
    assert citation["license"] == project["license"]
    assert citation["references"][0]["url"] == "https://arxiv.org/abs/2403.09919"


def test_every_supported_vllm_has_a_row() -> None:
    text = (REPO / "docs" / "compatibility.md").read_text()
    assert re.findall(r"^\| vLLM (\d\.\d+) \|", text, re.MULTILINE) == list(SUPPORTED_VLLM)


def test_every_setting_is_documented_with_its_default() -> None:
    text = (REPO / "docs" / "serving.md").read_text()
    for field in dataclasses.fields(ReDrafterConfig):
        row = re.search(rf"^\| `{field.name}` \| (\S+) \|", text, re.MULTILINE)
        assert row is not None, field.name
        missing = field.default is dataclasses.MISSING
        # As one writes it in the speculative config, which is JSON.
        default = "required" if missing else json.dumps(field.default).strip('"')
        assert row[1].strip("`") == default
