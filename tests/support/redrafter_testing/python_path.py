# SPDX-License-Identifier: Apache-2.0
"""The PYTHONPATH of the processes that tests start."""

import os
from pathlib import Path

SUPPORT = Path(__file__).parents[1]
"""The folder of `redrafter_testing` and `interpreted`."""


def python_path(*folders: Path) -> str:
    """The folders before those of PYTHONPATH; an empty entry would be the current folder."""
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([*map(str, folders), *filter(None, before)])
