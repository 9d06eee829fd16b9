"""The kernels run on a GPU where there is one, and under Triton's interpreter elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from redrafter_testing.gpu.triton_interpreter import Memory, import_interpreted, interpreted

ON_GPU = torch.cuda.is_available()

# Before any test module of this folder imports them.
if not ON_GPU:
    import_interpreted(
        "vllm_redrafter.triton_kernels.accept_path",
        "vllm_redrafter.triton_kernels.build_tree",
        "vllm_redrafter.triton_kernels.compact_kv",
        "vllm_redrafter.triton_kernels.stage_trees",
        "vllm_redrafter.triton_kernels.tree_attention_kernels",
        "vllm_redrafter.triton_kernels.tree_attention",
        "vllm_redrafter.triton_kernels.tree_from_beams",
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
