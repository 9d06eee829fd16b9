# SPDX-License-Identifier: Apache-2.0
"""Which rows each optimizer step reads: rows are packed into blocks, and blocks form steps."""

import bisect
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from vllm_redrafter.utils.errors import ConfigError

OPEN_BLOCKS = 64
"""Blocks that are kept open for further rows while rows are packed."""


def pack(lengths: Sequence[int], order: Sequence[int], capacity: int) -> list[list[int]]:
    """Put rows into blocks of at most `capacity` tokens, each row into the fullest that has room.

    Rows come in this order, and none is longer than the capacity. Returns each block's rows.
    """
    blocks: list[list[int]] = []
    room: list[tuple[int, int]] = []  # of open blocks: (tokens left, block), ascending
    for row in order:
        length = int(lengths[row])
        place = bisect.bisect_left(room, (length, -1))
        if place < len(room):
            left, block = room.pop(place)
        else:
            left, block = capacity, len(blocks)
            blocks.append([])
            if len(room) == OPEN_BLOCKS:
                room.pop(0)  # the fullest
        blocks[block].append(row)
        bisect.insort(room, (left - length, block))
    return blocks


class BatchPlan:
    """Which rows each optimizer step reads.

    Every process computes the same plan, and training can start at any step.
    It takes the lengths of all rows (ConfigError where there are none), tokens in a block, blocks
    in a step, and the seed of the rows' order, which differs from epoch to epoch.
    """

    def __init__(self, lengths: np.ndarray, block_length: int, batch_size: int, seed: int) -> None:
        if not len(lengths):
            raise ConfigError("training: there is no text to draw batches from")
        self.lengths, self.block_length = lengths.tolist(), block_length
        self.batch_size, self.seed = batch_size, seed

    def epoch(self, number: int) -> list[list[list[int]]]:
        """Per step, per block, its rows, in whole steps; with too few blocks, one short step."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        blocks = pack(self.lengths, order, self.block_length)
        order = torch.randperm(len(blocks), generator=generator).tolist()
        size = min(self.batch_size, len(blocks))
        steps = [order[i : i + size] for i in range(0, len(blocks) - size + 1, size)]
        return [[blocks[block] for block in step] for step in steps]

    def num_steps(self, epochs: int) -> int:
        return sum(len(self.epoch(number)) for number in range(epochs))

    def steps(self, first: int = 0) -> Iterator[list[list[int]]]:
        """Steps without end, epoch after epoch, from step `first` on."""
        number = 0
        while True:
            epoch = self.epoch(number)
            yield from epoch[first:]
            first, number = max(first - len(epoch), 0), number + 1
