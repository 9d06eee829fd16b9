"""What is derived from the machine code."""

from __future__ import annotations

import pytest
from kernel_parts.compiler import ARCHITECTURES, longest_loop, resident_blocks


@pytest.mark.parametrize(
    ("architecture", "registers", "shared", "warps", "blocks"),
    [
        ("sm_90", 32, 0, 1, 32),  # as many as there may be
        ("sm_90", 32, 0, 4, 16),  # 64 warps
        ("sm_86", 32, 0, 4, 12),  # 48 warps
        ("sm_90", 128, 0, 8, 2),  # 65,536 registers
        ("sm_90", 129, 0, 8, 1),
        ("sm_90", 255, 0, 8, 1),
        ("sm_90", 32, 57_344, 4, 4),  # with the system's 1 KiB each, 233,472 bytes
        ("sm_90", 32, 57_345, 4, 3),
        ("sm_86", 32, 101_376, 4, 1),
        ("sm_86", 32, 101_377, 4, 0),  # cannot be launched
    ],
)
def test_how_many_blocks_a_multiprocessor_holds(
    architecture: str, registers: int, shared: int, warps: int, blocks: int
) -> None:
    assert resident_blocks(ARCHITECTURES[architecture], registers, shared, warps) == blocks


def test_the_longest_loop_is_counted_and_the_codes_end_is_none() -> None:
    code = """
.L_x_0:
        /*0000*/                   MOV R1, R2 ;
.L_x_1:
        /*0010*/                   FADD R1, R1, R2 ;
        /*0020*/              @!P0 BRA `(.L_x_1) ;
        /*0030*/                   IADD3 R1, R1, R2, RZ ;
        /*0040*/               @P0 BRA `(.L_x_0) ;
        /*0050*/                   EXIT ;
.L_x_2:
        /*0060*/                   BRA `(.L_x_2);
"""
    assert longest_loop(code) == 5
