# SPDX-License-Identifier: Apache-2.0
"""A drafter that ranks only some tokens drafts as one that is forbidden the others."""

import pytest
import torch
from torch import Tensor, nn

from vllm_redrafter.heads.recurrent import RecurrentConfig, RecurrentHead
from vllm_redrafter.tree.beam_search import beam_search
from vllm_redrafter.tree.token_tree import TokenTree
from vllm_redrafter.utils.errors import ConfigError

V, H = 40, 8
KEPT = torch.tensor([3, 4, 9, 17, 18, 30, 39])


def reduced() -> RecurrentHead:
    torch.manual_seed(0)
    drafter = RecurrentHead(RecurrentConfig(V, H, exit_dim=6, draft_vocab_size=len(KEPT)))
    drafter.keep_tokens(KEPT)
    return drafter.eval().requires_grad_(False)


class Forbidding(nn.Linear):
    """The last layer of the whole vocabulary, with -inf for all tokens but the kept."""

    def forward(self, x: Tensor) -> Tensor:
        allowed = torch.zeros(V, dtype=torch.bool).index_fill_(0, KEPT, True)
        return super().forward(x).masked_fill(~allowed, -torch.inf)


def forbidden() -> RecurrentHead:
    """The same drafter with the whole vocabulary."""
    small = reduced()
    whole = RecurrentHead(RecurrentConfig(V, H, exit_dim=6)).eval().requires_grad_(False)
    last = Forbidding(6, V, bias=False).requires_grad_(False)
    last.weight.index_copy_(0, KEPT, small.vocabulary_layers[0].weight)
    tensors = {n: t for n, t in small.state_dict().items() if n not in ("d2t", "lm_head.1.weight")}
    whole.load_state_dict(tensors, strict=False)
    whole.lm_head[-1] = last
    return whole


def test_the_search_is_that_of_a_drafter_that_is_forbidden_the_other_tokens() -> None:
    torch.manual_seed(1)
    embed = nn.Embedding(V, H).requires_grad_(False)
    hidden, roots = torch.randn(5, H), torch.randint(V, (5,))
    found = beam_search(reduced(), embed, hidden, roots, beam_width=4, beam_length=3)
    expected = beam_search(forbidden(), embed, hidden, roots, beam_width=4, beam_length=3)
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.isin(found.tokens, KEPT).all()
    torch.testing.assert_close(found.log_probs, expected.log_probs)
    trees = [TokenTree.from_explored(roots, explored, 6) for explored in (found, expected)]
    assert torch.equal(trees[0].tokens, trees[1].tokens)


def test_a_draft_vocabulary_larger_than_the_targets_is_refused() -> None:
    with pytest.raises(ConfigError, match="draft_vocab_size 41 exceeds vocab_size 40"):
        RecurrentConfig(V, H, exit_dim=6, draft_vocab_size=41)
    with pytest.raises(ConfigError, match="draft_vocab_size must be an integer of at least 1"):
        RecurrentConfig(V, H, exit_dim=6, draft_vocab_size=0)
