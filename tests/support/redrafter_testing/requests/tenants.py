# SPDX-License-Identifier: Apache-2.0
"""Short requests of four tenants, of few tokens: two, and one of each tenant's own as a canary;
and what is drafted for whom."""

import random
from dataclasses import dataclass
from itertools import count
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from redrafter_testing.engines.forked_engine import Engine, reset_prefix_cache

ASKED, ANSWERED = range(4, 8), range(8, 12)
"""Canaries by tenant: in prompts alone, and in answers alone."""
_NUMBERS = count()


@dataclass(frozen=True)
class Tenants:
    """So many requests: of two salts, or two adapters; of none, and of one tenant that shares
    nothing. With `are_one`, all are of none, and share.
    """

    count: int
    are_one: bool = False
    adapters: tuple[Path, ...] = ()

    def run(self, llm: Any) -> None:
        """A worker knows a request by a name that begins with its tenant."""
        engine, rng = llm.llm_engine, random.Random(0)
        for _ in range(self.count):
            tenant = rng.randrange(4)
            prompt: Any = {"prompt_token_ids": rng.choices([2, 3, ASKED[tenant]], k=12)}
            adapter = None
            if tenant < len(self.adapters):
                folder, number = str(self.adapters[tenant]), tenant + 1
                adapter = LoRARequest(f"adapter {number}", number, folder)
            elif tenant < 2 and not self.are_one:
                prompt["cache_salt"] = f"salt {tenant}"
            params = SamplingParams(
                temperature=2.0,
                max_tokens=rng.randrange(1, 16),
                allowed_token_ids=[2, 3, ANSWERED[tenant]],
            )
            if tenant == 3 and not self.are_one:
                params.extra_args = {"redrafter": {"share": False}}
            name = f"{tenant} {next(_NUMBERS)}"
            engine.add_request(name, prompt, params, lora_request=adapter)
        while engine.has_unfinished_requests():
            engine.step()


def record_drafts(worker: Any) -> None:
    """For `Engine.rpc`: keep each draft's name and tokens in `worker.drafts`; with Model Runner V2,
    0 in the place of tokens that are on no path."""
    runner, worker.drafts = worker.model_runner, []
    on_host = hasattr(runner, "drafting")
    of, method = (runner.drafting, "draft") if on_host else (runner.speculator, "propose")
    original = getattr(of, method)

    def recorded(*arguments: Any, **options: Any) -> Any:
        draft = original(*arguments, **options)
        if on_host:
            names, tokens = of._requests, draft.tokens
        else:
            names, trees, slots = arguments[0].req_ids, of.trees, arguments[0].idx_mapping.long()
            node = torch.arange(trees.tokens.shape[1])
            is_on = (node < trees.num_nodes[:, None]) & (trees.match_classes > 0)
            tokens = (trees.tokens * is_on)[slots]
        worker.drafts += zip(names, tokens[:, 1:].tolist(), strict=True)
        return draft

    setattr(of, method, recorded)


def foreign_canaries(llm: Engine, tenants: Tenants) -> list[int]:
    """How many nodes were drafted with a token of another tenant's prompts, and of its answers."""
    llm.call(reset_prefix_cache)
    llm.rpc("reset_redrafter_stats")
    (before,) = llm.rpc(attrgetter("drafts"))
    llm.run(tenants)
    (drafts,) = llm.rpc(attrgetter("drafts"))
    drafted = [(int(name[0]), token) for name, row in drafts[len(before) :] for token in row]
    assert {tenant for tenant, _ in drafted} == {0, 1, 2, 3}
    (stats,) = llm.rpc("redrafter_stats")
    assert stats["accepted_earlier_tokens"] > 50, "hardly anything was shared"
    return [
        sum(token in canaries and token != canaries[tenant] for tenant, token in drafted)
        for canaries in (ASKED, ANSWERED)
    ]
