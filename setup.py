# SPDX-License-Identifier: Apache-2.0
"""What pyproject.toml cannot say: packages found and listed, a README for package indexes."""

import re
import tomllib
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
PROJECT = tomllib.loads((HERE / "pyproject.toml").read_text("utf-8"))["project"]


def absolute(link: re.Match[str]) -> str:
    """A relative link of the README, as one to this version's tag in the repository."""
    kind = "raw" if link[1].endswith(".png") else "blob"
    return f"]({PROJECT['urls']['Repository']}/{kind}/v{PROJECT['version']}/{link[1]})"


setup(
    long_description=re.sub(
        r"\]\((?!https:)([^)]+)\)", absolute, (HERE / "README.md").read_text("utf-8")
    ),
    long_description_content_type="text/markdown",
    packages=[
        *find_packages(include=["vllm_redrafter*"]),
        "vllm_redrafter.checkpoints.drafters",  # data alone; setuptools warns of folders unnamed
        "vllm_redrafter.triton_kernels",
    ],
)
