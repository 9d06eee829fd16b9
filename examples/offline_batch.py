# SPDX-License-Identifier: Apache-2.0
"""Answer a batch of prompts with vLLM and a drafter, without a server.

    python examples/offline_batch.py TARGET DRAFTER

TARGET is a model and DRAFTER the ReDrafter checkpoint that was trained for it, both as folders or
hub ids. Prints each prompt with its answer, then how many tokens each pass of the target gave on
average: 1 is plain decoding.
"""

from __future__ import annotations

import argparse

from vllm import LLM, SamplingParams

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time, there was a",
    "A recipe for pancakes:",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("drafter")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()

    llm = LLM(
        args.target,
        # The most tree nodes that are verified per request and step.
        speculative_config={"model": args.drafter, "num_speculative_tokens": 12},
        disable_log_stats=False,  # or there would be no metrics to read below
    )
    for answer in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=args.max_tokens)):
        print(f"{answer.prompt!r} -> {answer.outputs[0].text!r}")

    metrics = {metric.name: metric for metric in llm.get_metrics()}
    steps = metrics["vllm:spec_decode_num_drafts"].value
    accepted = metrics["vllm:spec_decode_num_accepted_tokens"].value
    # In each step the accepted tokens are followed by one that the target samples.
    print(f"{1 + accepted / steps:.2f} tokens per step of the target")


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
