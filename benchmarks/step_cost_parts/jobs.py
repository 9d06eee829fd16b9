"""What each engine has to do, and the folders of models that it does it with."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "llama-7b": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
    "llama-3-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_theta": 500000.0,
    },
    "llama-3.2-1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
}
WARM_UP_STEPS = 10


@dataclass(frozen=True)
class Job:
    """One engine's: a target, K (0 for plain decoding), and the batches and contexts to time."""

    target: str
    folder: str
    drafter: str
    nodes: int
    beam_width: int
    beam_length: int
    cases: list[tuple[int, int]]
    steps: int


def jobs(options: argparse.Namespace, folder: Path) -> list[Job]:
    """Plain decoding and every K, for each target, whose folders are written."""
    width, length = options.beams
    made = []
    for target in options.targets:
        drafter = write_drafter(target, folder, options.draft_vocab_size)
        paths = write_target(target, folder), drafter
        cases = list(product(options.batches, options.contexts))
        rest = (width, length, cases, options.steps)
        for nodes in (0, *options.nodes):
            made.append(Job(target, *map(str, paths), nodes, *rest))
    return made


def write_target(target: str, folder: Path) -> Path:
    """A config.json: vLLM makes the weights up."""
    from transformers import LlamaConfig

    path = folder / target
    config = LlamaConfig(**SHAPES[target], max_position_embeddings=131072, dtype="bfloat16")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(path)
    return path


def write_drafter(target: str, folder: Path, draft_vocab_size: int | None) -> Path:
    import torch

    from vllm_redrafter import new_head, save_drafter

    path = folder / f"{target}-drafter"
    sizes = SHAPES[target]["vocab_size"], SHAPES[target]["hidden_size"]
    drafter = new_head("recurrent", *sizes, draft_vocab_size=draft_vocab_size)
    save_drafter(drafter.to(torch.bfloat16), path)
    return path


def engine_arguments(job: Job) -> dict[str, Any]:
    most = max(context for _, context in job.cases)
    batches = {requests for requests, _ in job.cases}
    # Each step adds one token at least, and needs room for a tree.
    room = WARM_UP_STEPS + job.steps + 3 * (job.nodes + 1)
    arguments: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "enable_prefix_caching": False,
        "max_model_len": most + room,
        "max_num_seqs": max(batches),
        # Graphs for what is timed alone: decoding steps, by tokens, and drafts, by requests.
        "compilation_config": {
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sorted(batches | {b * (job.nodes + 1) for b in batches}),
        },
    }
    if job.nodes:
        arguments["speculative_config"] = {
            "model": job.drafter,
            "num_speculative_tokens": job.nodes,
            "beam_width": job.beam_width,
            "beam_length": job.beam_length,
            # The budget would soon stop drafting: random drafts bring nothing.
            "adaptive": False,
            # K at every batch: the default schedule would lower it.
            "num_speculative_tokens_per_batch_size": [[1, 1, job.nodes]],
        }
    return arguments
