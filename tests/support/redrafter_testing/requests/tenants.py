# SPDX-License-Identifier: Apache-2.0
"""Short requests of four tenants, of few tokens: two, and one of each tenant's own as a canary."""

import random
from dataclasses import dataclass
from itertools import count
from typing import Any

from vllm import SamplingParams

ASKED, ANSWERED = range(4, 8), range(8, 12)
"""Canaries by tenant: in prompts alone, and in answers alone."""
_NUMBERS = count()


@dataclass(frozen=True)
class Tenants:
    """So many requests: of two salts, of none, and of one tenant that shares nothing.

    With `are_one`, all are of no salt, and share.
    """

    count: int
    are_one: bool = False

    def run(self, llm: Any) -> None:
        """A worker knows a request by a name that begins with its tenant."""
        engine, rng = llm.llm_engine, random.Random(0)
        for _ in range(self.count):
            tenant = rng.randrange(4)
            prompt: Any = {"prompt_token_ids": rng.choices([2, 3, ASKED[tenant]], k=12)}
            if tenant < 2 and not self.are_one:
                prompt["cache_salt"] = f"salt {tenant}"
            params = SamplingParams(
                temperature=2.0,
                max_tokens=rng.randrange(1, 16),
                allowed_token_ids=[2, 3, ANSWERED[tenant]],
            )
            if tenant == 3 and not self.are_one:
                params.extra_args = {"redrafter": {"share": False}}
            engine.add_request(f"{tenant} {next(_NUMBERS)}", prompt, params)
        while engine.has_unfinished_requests():
            engine.step()


def record_drafts(worker: Any) -> None:
    """For `Engine.rpc`: keep each draft's name and tokens in `worker.drafts`."""
    drafting = worker.model_runner.drafting
    draft, worker.drafts = drafting.draft, []

    def recorded(*arguments: Any) -> Any:
        tree = draft(*arguments)
        tokens = (row[1:] for row in tree.tokens.tolist())
        worker.drafts += zip(drafting._requests, tokens, strict=True)
        return tree

    drafting.draft = recorded
