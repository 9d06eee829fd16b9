# SPDX-License-Identifier: Apache-2.0
"""A rule that must fail: of two walks through each tree, the longer one is accepted.

Each has the target's distribution; choosing the longer favours the tokens that were drafted.
"""

from typing import Any

import torch
from vllm.v1.outputs import SamplerOutput

from vllm_redrafter.engine.cpu.v1 import runner
from vllm_redrafter.engine.cpu.v1.path_sampler import sample_paths
from vllm_redrafter.tree.acceptance import AcceptedPath


def use(worker: Any) -> None:
    """For `Engine.rpc`: replace the acceptance rule in the worker's process."""
    runner.sample_paths = longer_of_two_walks


def longer_of_two_walks(*given: Any) -> tuple[SamplerOutput, AcceptedPath]:
    """For `path_sampler.sample_paths`."""
    (_, first), (_, second) = sample_paths(*given), sample_paths(*given)
    longer = second.num_sampled > first.num_sampled
    accepted = AcceptedPath(
        torch.where(longer[:, None], second.output_tokens, first.output_tokens),
        torch.where(longer, second.num_sampled, first.num_sampled),
        torch.where(longer[:, None], second.path, first.path),
        torch.where(longer, second.last_node, first.last_node),
    )
    return SamplerOutput(accepted.output_tokens, None), accepted
