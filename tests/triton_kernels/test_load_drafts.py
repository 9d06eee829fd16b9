# SPDX-License-Identifier: Apache-2.0
"""What a draft starts from is each request's own, wherever it stands."""

import pytest
import torch

from vllm_redrafter.triton_kernels import load_drafts as kernel
from vllm_redrafter.triton_kernels.load_drafts import DraftInputs, StepEnd, load_drafts

SLOTS, ROOM, SIZE = 7, 5, 6
SENTINEL = -77


@pytest.mark.parametrize("verified", [0, 3])
@pytest.mark.parametrize("states", [1, 2])
def test_each_request_starts_from_its_last_accepted_row_or_its_last(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, verified: int, states: int
) -> None:
    """A padded batch of 2, 4 and 3 rows; hidden states that are wider than a program copies.

    The walk ended in rows 1, 2 and 6.
    """
    monkeypatch.setattr(kernel, "COLUMNS", 4)
    end = StepEnd(
        idx_mapping=torch.tensor([4, 0, 6], device=device),
        walked_rows=torch.tensor([1, 2, 6, SENTINEL], device=device),
        query_start_loc=torch.tensor([0, 2, 6, 9], device=device).int(),
        num_nodes=torch.tensor([2, 4, 1], device=device).int(),
        last_sampled=torch.arange(SLOTS, device=device) + 100,
        temperature=torch.arange(SLOTS, device=device) / 10,
    )
    dtypes = torch.bfloat16, torch.int64, torch.int64, torch.int32, torch.float32
    shapes = zip(((ROOM, states * SIZE), *[(ROOM,)] * 4), dtypes, strict=True)
    fields = (torch.full(s, SENTINEL, dtype=dtype, device=device) for s, dtype in shapes)
    out = DraftInputs(*fields)
    read = torch.randn(states, 9, SIZE).bfloat16().to(device)
    load_drafts(end, list(read), out, verified, padded=4)
    rows = [1, 2, 6] if verified else [1, 5, 8]
    assert torch.equal(out.hidden[:3], read[:, rows].transpose(0, 1).flatten(1))
    assert (out.hidden[3:] == SENTINEL).all()
    assert out.roots.tolist() == [104, 100, 106, SENTINEL, SENTINEL]
    assert out.slots.tolist() == [4, 0, 6, ROOM, SENTINEL]
    assert torch.equal(out.temperatures[:3], end.temperature[[4, 0, 6]])
    assert out.num_verified.tolist() == [*([2, 4, 1] if verified else [0] * 3), 0, SENTINEL]
