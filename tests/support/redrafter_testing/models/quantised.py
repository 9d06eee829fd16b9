# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints, as vLLM's loaders expect them; weights are rounded to the nearest."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32
"""Inputs that share a scale, in 4 bits."""

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""Which of eight outputs are in an int32's four bits, from the lowest."""


@dataclass(frozen=True)
class Format:
    """ "quantization_config" of config.json, and what replaces a linear layer's weight, by name."""

    config: Mapping[str, Any]
    pack: Callable[[Tensor], dict[str, Tensor]]
    output_layer: bool = False


def quantise(folder: Path, kept: Format) -> Path:
    """Put a target's weights into the format, in place; embeddings and norms stay."""
    weights = load_file(folder / "model.safetensors")
    ends = ("_proj.weight", "lm_head.weight") if kept.output_layer else ("_proj.weight",)
    for name in [name for name in weights if name.endswith(ends)]:
        for end, tensor in kept.pack(weights.pop(name)).items():
            weights[name.removesuffix("weight") + end] = tensor.contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = dict(kept.config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def gptq(weight: Tensor) -> dict[str, Tensor]:
    """Symmetric; eight inputs in an int32. A zero point is kept less one: 7 for 8."""
    numbers, scales = _symmetric(weight)
    outputs, inputs = weight.shape
    return {
        "qweight": _packed(numbers).t(),
        "qzeros": torch.full((inputs // GROUP, outputs // 8), 0x77777777, dtype=torch.int32),
        "scales": scales.t().half(),
        "g_idx": torch.arange(inputs, dtype=torch.int32) // GROUP,
    }


def awq(weight: Tensor) -> dict[str, Tensor]:
    """With zero points; eight outputs in an int32."""
    groups = weight.view(len(weight), -1, GROUP)
    lowest = groups.amin(dim=2, keepdim=True)
    scales = (groups.amax(dim=2, keepdim=True) - lowest) / 15
    zeros = (-lowest / scales).round()
    numbers = ((groups / scales).round() + zeros).clamp(0, 15).view(weight.shape)
    return {
        "qweight": _packed(_in_awq_order(numbers.t())),
        "qzeros": _packed(_in_awq_order(zeros[..., 0].t())),
        "scales": scales[..., 0].t().half(),
    }


def int4(weight: Tensor) -> dict[str, Tensor]:
    """Of compressed-tensors, symmetric; eight inputs in an int32."""
    numbers, scales = _symmetric(weight)
    return {
        "weight_packed": _packed(numbers),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }


def int8(weight: Tensor) -> dict[str, Tensor]:
    """Of compressed-tensors; each output has a scale."""
    scales = weight.abs().amax(dim=1, keepdim=True) / 127
    return {"weight": (weight / scales).round().to(torch.int8), "weight_scale": scales}


def fp8(weight: Tensor) -> dict[str, Tensor]:
    """Of compressed-tensors, e4m3; each output has a scale."""
    scales = weight.abs().amax(dim=1, keepdim=True) / 448
    return {"weight": (weight / scales).to(torch.float8_e4m3fn), "weight_scale": scales}


def _symmetric(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers [outputs, inputs] from 1 to 15, of which 8 is zero; scales [outputs, groups]."""
    groups = weight.view(len(weight), -1, GROUP)
    scales = groups.abs().amax(dim=2, keepdim=True) / 7
    return ((groups / scales).round() + 8).view(weight.shape), scales[..., 0]


def _in_awq_order(numbers: Tensor) -> Tensor:
    return numbers.reshape(-1, 8)[:, AWQ_ORDER].view(numbers.shape)


def _packed(numbers: Tensor) -> Tensor:
    """[rows, columns] of 4 bits each to [rows, columns / 8] int32, the first in the lowest bits."""
    places = numbers.reshape(len(numbers), -1, 8).long() << torch.arange(0, 32, 4)
    return places.sum(dim=2).to(torch.int32)


def _compressed_tensors(form: str, weights: Any, inputs: Any = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def _numbers(kind: str, bits: int, strategy: str, **rest: Any) -> dict[str, Any]:
    return {"type": kind, "num_bits": bits, "symmetric": True, "strategy": strategy, **rest}


def _w8a8(form: str, kind: str) -> dict[str, Any]:
    """A scale for each output of a weight, and for each row of what comes in, in its step."""
    inputs = _numbers(kind, 8, "token", dynamic=True)
    return _compressed_tensors(form, _numbers(kind, 8, "channel"), inputs)


_FOUR_BITS = {"bits": 4, "group_size": GROUP}
_GPTQ = {**_FOUR_BITS, "quant_method": "gptq", "desc_act": False, "sym": True, "lm_head": True}
_AWQ = {**_FOUR_BITS, "quant_method": "awq", "zero_point": True, "version": "gemm"}

FORMATS = {
    "GPTQ, 4 bits, the output layer as well": Format(_GPTQ, gptq, output_layer=True),
    "AWQ, 4 bits": Format(_AWQ, awq),
    "compressed-tensors, weights in int4": Format(
        _compressed_tensors("pack-quantized", _numbers("int", 4, "group", group_size=32)), int4
    ),
    "compressed-tensors, W8A8 in int8": Format(_w8a8("int-quantized", "int"), int8),
    "compressed-tensors, W8A8 in fp8": Format(_w8a8("float-quantized", "float"), fp8),
}
"""vLLM runs each of them on a CPU. A packed output layer has a multiple of 64 tokens."""
