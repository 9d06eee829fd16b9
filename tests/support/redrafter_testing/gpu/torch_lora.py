# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters by vLLM's code for GPUs, its kernels (which refuse float32) in torch."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from redrafter_testing.gpu.recorded_graphs import as_one_node


def lora_shrink(
    inputs: Tensor, weights: Sequence[Tensor], out: Tensor, *tables: Any, **_: Any
) -> None:
    """vLLM's, from [rows, H] to [parts, rows, rank]; `tables`: `LoRAKernelMeta`'s, a factor."""
    *rows, none, most, scale = tables
    if not on_host(none):
        _shrink(inputs, weights, out, rows, on_host(most), scale)


def lora_expand(
    inputs: Tensor,
    weights: Sequence[Tensor],
    out: Tensor,
    *tables: Any,
    offset_start: int = 0,
    add_inputs: bool = False,
) -> None:
    """Likewise: adds to out [rows, columns of all parts] what each row's adapter gives."""
    assert add_inputs
    *rows, none, most = tables
    if not on_host(none):
        _expand(inputs, weights, out, rows, on_host(most), offset_start)


def on_host(number: Tensor) -> int:
    """Of a tensor that is the host's on a GPU as well: a graph keeps the number of its capture."""
    return int(number.numpy()[0])


@as_one_node
def _shrink(
    inputs: Tensor,
    weights: Sequence[Tensor],
    out: Tensor,
    tables: Sequence[Tensor],
    most: int,
    scale: float,
) -> None:
    out.zero_()
    for adapter, rows in _groups(tables, most):
        for part, weight in zip(out, weights, strict=True):
            part[rows] = scale * inputs[rows] @ weight[adapter, 0].T


@as_one_node
def _expand(
    inputs: Tensor,
    weights: Sequence[Tensor],
    out: Tensor,
    tables: Sequence[Tensor],
    most: int,
    first: int,
) -> None:
    for adapter, rows in _groups(tables, most):
        start = first
        for part, weight in zip(inputs, weights, strict=True):
            end = start + weight.shape[2]
            out[rows, start:end] += part[rows] @ weight[adapter, 0].T
            start = end


def _groups(tables: Sequence[Tensor], most: int) -> Iterator[tuple[int, Tensor]]:
    """Of the first adapters in use, the rows of each, as vLLM's kernels find them."""
    _, sorted_rows, counts, starts, adapters = tables
    for index in range(most):
        adapter, start = int(adapters[index]), int(starts[index])
        if adapter >= 0:
            yield adapter, sorted_rows[start : start + int(counts[index])].long()


def use() -> None:
    """Engines started in this process apply adapters so."""
    from vllm.lora.punica_wrapper import punica_gpu
    from vllm.platforms.cpu import CpuPlatform

    wrapper = f"{punica_gpu.__name__}.{punica_gpu.PunicaWrapperGPU.__name__}"
    CpuPlatform.get_punica_wrapper = classmethod(lambda cls: wrapper)
    module: Any = punica_gpu
    module.lora_shrink, module.lora_expand = lora_shrink, lora_expand
