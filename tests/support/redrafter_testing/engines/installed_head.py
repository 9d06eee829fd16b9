# SPDX-License-Identifier: Apache-2.0
"""A head of another package, installed where an engine's process finds it."""

import sys
from pathlib import Path


def install(folder: Path, name: str, head: str) -> Path:
    """What an installer writes for a package whose entry point is a head.

    Args:
        folder: to be on the path of who is to find it.
        name: the package's.
        head: the entry point, as `module:Class`.
    """
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[vllm_redrafter.heads]\n{name} = {head}\n")
    return folder


def start(paths: list[str], graphs: tuple[int, ...] = ()) -> None:
    """For an engine's `setup`: these are on the path, and graphs of so many rows are recorded."""
    sys.path[:0] = paths
    if graphs:
        from redrafter_testing.gpu import recorded_graphs

        recorded_graphs.use(graphs)
