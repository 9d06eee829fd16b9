# SPDX-License-Identifier: Apache-2.0
"""The defaults on CUDA: our worker and attention, Model Runner V2, graphs, async scheduling."""

import json
import subprocess
import sys
from pathlib import Path

from redrafter_testing.gpu import cuda_configuration
from vllm_redrafter.utils import names


def test_what_a_user_gets_who_sets_nothing(
    few_tokens_target: Path, few_tokens_drafter: Path
) -> None:
    command = [
        sys.executable,
        "-P",
        cuda_configuration.__file__,
        few_tokens_target,
        few_tokens_drafter,
    ]
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    sizes = found.pop("sizes")
    assert found == {
        "worker": names.CUDA_WORKER,
        "attention": "CUSTOM",
        "model_runner_v2": True,
        "asynchronous": True,
        "graphs": "FULL_AND_PIECEWISE",
    }
    # Drafts are captured by requests, verification by trees of 9 rows.
    assert {1, 2, 4, 8, 9, 18, 36} <= set(sizes)
