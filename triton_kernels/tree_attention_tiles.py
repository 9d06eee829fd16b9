"""How `tree_attention` cuts its work up: tiles of rows and keys, and parts of the keys.

The choices follow from what the compiled kernels take (benchmarks/kernel_resources.py, for sm_80 to
sm_120) and from arithmetic; none of them has been timed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

MIN_PART_KEYS = 256
"""With fewer keys, a part's results, in fp32, are as large as the K and V that it reads."""

KEY_TILE_BYTES = 8192

MAX_REGISTERS = 255
"""Per thread, by the instruction set; a block of 8 warps can have as many."""


@dataclass(frozen=True)
class Tile:
    """What a program of the attention kernel holds at a time.

    Attributes:
        rows: nodes x query heads of one KV head; a power of two.
        keys: of one step of its loop; a power of two.
        num_warps, num_stages, max_registers: Triton's; None leaves registers to the assembler.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    max_registers: int | None


def choose_tile(rows: int, head_dim: int, dtype: torch.dtype) -> Tile:
    """The tile for `rows` = nodes x query heads of one KV head, queries of `dtype`.

    It is the same for all GPUs: it fits the 99 KiB of shared memory that a thread block has on
    sm_86, sm_89 and sm_120, and spills no registers (fp32 on sm_100 and sm_120: 8 bytes at most).

    Rows: the smallest power of two that holds them, between 16 (a matrix instruction's) and 64.
    Where there are more, 128 if that pads no more than 64 does, else 64: 132 rows (33 nodes, 4
    heads) are 3 tiles of 64 and not 2 of 128, which would multiply a third more. The price is that
    K and V are read once per tile, from the L2 cache after the first: the tiles of a KV head are
    neighbours in the launch. Head dims beyond 128 have no registers for 128 rows.

    Keys: 8 KiB of K, so that three steps' K and V fit beside the queries. A wider tile would have
    more scores in registers, and a block less per multiprocessor.

    Stages: a step's K and V are found by its entries of the block table, and Triton divides the
    stages between the two loads. With 5, K and V are copied a step ahead of their use; with 4 or
    fewer, the copy is waited for right where it was started.

    Registers: left to itself, the assembler spills a few for the sake of one more block.

    fp32 is not multiplied by matrix instructions but by FMA, from registers: fewer rows, and no
    stages, which would take room from the queries.
    """
    block_dim = triton.next_power_of_2(head_dim)
    fp32 = dtype == torch.float32
    block_rows = max(16, min(64, triton.next_power_of_2(rows)))
    if fp32 and block_dim > 128:
        block_rows = 16
    elif rows > 64 and block_dim <= 128 and not fp32 and padded(rows, 128) <= padded(rows, 64):
        block_rows = 128
    wide = block_rows >= 32 or block_dim > 128 if fp32 else block_rows * block_dim >= 64 * 128
    return Tile(
        rows=block_rows,
        keys=max(16, min(64, KEY_TILE_BYTES // (block_dim * dtype.itemsize))),
        num_warps=8 if wide else 4,
        num_stages=2 if fp32 else 5,
        max_registers=None if fp32 else MAX_REGISTERS,
    )


def padded(rows: int, block_rows: int) -> int:
    """Rows of all tiles together."""
    return int(triton.cdiv(rows, block_rows)) * block_rows


def choose_parts(programs: int, max_keys: int, device: torch.device) -> int:
    """Into how many parts to split the keys: enough programs for two per multiprocessor.

    The number is a power of two: each one is a kernel of its own to compile.
    """
    multiprocessors = (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 1
    )
    wanted = triton.cdiv(2 * multiprocessors, programs)
    most = max(1, max_keys // MIN_PART_KEYS)
    parts = int(max(1, min(wanted, most, 64)))
    return 1 << (parts.bit_length() - 1)
