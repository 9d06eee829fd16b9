# SPDX-License-Identifier: Apache-2.0
"""A logits processor of a user's, for Model Runner V2: no token equals the one two before it."""

import torch
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcessor


class NoEcho(LogitsProcessor):
    """Reads draft tokens as a chain, which is how vLLM gives them to processors."""

    def __init__(self, vllm_config, req_states) -> None:
        self.req_states = req_states

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        slot, depth = ctx.expanded_idx_mapping, ctx.expanded_local_pos
        total = self.req_states.total_len.gpu[slot]
        committed = self.req_states.all_token_ids.gpu[slot, (total - 2).clamp(min=0)]
        banned = torch.where(depth > 0, ctx.input_ids.roll(1), committed).long()
        return logits.scatter_(1, banned.unsqueeze(1), -torch.inf)
