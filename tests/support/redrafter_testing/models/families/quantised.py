# SPDX-License-Identifier: Apache-2.0
"""Quantised targets in the formats that vLLM runs on a CPU, most of whose kernels want 16 bits.

Under Triton's interpreter plain vLLM is wrong in bfloat16; a decisive target bears rounding.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from redrafter_testing.models.decisive_target import VOCAB_SIZE, make_decisive_target
from redrafter_testing.models.families.family import Family
from redrafter_testing.models.quantised import FORMATS, Format, quantise


def _make(kept: Format, folder: Path) -> Path:
    return quantise(make_decisive_target(folder), kept)


def _family(feature: str, make: Callable[[Path], Path], **arguments: Any) -> Family:
    return Family(
        "MistralForCausalLM",
        make,
        feature,
        vocab_size=VOCAB_SIZE,
        arguments={"dtype": "float16", **arguments},
    )


QUANTISED = (
    *(_family(name, partial(_make, kept)) for name, kept in FORMATS.items()),
    _family(
        "weights in int8, quantised while loaded",
        make_decisive_target,
        quantization="int8_per_channel_weight_only",
    ),
)


def require_kernel(family: Family) -> None:
    """Skip a test where vLLM itself, without a drafter, cannot run this target."""
    if "W8A8 in int8" in family.name and torch.cpu._is_amx_tile_supported():
        pytest.skip("vLLM 0.32's int8 kernel for processors with AMX does not take such sizes")
    of_four_bits = any(of in family.name for of in ("4 bits", "weights in int4"))
    if of_four_bits and not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM 0.32 has its kernel for 4 bits on processors with AVX-512 alone")
