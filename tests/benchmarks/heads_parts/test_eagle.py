"""The anchor of benchmarks/heads.py: its search is what the layer says of each path's own text."""

from __future__ import annotations

import pytest
import torch
from heads_parts.eagle import EagleHead, EagleSearch, eagle_loss
from torch import Tensor

from redrafter_testing.algorithm.finished_beams import finished_beams
from vllm_redrafter.config import TOP_TOKENS
from vllm_redrafter.tree.policy import SearchShape

V, H, ROWS, LENGTH = TOP_TOKENS, 16, 3, 9


@pytest.fixture
def head() -> EagleHead:
    torch.manual_seed(0)
    return EagleHead(H, num_heads=2, inner_size=24).double().requires_grad_(False)


def said_of(
    head: EagleHead, embedded: Tensor, hidden: Tensor, path: Tensor, table: Tensor, weight: Tensor
) -> Tensor:
    """The log-probability of a path's tokens, the layer run anew on the whole text for each."""
    total = torch.zeros((), dtype=torch.float64)
    for token in path.tolist():
        features, _ = head(embedded.unsqueeze(0), hidden.unsqueeze(0))
        feature = features[0, -1]
        total = total + (weight @ feature).log_softmax(-1)[token]
        embedded = torch.cat([embedded, table[token : token + 1]])
        hidden = torch.cat([hidden, feature.unsqueeze(0)])
    return total


def test_a_node_is_as_probable_as_the_layer_says_of_its_path(head: EagleHead) -> None:
    table, weight = torch.randn(2, V, H, dtype=torch.float64)
    tokens = torch.randint(V, (ROWS, LENGTH))
    hidden = torch.randn(ROWS, LENGTH, H, dtype=torch.float64)
    search = EagleSearch(
        head,
        lambda x: x @ weight.T,
        lambda draft: draft,
        lambda t: table[t],
        tokens,
        hidden,
        SearchShape(4, 3),
    )
    row, root = torch.tensor([0, 2, 1]), torch.tensor([1, 5, 8])
    explored = search(row, root)
    paths, log_probs = finished_beams(explored)
    for request in range(3):
        at = int(root[request])
        text = table[tokens[row[request], 1 : at + 1]], hidden[row[request], :at]
        for beam in range(4):
            expected = said_of(head, *text, paths[request, beam], table, weight)
            found = log_probs[request, beam, -1].double()
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_perfect_layer_has_no_loss_beyond_the_targets_own_entropy() -> None:
    """And what was not generated does not count."""
    torch.manual_seed(0)
    hidden = torch.randn(2, LENGTH, H)
    weight, embedded = torch.randn(V, H), torch.randn(2, LENGTH, H)
    generated = torch.zeros(2, LENGTH, dtype=torch.bool)
    generated[:, 4:7] = True

    class Knowing(torch.nn.Module):
        def forward(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, None]:
            future = true[:, 1:-1].clone()
            future[:, ~wanted] = 100.0
            return future, None

    true, wanted = hidden, torch.zeros(LENGTH - 2, dtype=torch.bool)
    wanted[3:5] = True
    loss = eagle_loss(Knowing(), lambda x: x @ weight.T, embedded, hidden, generated)  # type: ignore[arg-type]
    taught = (hidden[:, 4:6] @ weight.T).log_softmax(-1)
    entropy = -(taught.exp() * taught).sum(-1).mean()
    torch.testing.assert_close(loss, 0.1 * entropy)
