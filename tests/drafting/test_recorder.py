# SPDX-License-Identifier: Apache-2.0
"""What is recorded of drafts: candidates, where they came from, and what became of them."""

import numpy as np
import pytest
import torch

from vllm_redrafter.drafting.joining import DraftNodes
from vllm_redrafter.drafting.recorder import DraftRecorder
from vllm_redrafter.tree.acceptance import AcceptedPath, accept_path
from vllm_redrafter.tree.token_tree import TokenTree

ROOT = 9
with np.errstate(divide="ignore"):
    LOG_PROBS = np.log([[[0.5, 0.25, 0.0], [0.125, 0.1, 0.0]]], dtype=np.float32)
CANDIDATES = DraftNodes(
    tokens=np.array([[[1, 2, 5], [3, 4, 6]]]),
    back_pointers=np.array([[[0, 0, 0], [1, 0, 2]]]),
    log_probs=LOG_PROBS,
    match_lengths=np.array([[[0, 0, 3], [0, 0, 3]]]),
)
"""Of the search 1 and 2, then 3 after 2 and 4 after 1; 5 and 6 are on a match of three tokens."""


def verified_tree() -> TokenTree:
    """Of the candidates, 1, 2, and 3 below 2."""
    return TokenTree(
        torch.tensor([[ROOT, 1, 2, 3]], dtype=torch.int32),
        torch.tensor([[0, 0, 0, 2]], dtype=torch.int32),
        torch.tensor([[0, 1, 1, 2]], dtype=torch.int32),
        torch.tensor([4], dtype=torch.int32),
    )


def accepted() -> AcceptedPath:
    """The target samples 2, then 3, then 7."""
    return accept_path(verified_tree(), torch.tensor([[2, 8, 3, 7]]))


def recorded() -> DraftRecorder:
    recorder = DraftRecorder()
    recorder.stepped([ROOT])
    recorder.drafted(ROOT, CANDIDATES)
    recorder.verified(verified_tree(), accepted())
    return recorder


def test_a_step_has_all_nodes_of_its_draft_and_what_became_of_them() -> None:
    nodes = recorded().steps[1].nodes
    assert [node.token for node in nodes] == [ROOT, 1, 2, 5, 3, 4, 6]
    assert [nodes[node.parent].token for node in nodes] == [ROOT, ROOT, ROOT, ROOT, 2, 1, 5]
    assert [node.depth for node in nodes] == [0, 1, 1, 1, 2, 2, 2]
    by_token = {node.token: node for node in nodes}
    assert by_token[2].probability == pytest.approx(0.25)
    assert by_token[3].probability == pytest.approx(0.5)
    assert by_token[4].probability == pytest.approx(0.2)
    assert by_token[5].probability is None and by_token[5].match_length == 3
    assert {node.token for node in nodes if node.verified} == {ROOT, 1, 2, 3}
    assert {node.token for node in nodes if node.accepted} == {ROOT, 2, 3}


def test_steps_have_their_output_and_a_draft_belongs_to_one_alone() -> None:
    recorder = recorded()
    recorder.stepped([7])
    assert [step.output_tokens for step in recorder.steps] == [[ROOT], [2, 3, 7], [7]]
    assert recorder.steps[-1].nodes == []
