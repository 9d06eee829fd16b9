# SPDX-License-Identifier: Apache-2.0
"""The tiles of rows and keys that tree attention works on.

The choices here follow from what the compiled kernels take of sm_80 to sm_120, and from
arithmetic; none of them has been timed.
"""

from dataclasses import dataclass, replace

import torch
import triton

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


def _half(rows: int, keys: int, num_warps: int) -> Tile:
    """A tile of bf16 or fp16, multiplied by matrix instructions.

    Stages: a step's K and V are found by its entries of the block table, and Triton divides the
    stages between the two loads. With 5, K and V are copied a step ahead of their use; with 4 or
    fewer, the copy is waited for right where it was started.

    Registers: left to itself, the assembler spills a few for the sake of one more block.
    """
    return Tile(rows, keys, num_warps, num_stages=5, max_registers=MAX_REGISTERS)


def _single(rows: int, keys: int, num_warps: int) -> Tile:
    """A tile of fp32, multiplied by FMA, from registers.

    It has fewer rows, and no stages, which would take room from the queries.
    """
    return Tile(rows, keys, num_warps, num_stages=2, max_registers=None)


TILES: dict[tuple[int, int], tuple[Tile, ...]] = {
    # (bytes of an element, head dim rounded up to a power of two): tiles by their rows
    (2, 64): (_half(16, 64, 4), _half(32, 64, 4), _half(64, 64, 4), _half(128, 64, 8)),
    (2, 128): (_half(16, 32, 4), _half(32, 32, 4), _half(64, 32, 8), _half(128, 32, 8)),
    (2, 256): (_half(16, 16, 4), _half(32, 16, 8), _half(64, 16, 8)),
    (2, 512): (_half(16, 16, 4), _half(32, 16, 8)),
    (4, 64): (_single(16, 32, 4), _single(32, 32, 8), _single(64, 32, 8)),
    (4, 128): (_single(16, 16, 4), _single(32, 16, 8), _single(64, 16, 8)),
    (4, 256): (_single(16, 16, 8),),
    (4, 512): (_single(16, 16, 8),),
}
"""The tiles to choose from: rows, keys, warps.

They are the same for all GPUs: they fit the 99 KiB of shared memory that a thread block has on
sm_86, sm_89 and sm_120, and spill no registers (fp32 on sm_100 and sm_120: 8 bytes at most).

Rows: from 16, a matrix instruction's, to 128. Head dims beyond 128 have no registers for 128 rows,
those beyond 256 none for 64, and fp32 none for 128; fp32 with head dims beyond 128 has them for 16
alone.

Keys: 8 KiB of K, so that three steps' K and V fit beside the queries; between 16 and 64. A wider
tile would have more scores in registers, and a block less per multiprocessor. With a head dim of
512, 16 keys are 16 KiB of K, and two steps' fit.

Warps: 8 where each thread of 4 would have 64 accumulators or more; in fp32, whose operands are in
registers too, earlier.
"""


FEWER_REGISTERS = {(90, 2, 128, 64): 128}
"""By compute capability, bytes of an element, head dim rounded up, and rows.

On sm_90 that is enough without spilling, and two blocks share a multiprocessor. Triton 3.6 would
take 130 registers, and with an fp8 cache any version takes more. On sm_80 and sm_89, 128 spill.
"""


def compute_capability(device: torch.device) -> int:
    """90 for sm_90; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def choose_tile(rows: int, head_dim: int, dtype: torch.dtype, capability: int = 0) -> Tile:
    """The tile for `rows` = nodes x query heads of one KV head, queries of `dtype`.

    The smallest one that holds them. Where there are more rows than any holds, the largest, unless
    64 rows pad less: 132 rows (33 nodes, 4 heads) are 3 tiles of 64 and not 2 of 128, which would
    multiply a third more. The price is that K and V are read once per tile, from the L2 cache
    after the first: the tiles of a KV head are neighbours in the launch.
    """
    kind = dtype.itemsize, triton.next_power_of_2(head_dim)
    tiles = TILES[kind]
    several = [tile for tile in tiles if tile.rows >= 64] or tiles[-1:]
    tile = next(
        (tile for tile in tiles if rows <= tile.rows),
        min(several, key=lambda tile: (padded(rows, tile.rows), -tile.rows)),
    )
    fewer = FEWER_REGISTERS.get((capability, *kind, tile.rows))
    return tile if fewer is None else replace(tile, max_registers=fewer)


def padded(rows: int, block_rows: int) -> int:
    """Rows of all tiles together."""
    return int(triton.cdiv(rows, block_rows)) * block_rows
