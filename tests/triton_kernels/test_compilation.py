# SPDX-License-Identifier: Apache-2.0
"""The kernels as machine code: they fit each architecture, without a GPU to try it on.

In this folder's processes kernels are interpreted; a process of its own (this file as a script)
compiles them.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_redrafter import triton_kernels

SOURCES = "\n".join(file.read_text() for file in Path(triton_kernels.__file__).parent.glob("*.py"))
LAUNCHED = set(re.findall(r"^ +(\w+)\[\(", SOURCES, re.MULTILINE))
"""Kernels that a decoding step launches, by their launches in the sources."""
ATTENDING = {"_attend_part", "_merge_parts"}

MATRIX = {"sm_90": "wgmma", "sm_100": "tcgen05"}
"""What multiplies 64 rows of bf16 or fp8; mma.sync elsewhere."""

VARIANTS = {"window": True, "cap": True, "sinks": True}
CASES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "bf16, 128 rows": {"nodes": 128, "group": 1, "block_size": 32, "parts": 1},
    "bf16, head size 80": {"head_dim": 80, "nodes": 9},
    "bf16, head size 512, all variants": {"head_dim": 512, **VARIANTS},
    "fp8": {"dtype": "fp8"},
    "fp32": {"dtype": "fp32"},
}
ATTENTION = {
    "sm_80": ["bf16"],
    "sm_86": ["bf16", "bf16, 128 rows", "bf16, head size 512, all variants", "fp32"],
    "sm_89": ["bf16", "fp8"],
    "sm_90": [*CASES],
    "sm_100": ["bf16"],
    "sm_120": ["bf16"],
}
"""All cases for the least and the most shared memory in use."""
OF_DRAFTS = ("sm_86", "sm_90")
STEP = ("K 32", "K 127", "beams 8x5", "beams 64x32")
AMD, AMD_SHARED = "gfx942", 65_536
"""The same of a GPU of AMD's: local data share per workgroup, by its instruction set's document."""


def compile_all() -> dict[str, Any]:
    """Every architecture's kernels, by case; run as a script."""
    from dataclasses import asdict

    from triton.compiler.errors import CompilationError

    from redrafter_testing.gpu.kernel_compiler import (
        ARCHITECTURES,
        compile_for_amd,
        compile_launches,
    )
    from redrafter_testing.gpu.kernel_launches import DRAFTS, Attention, step_cases

    def compiled(architecture: str, launch: Any) -> list[dict[str, Any]]:
        return [asdict(k) for k in compile_launches(ARCHITECTURES[architecture], launch)]

    found: dict[str, Any] = {
        architecture: {name: compiled(architecture, Attention(**CASES[name])) for name in names}
        for architecture, names in ATTENTION.items()
    }
    steps = dict(step_cases())
    found["draft"] = {a: [k for launch in DRAFTS for k in compiled(a, launch)] for a in OF_DRAFTS}
    found["around"] = [k for name in STEP for k in compiled("sm_90", steps[name])]
    launches = [Attention(), *DRAFTS, steps["K 32"], steps["beams 8x5"]]
    found["amd"] = [asdict(k) for launch in launches for k in compile_for_amd(AMD, launch)]
    try:
        found["fp8 on sm_86"] = compiled("sm_86", Attention(dtype="fp8"))
    except CompilationError as error:
        found["fp8 on sm_86"] = str(error)
    return found


@pytest.fixture(scope="module")
def kernels(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What has not changed since the last run is in Triton's own cache, kept in pytest's."""
    assert pytestconfig.cache is not None
    environment = {**os.environ, "TRITON_CACHE_DIR": str(pytestconfig.cache.mkdir("triton"))}
    environment.pop("TRITON_INTERPRET", None)
    output = tmp_path_factory.mktemp("compiled") / "kernels.json"
    command = [sys.executable, __file__, str(output)]
    subprocess.run(command, check=True, env=environment)
    return json.loads(output.read_text())


@pytest.mark.parametrize(
    ("architecture", "case"), [(a, case) for a, cases in ATTENTION.items() for case in cases]
)
def test_attention_fits_the_architecture(
    kernels: dict[str, Any], architecture: str, case: str
) -> None:
    attend, *merge = kernels[architecture][case]
    assert attend["name"] == "_attend_part"
    assert [kernel["name"] for kernel in merge] == ["_merge_parts"] * len(merge)
    assert bool(merge) == (CASES[case].get("parts") != 1)
    for kernel in (attend, *merge):
        assert kernel["stack"] == 0, "registers are spilled"
        assert kernel["blocks"] >= 1, "it needs more shared memory than there is"
    assert attend["copy_bytes"] == 16
    if case == "bf16" and architecture != "sm_100":
        assert attend["ahead"] >= 2, "the next K and V are not under way while a step computes"
    if architecture == "sm_90" and case in ("bf16", "bf16, head size 80", "fp8"):
        assert attend["blocks"] >= 2, "two blocks share a multiprocessor of an H100"
    if case == "fp32":
        assert attend["instruction"] == "FMA", "TF32 would keep 10 bits of the mantissa"
    elif CASES[case].get("head_dim") == 512:
        assert attend["instruction"] == "mma.sync", "it has no tile of 64 rows"
    else:
        assert attend["instruction"] == MATRIX.get(architecture, "mma.sync")


def test_the_kernels_around_attention_spill_nothing(kernels: dict[str, Any]) -> None:
    for kernel in kernels["around"]:
        assert kernel["stack"] == 0 and kernel["blocks"] >= 1, kernel
        # Whether a row's store and the next one's load are of the same thread is Triton's choice.
        assert kernel["name"] != "_compact" or kernel["barriers"]


@pytest.mark.parametrize("architecture", OF_DRAFTS)
def test_a_draft_s_kernels_fit_the_architecture(kernels: dict[str, Any], architecture: str) -> None:
    launched = kernels["draft"][architecture]
    tried = {kernel["name"] for kernel in (*launched, *kernels["around"])}
    assert tried == LAUNCHED - ATTENDING, "each kernel is tried"
    for kernel in launched:
        assert kernel["stack"] == 0, f"{kernel['name']} spills registers"
        assert kernel["blocks"] >= 1, kernel
        if kernel["name"] in ("_draft_layer", "_gated_cell"):
            assert kernel["instruction"] in ("mma.sync", MATRIX.get(architecture))
            assert kernel["ahead"] >= 2, "weights are not under way ahead of their use"
        if architecture == "sm_90":  # older ones have no shared memory for 64 rows swizzled as well
            assert not kernel["conflicts"], f"{kernel['name']} reads rows in the same banks"


def test_all_kernels_compile_for_a_gpu_of_amd_s(kernels: dict[str, Any]) -> None:
    assert {kernel["name"] for kernel in kernels["amd"]} == LAUNCHED
    for kernel in kernels["amd"]:
        assert kernel["spilled"] == 0 and kernel["shared"] <= AMD_SHARED, kernel


def test_an_fp8_cache_does_not_compile_for_an_older_gpu(kernels: dict[str, Any]) -> None:
    """Why plugin.py refuses it there."""
    assert "fp8e4nv not supported" in kernels["fp8 on sm_86"]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(compile_all()))
