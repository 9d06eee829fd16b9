# SPDX-License-Identifier: Apache-2.0
"""Whether ReDrafter's output is plain decoding's, through real CUDA graphs.

    cd benchmarks && python -m first_gpu_parts.parity --output parity.json

A tiny target in float32 answers the same requests, greedily and sampled with seeds, by plain
decoding and with ReDrafter, in a fixed shape and adaptive. Prompts are read in chunks beside trees,
and not all requests fit into the KV cache to their end.

With --half, in float16, FlashAttention reads the prompts of plain decoding and of ReDrafter. Only
greedy answers are compared then, and near-ties, which rounding decides, are let pass.

vLLM watches meanwhile for kernels that are compiled and for waiting while requests are answered
(jit_monitor_mode and VLLM_GPU_SYNC_CHECK, both `error`). An engine that dies of it, or of anything
else, is started once more with both at `warn`: the log then names all places, and what the tokens
are is known as well.

The status is 0 if all engines passed both checks and all tokens are equal. Where they are not,
`gap` is how much more probable plain decoding held its own token than the other, in nats: next to
nothing in a near-tie, which rounding decides.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import zip_longest
from pathlib import Path
from typing import Any

from shared_parts import machine, results
from shared_parts.arguments import script_parser
from shared_parts.tiny_llama import HIDDEN, tiny_llama

VOCABULARY = 24
"""So few tokens that a random drafter is often right: drafts are accepted, and refused."""

SPREAD = 0.3
"""Of the target's weights: large, so that its greedy output does not loop."""

PLAIN = "plain"
DRAFTING: dict[str, dict[str, Any]] = {
    "fixed": {"num_speculative_tokens": 8, "adaptive": False},
    "adaptive": {"num_speculative_tokens": 8},
}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.8, "top_p": 0.95},
}
REQUESTS, TOKENS = 8, 40
TIGHT = {"max_num_batched_tokens": 120, "num_gpu_blocks_override": 12}
CHECKS = ("error", "warn")
NEAR_TIE = 0.05
"""Nats; float16 keeps the logits of this target, up to about 20, to 0.01."""

LEAST_ACCEPTED = 10
"""Fewer accepted tokens in a fixed shape: trees were hardly used, and little is shown."""


Answer = dict[str, Any]
"""One request's: `tokens`, and `logprobs` of the most probable tokens at each of them, by token;
empty where they were not asked for."""


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--half", action="store_true", help="float16, prompts by FlashAttention")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job is not None:
        job = json.loads(options.job.read_text())
        Path(job["answers"]).write_text(json.dumps(measure(job["arguments"], job["sampling"])))
        return 0
    import torch

    report = {**machine.describe(torch.cuda.get_device_name()), "engines": {}}
    names = [PLAIN, "fixed"] if options.half else [PLAIN, *DRAFTING]
    with tempfile.TemporaryDirectory() as name:
        for answered in answers_of_all(names, Path(name), options.half):
            report["engines"] = outcomes(names, answered)
            results.write(options.output, report)  # a later engine may run out of time
    for engine, found in report["engines"].items():
        print(f"{engine}: {found}", flush=True)
    return 0 if is_sound(report["engines"], NEAR_TIE if options.half else 0.0) else 1


def answers_of_all(
    names: Sequence[str], folder: Path, half: bool
) -> Iterator[dict[str, tuple[dict[str, Any] | None, str | None]]]:
    """What `answers_of` says of each engine, as far as they are done; again after each of them.

    All are started at once: most of an engine's time is one core's.
    """
    target, drafter = write_models(folder)
    answered = {}
    with ThreadPoolExecutor(len(names)) as pool:
        started = {}
        for engine in names:
            arguments = engine_arguments(engine, target, drafter, half)
            started[pool.submit(answers_of, engine, arguments, folder)] = engine
        for done in as_completed(started):
            answered[started[done]] = done.result()
            yield answered


def write_models(folder: Path) -> tuple[str, str]:
    """A target and a drafter of random weights."""
    import torch

    from vllm_redrafter import new_head, save_drafter

    target, drafter = folder / "target", folder / "drafter"
    tiny_llama(VOCABULARY, SPREAD).save_pretrained(target)
    torch.manual_seed(1)
    save_drafter(new_head("recurrent", VOCABULARY, HIDDEN), drafter)
    return str(target), str(drafter)


def outcomes(
    names: Sequence[str], answered: Mapping[str, tuple[dict[str, Any] | None, str | None]]
) -> dict[str, Any]:
    """The report, by engine, of those that are done; compared once plain decoding is."""
    found = answered.get(PLAIN, (None, None))[0]
    plain = {} if found is None else found["answers"]
    return {name: outcome(*answered[name], plain) for name in names if name in answered}


def engine_arguments(engine: str, target: str, drafter: str, half: bool = False) -> dict[str, Any]:
    """Of vllm.LLM."""
    arguments = {
        "model": target,
        "dtype": "float16" if half else "float32",
        "seed": 0,
        "skip_tokenizer_init": True,
        "disable_log_stats": False,  # its counters are read
        "max_num_seqs": REQUESTS,
        "max_model_len": 256,
        "block_size": 32,
        # Said, not profiled: other engines take memory and release it meanwhile.
        "kv_cache_memory_bytes": 2**30,
        "gpu_memory_utilization": 0.1,
    }
    if engine == PLAIN:
        # In float32 the one whose precision the environment below settles.
        return {**arguments, "attention_backend": "FLASH_ATTN" if half else "TRITON_ATTN"}
    return {**arguments, **TIGHT, "speculative_config": {"model": drafter, **DRAFTING[engine]}}


def answers_of(
    engine: str, arguments: dict[str, Any], folder: Path
) -> tuple[dict[str, Any] | None, str | None]:
    """What the engine's process found, and which checks it passed; None and None if it failed."""
    for checks in CHECKS:
        print(f"{engine}, checks at {checks}:", flush=True)
        job, answers = folder / f"{engine}-job.json", folder / f"{engine}-{checks}.json"
        given = {**arguments, "jit_monitor_mode": checks}
        # In float16 noise decides near-ties at every token.
        sampling = [*SAMPLING] if arguments["dtype"] == "float32" else ["greedy"]
        what = {"arguments": given, "answers": str(answers), "sampling": sampling}
        job.write_text(json.dumps(what))
        environment = {
            **os.environ,
            "VLLM_GPU_SYNC_CHECK": checks,
            # The same sampler in all engines: its noise depends on seed and position alone.
            "VLLM_USE_V2_MODEL_RUNNER": "1",
            # In float32 vLLM's attention would multiply in TF32, and ours does not.
            "TRITON_F32_DEFAULT": "ieee",
        }
        command = [sys.executable, "-m", "first_gpu_parts.parity", "--job", str(job)]
        done = subprocess.run(command, env=environment, cwd=Path(__file__).parents[1], check=False)
        if done.returncode == 0 and answers.exists():
            return json.loads(answers.read_text()), checks
    return None, None


def measure(arguments: dict[str, Any], samplings: list[str]) -> dict[str, Any]:
    """All requests' answers by one engine, in this process."""
    from vllm import LLM, SamplingParams

    llm = LLM(**arguments)
    prompts: list[Any] = [
        {"prompt_token_ids": [2 + (5 * i + t * t) % (VOCABULARY - 2) for t in range(5 + 9 * i)]}
        for i in range(REQUESTS)
    ]
    answers = {}
    for name in samplings:
        params = [
            SamplingParams(
                **SAMPLING[name],
                max_tokens=TOKENS - 3 * i,
                seed=i,
                ignore_eos=True,
                detokenize=False,
                logprobs=5 if name == "greedy" and "speculative_config" not in arguments else None,
            )
            for i in range(REQUESTS)
        ]
        outputs = [answer.outputs[0] for answer in llm.generate(prompts, params, use_tqdm=False)]
        answers[name] = [
            {
                "tokens": list(output.token_ids),
                "logprobs": [
                    {str(token): entry.logprob for token, entry in step.items()}
                    for step in output.logprobs or []
                ],
            }
            for output in outputs
        ]
    counted = {metric.name: metric for metric in llm.get_metrics()}
    accepted = counted.get("vllm:spec_decode_num_accepted_tokens")
    return {"answers": answers, "accepted": None if accepted is None else accepted.value}


def outcome(
    found: dict[str, Any] | None, checks: str | None, plain: dict[str, list[Answer]]
) -> dict[str, Any]:
    """An engine's part of the report; without plain decoding's answers nothing is compared."""
    if found is None:
        return {"checks": None, "accepted": None, "agreement": {}}
    agreement = {}
    for name, answers in found["answers"].items() if plain else ():
        apart = differences(plain[name], answers)
        equal = len(answers) - len(apart)
        agreement[name] = {"equal": equal, "of": len(answers), "differences": apart}
    return {"checks": checks, "accepted": found["accepted"], "agreement": agreement}


def differences(plain: list[Answer], answers: list[Answer]) -> list[dict[str, Any]]:
    """Where each answer that is not plain decoding's leaves it: request, position, and the gap."""
    found = []
    for request, (expected, answer) in enumerate(zip(plain, answers, strict=True)):
        tokens, others = expected["tokens"], answer["tokens"]
        if tokens != others:
            position = [a == b for a, b in zip_longest(tokens, others)].index(False)
            gap = _gap(expected, answer, position)
            found.append({"request": request, "position": position, "gap": gap})
    return found


def _gap(expected: Answer, answer: Answer, position: int) -> float | None:
    """By how much plain decoding preferred its token at this position to the answer's, if known."""
    if position >= min(len(expected["logprobs"]), len(answer["tokens"])):
        return None
    known = expected["logprobs"][position]
    own, other = str(expected["tokens"][position]), str(answer["tokens"][position])
    return known[own] - known[other] if own in known and other in known else None


def is_sound(engines: dict[str, Any], near_tie: float = 0.0) -> bool:
    """Whether all passed the checks, agree with plain decoding but for near-ties, and had drafts
    to agree on."""
    passed = all(engine["checks"] == CHECKS[0] for engine in engines.values())
    agree = all(
        apart["gap"] is not None and apart["gap"] < near_tie
        for engine in engines.values()
        for compared in engine["agreement"].values()
        for apart in compared["differences"]
    )
    return passed and agree and (engines["fixed"]["accepted"] or 0) > LEAST_ACCEPTED


if __name__ == "__main__":
    sys.exit(main())
