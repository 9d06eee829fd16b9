"""The drafter's vocabulary-wide layer in fp8, multiplied by vLLM's own kernel.

Each level of a draft reads that layer whole, for a few rows: its time is its bytes, of which fp8
has half. So weights are in fp8 alone, and what they are multiplied with stays as it is (vLLM's
W8A16, a kernel named Marlin): quantising that as well, as vLLM's layers for fp8 on newer GPUs do,
would cost a launch per level and bring nothing that is waited for.

The kernel has weights in an order of its own, from which no row can be read. Where drafts choose
among candidates, whose rows are gathered, a second copy is kept: V E bytes more, as many as 16-bit
weights take, and still half to read in a product.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config

from vllm_redrafter.heads.fp8 import RowsInFp8, quantise_rows
from vllm_redrafter.heads.head import DraftHead

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DTYPES = (torch.float16, torch.bfloat16)
"""What Marlin multiplies with."""


class Fp8Layer(nn.Linear):
    """A linear layer without bias; weights are quantised here, not read in fp8.

    Attributes:
        weight: [0, in], of no rows: of the dtype and on the device that the layer computes in.
        rows: of the weight, a second copy beside the kernel's; None unless it is asked for.
    """

    def __init__(self, linear: nn.Linear, vllm_config: VllmConfig, keep_rows: bool = False) -> None:
        """The same layer; `linear` is no longer needed.

        Args:
            linear: without a bias.
            vllm_config: of the engine.
            keep_rows: keep `rows`.

        Raises:
            ValueError: vLLM has no kernel for it: see `fp8_obstacles`.
        """
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        weight = linear.weight
        self.weight = nn.Parameter(weight.new_empty(0, self.in_features), requires_grad=False)
        with set_current_vllm_config(vllm_config):
            self._kernel = kernel_for(self.out_features, self.in_features, weight.dtype)
        # In a tuple, so that it is no part of the drafter's state: that is what checkpoints have.
        rows = self._quantised(weight)
        self._packed = (self._pack(rows),)
        self.rows = RowsInFp8(*(part.clone() for part in rows)) if keep_rows else None

    @property
    def packed(self) -> Any:
        """What vLLM takes for a layer: `weight` and `weight_scale` as its kernel reads them."""
        return self._packed[0]

    def replace(self, weight: Tensor) -> None:
        """Take other weights [out, in], into the same memory: CUDA graphs hold its addresses."""
        rows = self._quantised(weight.to(self.weight.dtype))
        if self.rows is not None:
            for kept, part in zip(self.rows, rows, strict=True):
                kept.copy_(part)
        packed = self._pack(rows)
        for old, new in zip(self.packed.parameters(), packed.parameters(), strict=True):
            old.data.copy_(new)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        out: Tensor = self._kernel.apply_weights(self.packed, x)
        return out

    def _quantised(self, weight: Tensor) -> RowsInFp8:
        """The rows of a weight, on the layer's device."""
        # Quantised where it is: on a GPU that serves there may be no room for 16 bits of each.
        quantised, scales = quantise_rows(weight)
        device = self.weight.device
        return RowsInFp8(quantised.to(device), scales.to(device))

    def _pack(self, rows: RowsInFp8) -> Any:
        """What vLLM takes for a layer, its weights in the kernel's order; it may take the rows."""
        layer: Any = nn.Module()
        layer.input_size_per_partition, layer.output_size_per_partition = rows.quantised.shape[::-1]
        layer.logical_widths, layer.weight_block_size = [len(rows.scales)], None
        layer.orig_dtype = rows.scales.dtype
        layer.weight = nn.Parameter(rows.quantised.t(), requires_grad=False)
        layer.weight_scale = nn.Parameter(rows.scales, requires_grad=False)
        self._kernel.process_weights_after_loading(layer)
        return layer


def kernel_for(rows: int, columns: int, dtype: torch.dtype) -> Any:
    """vLLM's kernel for weights [rows, columns] in fp8 and inputs of this dtype.

    Raises:
        ValueError: it has none on this platform.
    """
    from vllm.model_executor.kernels.linear import (
        MarlinFP8ScaledMMLinearKernel,
        init_wfp8_a16_linear_kernel,
    )
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        kFp8DynamicTensorSym,
        kFp8StaticChannelSym,
    )

    return init_wfp8_a16_linear_kernel(
        weight_quant_key=kFp8StaticChannelSym,
        activation_quant_key=kFp8DynamicTensorSym,  # which nothing is quantised by
        weight_shape=(rows, columns),
        input_dtype=dtype,
        out_dtype=dtype,
        # The others expect layers of vLLM's own classes.
        force_kernel=MarlinFP8ScaledMMLinearKernel,
        module_name="the drafter's vocabulary-wide layer",
    )


def fp8_obstacles(vllm_config: VllmConfig) -> Iterator[str]:
    """Why the drafter's vocabulary-wide layer cannot be in fp8: what it is, and what to do."""
    dtype = vllm_config.model_config.dtype
    if dtype not in DTYPES:
        yield (
            f"head_dtype is 'fp8', and vLLM multiplies fp8 with 16-bit numbers, not {dtype}; leave "
            "head_dtype out, or use --dtype bfloat16"
        )
        return
    try:
        with set_current_vllm_config(vllm_config):
            kernel_for(128, 128, dtype)
    except ValueError as error:
        reason = " ".join(str(error).split())
        yield f"head_dtype is 'fp8', and vLLM has no layer for it here ({reason}); leave it out"


def quantise(
    drafter: DraftHead, vllm_config: VllmConfig, keep_rows: bool = False
) -> dict[str, Fp8Layer]:
    """Put the vocabulary-wide layers into fp8; see `Fp8Layer`.

    Returns:
        By name in the drafter's state, what came in the place of its layers.
    """
    layers = drafter.vocabulary_layers
    names = [name for name, module in drafter.named_modules() if any(module is x for x in layers)]
    replaced = {}
    for name in names:
        parent, _, child = name.rpartition(".")
        linear: Any = drafter.get_submodule(name)
        layer = Fp8Layer(linear, vllm_config, keep_rows)
        setattr(drafter.get_submodule(parent), child, layer)
        replaced[f"{name}.weight"] = layer
    return replaced
