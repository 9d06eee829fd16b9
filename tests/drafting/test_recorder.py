# SPDX-License-Identifier: Apache-2.0
"""What is recorded of drafts: candidates, where they came from, and what became of them."""

import numpy as np
import pytest
import torch

from vllm_redrafter.drafting.joining import DraftNodes
from vllm_redrafter.drafting.recorder import DraftRecorder
from vllm_redrafter.tree.acceptance import accept_path
from vllm_redrafter.tree.token_tree import TokenTree

ROOT = 9
with np.errstate(divide="ignore"):
    LOG_PROBS = np.log([[[0.5, 0.25, 0.0], [0.125, 0.1, 0.0]]], dtype=np.float32)
CANDIDATES = DraftNodes(
    tokens=np.array([[[1, 2, 5], [3, 4, 6]]]),
    back_pointers=np.array([[[0, 0, 0], [1, 0, 2]]]),
    log_probs=LOG_PROBS,
    match_classes=np.array([[[0, 0, 3], [0, 0, 3]]]),
)
"""Of the search 1 and 2, then 3 after 2 and 4 after 1; 5 and 6 are on a match of three tokens."""


def test_steps_have_the_nodes_of_their_drafts_what_became_of_them_and_their_output() -> None:
    tree = TokenTree(
        torch.tensor([[ROOT, 1, 2, 3]], dtype=torch.int32),
        torch.tensor([[0, 0, 0, 2]], dtype=torch.int32),
        torch.tensor([[0, 1, 1, 2]], dtype=torch.int32),
        torch.tensor([4], dtype=torch.int32),
    )
    recorder = DraftRecorder()
    recorder.stepped([ROOT])
    recorder.drafted(ROOT, CANDIDATES, 2.5)
    # The target samples 2, then 3, then 7.
    recorder.verified(tree, accept_path(tree, torch.tensor([[2, 8, 3, 7]])))
    nodes = recorder.steps[1].nodes
    assert [node.token for node in nodes] == [ROOT, 1, 2, 5, 3, 4, 6]
    assert [nodes[node.parent].token for node in nodes] == [ROOT, ROOT, ROOT, ROOT, 2, 1, 5]
    assert [node.depth for node in nodes] == [0, 1, 1, 1, 2, 2, 2]
    by_token = {node.token: node for node in nodes}
    probabilities = [by_token[token].probability for token in (2, 3, 4)]
    assert probabilities == pytest.approx([0.25, 0.5, 0.2])
    assert by_token[5].probability is None and by_token[5].match_length == 3
    assert {node.token for node in nodes if node.verified} == {ROOT, 1, 2, 3}
    assert {node.token for node in nodes if node.accepted} == {ROOT, 2, 3}
    # A draft belongs to one step alone.
    recorder.stepped([7])
    came = [(step.output_tokens, step.expected_tokens) for step in recorder.steps]
    assert came == [([ROOT], 1.0), ([2, 3, 7], 2.5), ([7], 1.0)]
    assert recorder.steps[-1].nodes == []
