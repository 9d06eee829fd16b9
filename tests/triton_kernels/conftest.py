# SPDX-License-Identifier: Apache-2.0
"""The kernels run on a GPU where there is one, and under Triton's interpreter elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
import torch

from redrafter_testing.gpu.triton_interpreter import Memory, import_interpreted, interpreted

if TYPE_CHECKING:
    from redrafter_testing.gpu.tree_attention_launch import Launch

ON_GPU = torch.cuda.is_available()

# Before any test module of this folder imports them.
if not ON_GPU:
    import_interpreted(
        "vllm_redrafter.triton_kernels.accept_path",
        "vllm_redrafter.triton_kernels.build_tree_kernels",
        "vllm_redrafter.triton_kernels.build_tree",
        "vllm_redrafter.triton_kernels.compact_kv",
        "vllm_redrafter.triton_kernels.draft_layers",
        "vllm_redrafter.triton_kernels.find_matches",
        "vllm_redrafter.triton_kernels.join_matches",
        "vllm_redrafter.triton_kernels.gated_layer",
        "vllm_redrafter.triton_kernels.ordered_keys",
        "vllm_redrafter.triton_kernels.top_candidates",
        "vllm_redrafter.triton_kernels.candidates",
        "vllm_redrafter.triton_kernels.gather_dot",
        "vllm_redrafter.triton_kernels.grow_beams",
        "vllm_redrafter.triton_kernels.observe_nodes",
        "vllm_redrafter.triton_kernels.observe_matches",
        "vllm_redrafter.triton_kernels.stage_trees",
        "vllm_redrafter.triton_kernels.rope_positions",
        "vllm_redrafter.triton_kernels.tree_attention_kernels",
        "vllm_redrafter.triton_kernels.tree_attention",
    )


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture(scope="module", autouse=True)
def memory() -> Iterator[Memory | None]:
    """Under the interpreter, the watch over the kernels' accesses; a GPU has none."""
    if ON_GPU:
        yield None
    else:
        with interpreted() as watch:
            yield watch


@pytest.fixture(scope="module")
def new_tensors_hold_nan() -> Iterator[None]:
    """The launchers' own buffers are poisoned too: PyTorch fills new tensors in this mode."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def launch(device: torch.device) -> Callable[..., Launch]:
    """A launch of the attention kernel on this device."""
    from redrafter_testing.gpu.tree_attention_launch import Launch

    return lambda *args, **kwargs: Launch(device, *args, **kwargs)


@pytest.fixture
def needs_fp8(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("Triton compiles fp8 e4m3 from compute capability 8.9 on")
