"""Trees from finished beams, on the device: the paper's prefix dedup.

ReDrafter (arXiv 2403.09919) section 3.3. It is the selection of build_tree.py, after each beam's
node has been handed to the first beam that shares its prefix: that beam keeps the node, the
others' scores become -inf.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_redrafter.triton_kernels.build_tree import (
    TreeBuffers,
    build_tree,
    check_requests,
    check_tokens,
)
from vllm_redrafter.triton_kernels.checks import require, require_same_device


@triton.jit
def _share_prefixes(
    beams,  # [R, WIDTH, LENGTH] int32 or int64
    log_probs,  # [R, WIDTH, LENGTH] fp32; read where HAS_LOG_PROBS
    level_tokens,  # [R, LENGTH, WIDTH] like beams, written
    back_pointers,  # [R, LENGTH, WIDTH] int32, written
    scores,  # [R, LENGTH, WIDTH] fp32, written
    WIDTH: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_LOG_PROBS: tl.constexpr,
):
    """One request: per level, the first beam with the same prefix owns the node."""
    request = tl.program_id(0)
    beam = tl.arange(0, BLOCK)
    is_beam = beam < WIDTH
    same = is_beam[:, None] & is_beam[None, :]
    owner_above = tl.zeros([BLOCK], dtype=tl.int32)
    for level in range(LENGTH):
        at = request * WIDTH * LENGTH + beam * LENGTH + level
        token = tl.load(beams + at, mask=is_beam, other=-1)
        same = same & (token[:, None] == token[None, :])
        owner = tl.min(tl.where(same, beam[None, :], BLOCK), axis=1)
        if HAS_LOG_PROBS:
            score = tl.load(log_probs + at, mask=is_beam, other=float("-inf"))
        else:
            score = -(level * WIDTH + beam).to(tl.float32)
        score = tl.where(owner == beam, score, float("-inf"))
        to = (request * LENGTH + level) * WIDTH + beam
        tl.store(level_tokens + to, token, mask=is_beam)
        tl.store(back_pointers + to, owner_above, mask=is_beam)
        tl.store(scores + to, score, mask=is_beam)
        owner_above = owner


def build_tree_from_beams(
    root_tokens: Tensor, beams: Tensor, out: TreeBuffers, log_probs: Tensor | None = None
) -> TreeBuffers:
    """Trees in which any two finished beams share the nodes of their common prefix.

    Args:
        root_tokens: [R] int32 or int64.
        beams: [R, W, L] int32 or int64 tokens, contiguous, the root not among them.
        out: see `build_tree`.
        log_probs: [R, W, L] fp32 cumulative, or None for breadth-first order.

    Returns:
        out.

    Raises:
        ValueError: see `build_tree`.
    """
    _check_beams(root_tokens, beams, out, log_probs)
    requests, width, length = beams.shape
    level_tokens = beams.new_empty(requests, length, width)
    back_pointers = beams.new_empty(requests, length, width, dtype=torch.int32)
    scores = beams.new_empty(requests, length, width, dtype=torch.float32)
    _share_prefixes[(requests,)](
        beams,
        log_probs if log_probs is not None else scores,
        level_tokens,
        back_pointers,
        scores,
        WIDTH=width,
        LENGTH=length,
        BLOCK=triton.next_power_of_2(width),
        HAS_LOG_PROBS=log_probs is not None,
        num_warps=4,
    )
    return build_tree(root_tokens, level_tokens, back_pointers, scores, out)


def _check_beams(
    root_tokens: Tensor, beams: Tensor, out: TreeBuffers, log_probs: Tensor | None
) -> None:
    check_tokens(root_tokens=root_tokens, beams=beams)
    require(beams.dim() == 3, f"beams: expected [R, W, L], got {list(beams.shape)}")
    require(beams.is_contiguous(), "beams: must be contiguous")
    check_requests("beams", root_tokens, beams, out)
    if log_probs is not None:
        require(
            log_probs.shape == beams.shape and log_probs.is_contiguous(),
            f"log_probs: must be contiguous and of beams' shape, got {list(log_probs.shape)}",
        )
        require(
            log_probs.dtype == torch.float32, f"log_probs: expected fp32, got {log_probs.dtype}"
        )
        require_same_device(beams, log_probs=log_probs)


def naive_share_prefixes(beams: Tensor, log_probs: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Finished beams [R, W, L] as candidates (tokens, back-pointers, log-probs), [R, L, W] each."""
    requests, width, length = beams.shape
    back_pointers = torch.zeros(requests, length, width, dtype=torch.int64)
    scores = torch.full((requests, length, width), -torch.inf)
    for request in range(requests):
        owners: dict[tuple[int, ...], int] = {(): 0}
        rows = beams[request].tolist()
        for level in range(length):
            for beam, row in enumerate(rows):
                back_pointers[request, level, beam] = owners[tuple(row[:level])]
                if tuple(row[: level + 1]) not in owners:
                    owners[tuple(row[: level + 1])] = beam
                    scores[request, level, beam] = (
                        -(level * width + beam)
                        if log_probs is None
                        else log_probs[request, beam, level]
                    )
    return beams.transpose(1, 2).contiguous(), back_pointers, scores
