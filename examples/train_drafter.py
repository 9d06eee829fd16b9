# SPDX-License-Identifier: Apache-2.0
"""Train a drafter for a target from a list of prompts.

    python examples/train_drafter.py TARGET prompts.txt OUTPUT

TARGET is a model, as a folder or hub id; each line of prompts.txt is a prompt. The target answers
them (OUTPUT/data), and the drafter learns from the answers (OUTPUT/drafter). Prints progress, and
how many tokens a step of the target gives on conversations that were held out from training.

The commands generate-data, train and evaluate of `vllm-redrafter` do the same.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from vllm_redrafter import ReDrafterConfig
from vllm_redrafter.data.conversation_rows import Conversation
from vllm_redrafter.data.generation import generate_data
from vllm_redrafter.data.settings import GenerationSettings, SamplingSettings
from vllm_redrafter.evaluation.config import EvaluationConfig
from vllm_redrafter.evaluation.evaluate import EvaluationJob, evaluate
from vllm_redrafter.evaluation.report import print_evaluation
from vllm_redrafter.offline.generation import OfflineEngine
from vllm_redrafter.training.plan import TrainingJob
from vllm_redrafter.training.run import train
from vllm_redrafter.training.training_config import TrainingConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    console, data, drafter = Console(), args.output / "data", args.output / "drafter"

    prompts = [Conversation((line,)) for line in args.prompts.read_text().splitlines()]
    settings = GenerationSettings(sampling=SamplingSettings(max_tokens=args.max_tokens))
    print(generate_data(args.target, prompts, data, OfflineEngine, settings, console))

    config = TrainingConfig(epochs=args.epochs, held_out=len(prompts) // 10)
    shape = ReDrafterConfig(12, beam_width=4, beam_length=5, context_matches=0)
    train(TrainingJob(args.target, (data,), drafter, config, shape), console)

    # With the number and the seed of the training these are the conversations that it left out.
    unseen = EvaluationConfig(held_out=config.held_out, seed=config.seed)
    job = EvaluationJob(args.target, str(drafter), (data,), [shape], unseen)
    print_evaluation(console, evaluate(job, console))


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
