# SPDX-License-Identifier: Apache-2.0
"""A server of completions without a model: fake_server.py [FLAW] serve TARGET [vLLM's arguments].

What it answers depends on the request and nothing else. FLAW is something that is wrong with the
one that drafts, which is the one with a speculative config:

- `--other-answers`: one token of each long answer is another;
- `--keeps-blocks`: blocks of the KV cache stay in use;
- `--keeps-memory`: 2 MiB stay in use for each request.
"""

import argparse
import asyncio
import json
import os
import random
import signal
from typing import Any

from aiohttp import web

SECONDS_OF_A_STEP = 0.002
WARM_UP = 140
"""Requests after which a flaw may show: a little more than the soak begins with."""


class FakeServer:
    def __init__(self, flaw: str | None) -> None:
        self.flaw = flaw
        self.asked = 0
        self.kept: list[bytes] = []

    def tokens(self, body: dict[str, Any], index: int) -> list[int]:
        asked = (body["prompt"], body.get("seed"), body.get("structured_outputs"), index)
        source = random.Random(repr(asked))
        found = [source.randrange(2, 500) for _ in range(body["max_tokens"])]
        if self.flaw == "--other-answers" and len(found) > 20:
            found[10] += 1
        return found

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked += 1
        if self.flaw == "--keeps-memory":
            self.kept.append(b"x" * (2 << 20))
        answers = [self.tokens(body, index) for index in range(body.get("n", 1))]
        if not body["stream"]:
            await asyncio.sleep(SECONDS_OF_A_STEP * len(answers[0]))
            parts = [part(i, tokens, "length") for i, tokens in enumerate(answers)]
            return web.json_response({"choices": parts})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for at in range(0, body["max_tokens"], 3):
            for index, tokens in enumerate(answers):
                finish = "length" if at + 3 >= len(tokens) else None
                chunk = {"choices": [part(index, tokens[at : at + 3], finish)]}
                await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
            await asyncio.sleep(3 * SECONDS_OF_A_STEP)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def metrics(self, request: web.Request) -> web.Response:
        used = 0.25 if self.flaw == "--keeps-blocks" and self.asked > WARM_UP + 10 else 0.0
        return web.Response(
            text="# HELP\n"
            f'vllm:num_preemptions_total{{engine="0"}} {self.asked // 10}\n'
            f'vllm:kv_cache_usage_perc{{engine="0"}} {used}\n'
            f'vllm:generation_tokens_total{{engine="0"}} {self.asked}\n'
        )


def part(index: int, tokens: list[int], finish: str | None) -> dict[str, Any]:
    return {
        "index": index,
        "token_ids": tokens,
        "text": " ".join(map(str, tokens)),
        "finish_reason": finish,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--speculative-config")
    for flaw in ("--other-answers", "--keeps-blocks", "--keeps-memory"):
        parser.add_argument(flaw, dest="flaw", action="store_const", const=flaw)
    args, _ = parser.parse_known_args()
    fake = FakeServer(args.flaw if args.speculative_config else None)
    app = web.Application(client_max_size=1 << 24)
    app.router.add_get("/health", lambda request: health())
    app.router.add_get("/metrics", fake.metrics)
    app.router.add_post("/v1/completions", fake.complete)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    web.run_app(app, host="127.0.0.1", port=args.port, print=None, handle_signals=False)


async def health() -> web.Response:
    return web.Response()


if __name__ == "__main__":
    main()
