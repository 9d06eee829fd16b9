# SPDX-License-Identifier: Apache-2.0
"""The options of the installed vLLM's server, read from its sources: importing it takes seconds."""

import re
from importlib.util import find_spec
from pathlib import Path


def vllm_folder() -> Path:
    """Of the installed package."""
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def options_of_vllm() -> set[str]:
    """Of the engine by their names, of the server by its fields."""
    root = vllm_folder()
    engine = re.findall(r'"(--[\w-]+)"', (root / "engine" / "arg_utils.py").read_text())
    server = (root / "entrypoints" / "launchers" / "cli_args.py").read_text()
    fields = re.findall(r"^    (\w+): ", server, re.MULTILINE)
    return {*engine, *("--" + field.replace("_", "-") for field in fields)}
