# SPDX-License-Identifier: Apache-2.0
"""The batch's most probable nodes are admitted, as many as there is budget for."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_redrafter.triton_kernels.admit_nodes import admit_nodes

SLOTS, K, MOST = 7, 5, 6
SENTINEL = -77


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_the_nodes_of_the_highest_survival_are_admitted(
    device: torch.device, data: st.DataObject
) -> None:
    """Confidences are quarters, whose products are exact and often equal."""
    request = st.tuples(st.integers(0, K), st.integers(1, 9))
    requests = data.draw(st.lists(request, min_size=1, max_size=MOST))
    budget = data.draw(st.integers(0, sum(most for most, _ in requests)))
    generator = torch.Generator().manual_seed(budget)
    confidences = torch.randint(5, (SLOTS, K + 1), generator=generator) / 4
    slots, others = torch.arange(len(requests)).flip(0), torch.tensor([n for _, n in requests])
    scheduled = torch.tensor(requests, dtype=torch.int32).T.contiguous()
    num_tokens = int(others.sum()) + budget
    starts = torch.full((2, MOST + 1), SENTINEL, dtype=torch.int32, device=device)
    given = (part.to(device) for part in (confidences, slots, scheduled))
    admit_nodes(*given, budget, num_tokens, starts[0], starts[1])

    survival = confidences[slots, 1:].cumprod(dim=1)
    nodes = [(-survival[r, j], r, j) for r, (most, _) in enumerate(requests) for j in range(most)]
    kept = [r for _, r, _ in sorted(nodes)[:budget]]
    admitted = torch.tensor([kept.count(r) for r in range(len(requests))])
    for found, tokens, behind in (
        (starts[0], admitted + 1, SENTINEL),
        (starts[1], admitted + others, num_tokens),
    ):
        assert found.tolist() == [0, *tokens.cumsum(0).tolist()] + [behind] * (MOST - len(requests))
