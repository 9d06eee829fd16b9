# SPDX-License-Identifier: Apache-2.0
"""The kernels run on a GPU where there is one, and under Triton's interpreter elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
import torch

from redrafter_testing.gpu.triton_interpreter import ON_GPU, Memory, import_kernels, kernels_run

if TYPE_CHECKING:
    from redrafter_testing.gpu.tree_attention_launch import Launch

# Before any test module of this folder imports them.
import_kernels()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture(scope="module", autouse=True)
def memory() -> Iterator[Memory | None]:
    """Under the interpreter, the watch over the kernels' accesses; a GPU has none."""
    with kernels_run() as watch:
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
