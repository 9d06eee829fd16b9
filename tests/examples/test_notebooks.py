# SPDX-License-Identifier: Apache-2.0
"""The notebooks run on tiny models, and are committed with outputs."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from redrafter_testing import process_trees
from redrafter_testing.engines.server import free_port

REPO = Path(__file__).parents[2]
SCRIPT = REPO / "scripts" / "execute_notebooks.py"
MACHINE = re.compile(r"(?<![\w.:/])/(?:[\w.-]+/)*[\w.-]+|(?:it/s|s/it)\b|\x1b|\r")
"""An absolute path, a progress bar, a terminal's escape sequence."""


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text_of(cell: NotebookNode) -> str:
    """What a cell printed, figures not included."""
    return "".join(
        output.text if output.output_type == "stream" else output.data.get("text/plain", "")
        for output in cell.outputs
    )


def executed(name: str, folder: Path, target: Path, **variables: str) -> str:
    """Execute a copy of a notebook in a folder; what its cells print."""
    path = shutil.copy(REPO / "examples" / f"{name}.ipynb", folder)
    environment = os.environ | {"TARGET": str(target), **variables}
    process_trees.output_of([sys.executable, "-P", SCRIPT, path], env=environment, cwd=folder)
    return "\n".join(text_of(cell) for cell in code_cells(nbformat.read(path, as_version=4)))


@pytest.mark.engine
def test_training_lowers_the_loss_and_gives_a_drafter_that_fits(
    reciting_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    base = tmp_path / "base"  # its prompts are lines of text
    shutil.copytree(reciting_pair[0], base, ignore=shutil.ignore_patterns("chat_template.jinja"))
    sizes = {"NUM_PROMPTS": "40", "MAX_TOKENS": "24", "STEPS": "36"}
    printed = executed("train_a_drafter", tmp_path, base, **sizes)
    found = re.search(r"first \d+ steps: (\d+\.\d+), of the last: (\d+\.\d+)", printed)
    assert found is not None and float(found[2]) < float(found[1])
    assert f"the drafter fits {base}" in printed
    config = json.loads((tmp_path / "drafter-work" / "drafter" / "config.json").read_text())
    served = config["speculators_config"]["proposal_methods"][0]
    assert (
        f"beam width {served['beam_width']}, beam length {served['beam_length']}, "
        f"{served['speculative_tokens']} nodes: " in printed
    ), "the figures are those of the recorded shape"


@pytest.mark.engine
def test_answers_with_and_without_the_drafter_are_equal(
    reciting_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    target, drafter = reciting_pair
    sizes = {"NUM_PROMPTS": "3", "MAX_TOKENS": "24", "REPEATS": "1"}
    variables = {"DRAFTER": str(drafter), "DTYPE": "float32", **sizes}
    printed = executed("serve_and_measure", tmp_path, target, **variables)
    for in_flight in (1, 3):
        assert f"{in_flight} in flight: 3 of 3 answers are equal" in printed
        verified = re.search(rf"^{in_flight} in flight: (\d+) drafts verified", printed, re.M)
        assert verified is not None and int(verified[1]) > 0


@pytest.mark.engine
def test_the_server_s_counters_agree_at_every_level(
    reciting_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    target, drafter = reciting_pair
    variables = {"LEVELS": "1,3", "MAX_TOKENS": "24", "PORT": str(free_port())}
    printed = executed("read_the_budget", tmp_path, target, DRAFTER=str(drafter), **variables)
    rows = re.findall(
        r"^ +(\d+)(?: +[\d.]+){3} +\d+% +(\d+\.\d\d) +(\d+\.\d\d) +\d+\.\d\d$", printed, re.M
    )
    assert [level for level, _, _ in rows] == ["1", "3"]
    for _, nodes, tokens in rows:
        assert 0 < float(nodes) <= 12 and 1 <= float(tokens) <= 1 + float(nodes)
    assert re.search(r"^Engine 000: ReDrafter: \d", printed, re.M)
    assert re.search(r"^\d+ steps, \d+ of them with a draft$", printed, re.M)
    assert (tmp_path / "trace.html").is_file()


def test_committed_notebooks_were_executed_in_order_without_an_error() -> None:
    for path in (REPO / "examples").glob("*.ipynb"):
        cells = code_cells(nbformat.read(path, as_version=4))
        assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
        for cell in cells:
            assert all(output.output_type != "error" for output in cell.outputs)
            assert all(output.get("name") != "stderr" for output in cell.outputs)
            assert not MACHINE.findall(text_of(cell))
