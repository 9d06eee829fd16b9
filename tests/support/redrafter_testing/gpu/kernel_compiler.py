# SPDX-License-Identifier: Apache-2.0
"""Triton kernels compiled for GPUs that need not be there, and what their machine code takes.

A stand-in for the driver says which GPU it is; a launch ends where the machine code is there.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from vllm_redrafter.triton_kernels import tree_attention
from vllm_redrafter.utils.patching import patched

REGISTERS = 65536
"""32-bit registers of a multiprocessor, on every architecture below; a warp takes 256 at a time."""

SYSTEM_SHARED = 1024
"""Bytes of shared memory that CUDA itself takes per thread block, from sm_80 on."""

FEW_FMA = 64
"""Exponentials and scales take a few; a product of tiles takes hundreds."""


class Architecture(NamedTuple):
    """Limits of a multiprocessor, of "Compute Capabilities" in the CUDA C++ Programming Guide."""

    capability: int
    block_shared: int
    shared: int
    warps: int
    blocks: int


ARCHITECTURES = {
    f"sm_{limits[0]}": Architecture(*limits)
    for limits in (
        (80, 166_912, 167_936, 64, 32),
        (86, 101_376, 102_400, 48, 16),
        (89, 101_376, 102_400, 48, 24),
        (90, 232_448, 233_472, 64, 32),
        (100, 232_448, 233_472, 64, 32),
        (120, 101_376, 102_400, 48, 24),
    )
}


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel: stack bytes per thread, shared bytes and blocks per multiprocessor.

    `ahead` counts groups of copies for later steps of the main loop while one computes.
    `conflicts` counts reads of mma.sync's operands from tiles whose rows are in the same banks.
    """

    name: str
    stack: int
    shared: int
    blocks: int
    instruction: str
    copy_bytes: int
    ahead: int
    conflicts: int
    barriers: int


class _Driver:
    """Stands where Triton's driver would, with a device for each architecture."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_device(self) -> int:
        return int(str(self.target.arch).removeprefix("gfx"))

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compile_launches(architecture: Architecture, launch: Callable[[], Any]) -> list[Kernel]:
    """The kernels that `launch` would start on such a GPU, given CPU tensors; nothing runs."""
    compiled = _compiled(GPUTarget("cuda", architecture.capability, 32), launch)
    return [_read(architecture, name, kernel) for name, kernel in compiled]


@dataclass(frozen=True)
class AmdKernel:
    """One kernel compiled for AMD: vector registers that spill, shared bytes per thread block."""

    name: str
    spilled: int
    shared: int


def compile_for_amd(architecture: str, launch: Callable[[], Any]) -> list[AmdKernel]:
    """The same, for an architecture such as gfx942."""
    with patch.object(torch.version, "hip", "any"):
        compiled = _compiled(GPUTarget("hip", architecture, 64), launch)
    spilled = [re.findall(r"\.vgpr_spill_count: +(\d+)", k.asm["amdgcn"]) for _, k in compiled]
    return [
        AmdKernel(name, int(count), kernel.metadata.shared)
        for (name, kernel), (count,) in zip(compiled, spilled, strict=True)
    ]


def _compiled(target: GPUTarget, launch: Callable[[], Any]) -> list[tuple[str, Any]]:
    compiled: list[tuple[str, Any]] = []
    run = JITFunction.run

    def compile_only(function: JITFunction, *args: Any, **kwargs: Any) -> Any:
        kernel = run(function, *args, **(kwargs | {"warmup": True}))
        compiled.append((function.__name__, kernel))
        return kernel

    with (
        patched(driver, _active=_Driver(target)),
        patched(JITFunction, run=compile_only),
        patched(tree_attention, compute_capability=lambda _: driver.active.get_current_device()),
    ):
        launch()
    return compiled


def _read(architecture: Architecture, name: str, kernel: Any) -> Kernel:
    ptx = kernel.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.check_output([tool, "--dump-resource-usage", file.name], text=True)
    registers, stack = (int(re.findall(rf"\b{key}:(\d+)", usage)[0]) for key in ("REG", "STACK"))
    shared, warps = kernel.metadata.shared, kernel.metadata.num_warps
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*?\], (0x\w+|\d+)", ptx)
    return Kernel(
        name=name,
        stack=stack,
        shared=shared,
        blocks=_resident_blocks(architecture, registers, shared, warps),
        instruction=_matrix_instruction(ptx),
        copy_bytes=max((int(size, 0) for size in copies), default=0),
        ahead=_copies_ahead(kernel.asm["ttgir"]),
        conflicts=_conflicts(kernel.asm["ttgir"]),
        barriers=ptx.count("bar.sync"),
    )


def _resident_blocks(architecture: Architecture, registers: int, shared: int, warps: int) -> int:
    if shared > architecture.block_shared:
        return 0
    per_warp = -(-registers * 32 // 256) * 256
    return min(
        architecture.blocks,
        architecture.warps // warps,
        REGISTERS // (per_warp * warps),
        architecture.shared // (shared + SYSTEM_SHARED),
    )


def _matrix_instruction(ptx: str) -> str:
    for name, marker in (
        ("tcgen05", "tcgen05.mma"),
        ("wgmma", "wgmma.mma_async"),
        ("mma.sync", "mma.sync"),
    ):
        if marker in ptx:
            return name
    return "FMA" if ptx.count("fma.rn.f32") > FEW_FMA else ""


def _copies_ahead(ttgir: str) -> int:
    """What every wait of the main loop leaves under way: copies for later steps."""
    _, _, loop = ttgir.partition("scf.for")
    body, _, _ = loop.partition("\n    }")  # the function's own indentation: the loop's end
    return min(map(int, re.findall(r"ttg\.async_wait .*\{num = (\d+)", body)), default=0)


def _conflicts(ttgir: str) -> int:
    plain = set(re.findall(r"(#\w+) = #ttg\.swizzled_shared<\{[^}]*maxPhase = 1,", ttgir))
    read = re.findall(r"ttg\.local_load .*?, (#\w+), #smem.*-> tensor<[^,]*, #ttg\.dot_op", ttgir)
    return sum(layout in plain for layout in read)
