# SPDX-License-Identifier: Apache-2.0
"""Execute notebooks in place: what is written has their outputs, without logs.

    python scripts/execute_notebooks.py examples/*.ipynb

Their kernels run in the current folder, so a folder there that is named as a target's hub id stands
for it. A cell that fails ends the script with its error, and the notebook stays as it was.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

SECONDS_PER_CELL = 900
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def normalise(notebook: NotebookNode) -> None:
    """Drop logs and what differs by machine and run; ids of cells are their numbers."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for number, cell in enumerate(notebook.cells, start=1):
        cell.id, cell.metadata = f"cell-{number}", nbformat.from_dict({})
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]


def logs(notebook: NotebookNode) -> str:
    """What its cells and their subprocesses wrote to stderr."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(output.text for output in outputs if output.get("name") == "stderr")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", type=Path, nargs="+")
    for path in parser.parse_args().notebooks:
        notebook = nbformat.read(path, as_version=4)
        client = NotebookClient(notebook, timeout=SECONDS_PER_CELL, record_timing=False)
        try:
            client.execute(cwd=Path.cwd())
        except CellExecutionError:
            print(logs(notebook), file=sys.stderr)  # an engine says why it failed in a log alone
            raise
        normalise(notebook)
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
