# SPDX-License-Identifier: Apache-2.0
"""What the GPU's worker does besides vLLM's, in a process without a GPU."""

import pytest

from redrafter_testing.engines import inside_worker
from redrafter_testing.engines.forked_engine import Engine


@pytest.mark.engine
def test_the_gpu_s_worker_makes_our_model_runner(oracle: Engine) -> None:
    (made,) = oracle.rpc(inside_worker.made_by_the_gpu_worker)
    assert made == [
        "vllm_redrafter.engine.cuda.runner.GPUTreeModelRunner",
        "redrafter_testing.oracles.oracle_v2.OracleSpeculator",
    ]
