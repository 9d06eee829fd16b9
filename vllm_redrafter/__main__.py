# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_redrafter`, which is what `accelerate launch -m` starts."""

from vllm_redrafter.cli.main import app

app()
