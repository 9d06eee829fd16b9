# SPDX-License-Identifier: Apache-2.0
"""A drafter that ranks only some tokens drafts as one that is forbidden the others."""

import torch
from torch import Tensor, nn

from vllm_redrafter.heads.recurrent import RecurrentConfig, RecurrentHead
from vllm_redrafter.tree.beam_search import beam_search

V, H = 40, 8
KEPT = torch.tensor([3, 4, 9, 17, 18, 30, 39])


class Forbidding(nn.Linear):
    """The last layer of the whole vocabulary, with -inf for all tokens but the kept."""

    def forward(self, x: Tensor) -> Tensor:
        allowed = torch.zeros(V, dtype=torch.bool).index_fill_(0, KEPT, True)
        return super().forward(x).masked_fill(~allowed, -torch.inf)


@torch.no_grad()
def test_the_search_is_that_of_a_drafter_that_is_forbidden_the_other_tokens() -> None:
    torch.manual_seed(0)
    reduced = RecurrentHead(RecurrentConfig(V, H, exit_dim=6, draft_vocab_size=len(KEPT))).eval()
    reduced.keep_tokens(KEPT)
    weights = reduced.state_dict()
    kept_rows = weights.pop("lm_head.1.weight")
    del weights["d2t"]
    whole = RecurrentHead(RecurrentConfig(V, H, exit_dim=6)).eval()
    whole.load_state_dict(weights, strict=False)
    whole.lm_head[-1] = Forbidding(6, V, bias=False)
    whole.lm_head[-1].weight[KEPT] = kept_rows

    embed, hidden, roots = nn.Embedding(V, H), torch.randn(5, H), torch.randint(V, (5,))
    found, expected = (
        beam_search(drafter, embed, hidden, roots, beam_width=4, beam_length=3)
        for drafter in (reduced, whole)
    )
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.isin(found.tokens, KEPT).all()
    torch.testing.assert_close(found.log_probs, expected.log_probs)
