# SPDX-License-Identifier: Apache-2.0
"""The batch of a step with drafts, against the same in torch, a tensor at a time."""

import pytest
import torch

from redrafter_testing.algorithm.tree_batches import bushy, first_nodes, token_trees
from vllm_redrafter.engine.cpu.verification import VerificationStep, verification_step
from vllm_redrafter.tree.token_tree import TokenTree

SLOTS = 9


def arranged(
    drafted: TokenTree, num_drafted: list[int], prompts: list[int], input_ids: torch.Tensor
) -> tuple[VerificationStep, torch.Tensor]:
    """With so many rows of a prompt before each request's root; and the positions afterwards."""
    counts = torch.tensor(num_drafted) + 1 + torch.tensor(prompts)
    ends = counts.cumsum(0).to(torch.int32).numpy()
    positions = 100 + torch.arange(len(input_ids))
    links = list(torch.stack([drafted.parents, drafted.depths], dim=1).numpy())
    step = verification_step(
        links, num_drafted, ends, input_ids.numpy(), positions.numpy(), int(ends[-1])
    )
    return step, positions


@pytest.mark.parametrize("seed", range(20))
def test_each_request_has_the_scheduled_prefix_of_its_tree(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    requests = 1 + seed % 6
    drafted = token_trees([bushy(SLOTS, seed + r) for r in range(requests)], SLOTS)
    num_drafted = torch.randint(0, SLOTS, (requests,), generator=random).tolist()
    num_drafted[seed % requests] = 3
    prompts = torch.randint(0, 4, (requests,), generator=random).tolist()
    prompts = [p if not n else 0 for p, n in zip(prompts, num_drafted, strict=True)]
    total = sum(num_drafted) + requests + sum(prompts)
    input_ids = torch.randint(0, 50, (total + 5,), generator=random, dtype=torch.int32)
    step, positions = arranged(drafted, num_drafted, prompts, input_ids)

    ends = (torch.tensor(num_drafted) + 1 + torch.tensor(prompts)).cumsum(0)
    num_nodes = torch.tensor(num_drafted, dtype=torch.int32) + 1
    assert torch.equal(step.root_rows, ends - num_nodes)
    slots = max(num_drafted) + 1
    rows = step.root_rows.unsqueeze(1) + torch.arange(slots)
    tokens = input_ids[rows.clamp(max=total)]
    cut = TokenTree(tokens, drafted.parents[:, :slots], drafted.depths[:, :slots], num_nodes)
    expected = first_nodes(cut, num_nodes)
    for part in ("tokens", "parents", "depths", "num_nodes"):
        assert torch.equal(getattr(step.tree, part), getattr(expected, part)), part

    is_node = expected.is_node
    assert torch.equal(step.node_rows[is_node], rows[is_node])
    assert (step.node_rows == step.root_rows.unsqueeze(1))[~is_node].all()
    assert torch.equal(step.first_logits, num_nodes.cumsum(0) - num_nodes)
    assert step.drafted.tolist() == num_drafted
    assert step.only_nodes == (not any(prompts))

    linear = 100 + torch.arange(len(input_ids))
    wanted = linear.clone()
    wanted[rows[is_node]] = (linear[step.root_rows].unsqueeze(1) + expected.depths)[is_node]
    assert torch.equal(positions, wanted)

    # With M-RoPE each dimension has positions of its own.
    several = torch.stack([linear, 3 * linear, 5 * linear])
    wanted = several.clone()
    nodes = several[:, step.root_rows].unsqueeze(2) + expected.depths
    wanted[:, rows[is_node]] = nodes[:, is_node]
    step.place(several)
    assert torch.equal(several, wanted)


def test_a_chain_does_not_branch_and_padding_was_not_drafted() -> None:
    chain = [max(node - 1, 0) for node in range(SLOTS)]
    drafted = token_trees([chain, [0, 0, 0, 1, 1, 2, 4, 5, 6], chain], SLOTS)
    # The second tree's first two nodes are a chain, its third is not.
    input_ids = torch.tensor([5, 6, 7, 5, 6, 7, 5, -1, -1], dtype=torch.int32)
    step, _ = arranged(drafted, [2, 2, 2], [0, 0, 0], input_ids)
    assert step.branching.tolist() == [1]
    assert step.drafted.tolist() == [2, 2, 0]
    assert step.tree.tokens.tolist() == [[5, 6, 7], [5, 6, 7], [5, -1, -1]]
    step, _ = arranged(drafted, [2, 1, 2], [0, 0, 0], input_ids)
    assert step.branching.tolist() == []
