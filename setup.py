# SPDX-License-Identifier: Apache-2.0
"""All metadata is in pyproject.toml, which can find packages or list them, but not both."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["vllm_redrafter*"]),
        "vllm_redrafter.checkpoints.drafters",  # data alone; setuptools warns of folders unnamed
        "vllm_redrafter.triton_kernels",
    ]
)
