"""Run generate-data or capture by several workers of a Ray cluster, each with GPUs of its own.

    python examples/ray_workers.py --workers 4 --gpus 2 \\
        generate-data TARGET --prompts /shared/prompts.jsonl --output /shared/data \\
        --tensor-parallel-size 2

What follows the options of this script is a command of vllm-redrafter, whose paths are absolute and
on a disk that all machines share; for capture, it has `--part {part}`. A worker that is killed, or
whose machine is lost, is started again by Ray, and continues. So does the script itself, if it is
run again.
"""

from __future__ import annotations

import argparse
import os
import sys

import ray


def work(arguments: list[str]) -> int:
    """The exit status of a command, run in a process of Ray's."""
    # vLLM's workers must be no copies of that process, which has threads.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    from vllm_redrafter.cli.main import app

    return app(arguments, standalone_mode=False) or 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--gpus", type=int, default=1, help="of each worker")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()

    ray.init("auto")
    start = ray.remote(num_gpus=args.gpus, max_retries=-1)(work)
    parts = [f"{number + 1}/{args.workers}" for number in range(args.workers)]
    started = [
        start.remote([word.replace("{part}", part) for word in args.command]) for part in parts
    ]
    # Of all of them: those that are running end with this script.
    return max(ray.get(started))


if __name__ == "__main__":
    sys.exit(main())
